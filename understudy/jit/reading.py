"""Reads what lies in a directory of shards. All of it is hostile until it has been looked at.

    DIR/job.json                                        whose it is
    DIR/announced/000003/attempt.json, rank-0.json, …   the world of each attempt, in their order
    DIR/attendance/000003/rank-0.step-12                who arrived at a save, and with which step
    DIR/step-12.shard-pp0.rank-0.<unique>/metadata.json, payload      one save
    DIR/damaged/<name of a save>                        somebody has read its payload, and it was not whole
    DIR/.<what>.rank-0.<unique>                         being made, or the remains of a crash: does not count

No link is followed, nothing is opened that is not a regular file or a folder of the expected owner, metadata
ends at 1 MiB, and no name in it leads out of its folder. Times are never compared: attempts are numbered.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

from understudy.durable import json_object

from . import digest
from .assembly import Attempt, Save
from .digest import FileDigest, Unfit
from .identity import Identity, is_number, shown, text_problem

FORMAT = 1
JOB, METADATA, PAYLOAD = "job.json", "metadata.json", "payload"
ANNOUNCED, ATTENDANCE, DAMAGED = "announced", "attendance", "damaged"
MOST_METADATA = 1 << 20
SAVED, PERIODIC = "jit", "periodic"
_HEXADECIMAL = re.compile(r"[0-9a-f]{16}")
_FOLDER = re.compile(r"step-(\d{1,16})\.shard-[\w%~-]{1,120}\.rank-(\d{1,7})\.[0-9a-f]{16}", re.ASCII)
HIDDEN = re.compile(r"\.[a-z]{1,16}\.rank-(\d{1,7})\.[0-9a-f]{16}", re.ASCII)
_NUMBER = re.compile(r"\d{6,12}", re.ASCII)
_RANK = re.compile(r"rank-(\d{1,7})\.json", re.ASCII)
_ARRIVAL = re.compile(r"rank-(\d{1,7})\.step-(\d{1,16})", re.ASCII)
_LONGEST_QUOTED = 80
_LONGEST_REASON = 2000


class NotWhole(ValueError):
    """One save, or one record, does not count; the text says why, behind its subject."""


def quoted(shard: str) -> str:
    """A shard's name as part of a folder's; long names are cut, with a digest behind them."""
    text = quote(shard, safe="").replace(".", "%2E")
    return text if len(text) <= _LONGEST_QUOTED else f"{text[:60]}-{digest.of_bytes(shard.encode())}"


def folder_name(step: int, shard: str, rank: int, unique: str) -> str:
    """Of one save."""
    return f"step-{step}.shard-{quoted(shard)}.rank-{rank}.{unique}"


def step_and_rank(name: str) -> tuple[int, int] | None:
    """Of a save, by the name of its folder; None if it is that of none."""
    match = _FOLDER.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def sealed(fields: Mapping[str, Any]) -> bytes:
    """A record with its own digest in it."""
    text = json.dumps(dict(fields), sort_keys=True)
    return (
        json.dumps(dict(fields) | {"seal": digest.of_bytes(text.encode())}, sort_keys=True).encode() + b"\n"
    )


def unsealed(text: bytes) -> dict[str, Any]:
    """Raises ValueError for what is not what `sealed` made."""
    fields = json_object(text)
    seal = fields.pop("seal", None)
    try:
        if seal != digest.of_bytes(json.dumps(fields, sort_keys=True).encode()):
            raise ValueError("its digest is not that of its fields")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if fields.get("format") != FORMAT:
        raise ValueError(f"its format is {fields.get('format')!r:.40}, and this version reads {FORMAT}")
    return fields


class Directory:
    """A directory of shards, read without changing it.

    `owner`: uid that everything in it must have. Saves that have been read once are remembered, since a save
    never changes; their payloads are looked at anew each time.
    """

    def __init__(self, path: Path, owner: int) -> None:
        self.path, self.owner = path, owner
        self._saves: dict[str, Save] = {}

    def job(self) -> str:
        """Raises NotWhole, and FileNotFoundError where nobody has come yet."""
        return _text(self._record(JOB), "job")

    def names(self) -> list[str]:
        """Of folders that look like saves, unread. Raises OSError."""
        return sorted(name for name in os.listdir(self.path) if step_and_rank(name))

    def unfinished(self) -> list[str]:
        """What is being made, and remains. Raises OSError."""
        return sorted(name for name in os.listdir(self.path) if HIDDEN.fullmatch(name))

    def saves(self, names: Iterable[str] | None = None) -> tuple[list[Save], dict[str, str]]:
        """Those with metadata in order, payloads unseen; and why the others do not count, by name.

        Raises OSError where the directory cannot be listed.
        """
        found, problems = [], {}
        for name in self.names() if names is None else names:
            try:
                if name not in self._saves:
                    self._saves[name] = self._save(name)
                found.append(self._saves[name])
            except NotWhole as problem:
                problems[name] = str(problem)
        return found, problems

    def attempts(self) -> list[Attempt]:
        """In the order of their starts. A number whose records are damaged is an attempt without a world."""
        return [self.attempt(number) for number in self.numbers()]

    def numbers(self) -> list[int]:
        """Of attempts, in the order of their starts."""
        try:
            names = os.listdir(self.path / ANNOUNCED)
        except OSError:
            return []
        return sorted(int(name) for name in names if _NUMBER.fullmatch(name))

    def header(self, number: int) -> tuple[str, int]:
        """Name and world size of an attempt; of one whose record is damaged "" and 0."""
        try:
            fields = self._record(f"{ANNOUNCED}/{number:06d}/attempt.json")
            return _text(fields, "attempt"), _whole(fields, "world_size")
        except (NotWhole, OSError):
            return "", 0

    def attempt(self, number: int) -> Attempt:
        """What its ranks have announced so far."""
        place = f"{ANNOUNCED}/{number:06d}"
        name, world = self.header(number)
        try:
            listed = os.listdir(self.path / place)
        except OSError:
            listed = []
        shards, hosts = {}, {}
        for match in filter(None, map(_RANK.fullmatch, listed)):
            try:
                fields = self._record(f"{place}/{match[0]}")
                rank, shard, host = _whole(fields, "rank"), _text(fields, "shard"), _text(fields, "host")
            except (NotWhole, OSError):
                continue
            if rank == int(match[1]) and rank < world:
                shards[rank], hosts[rank] = shard, host
        return Attempt(number, name, world, shards, hosts)

    def arrivals(self, number: int) -> dict[int, int]:
        """Step by rank, of the ranks of an attempt that have arrived at a save."""
        found: dict[int, int] = {}
        try:
            names = os.listdir(self.path / ATTENDANCE / f"{number:06d}")
        except OSError:
            return found
        for match in filter(None, map(_ARRIVAL.fullmatch, names)):
            found[int(match[1])] = max(int(match[2]), found.get(int(match[1]), 0))
        return found

    def verify(self, save: Save, contents: bool = True) -> None:
        """That the payload is what was saved; without `contents`, by the sizes alone. Raises NotWhole."""
        try:
            root = os.open(save.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                for name, wanted in save.files.items():
                    self._compare(root, name, wanted, contents)
            finally:
                os.close(root)
        except Unfit as error:
            raise NotWhole(str(error)) from None
        except (OSError, ValueError) as error:
            if isinstance(error, NotWhole):
                raise
            raise NotWhole(f"its payload cannot be read: {error}") from None

    def verify_all(self, saves: Iterable[Save]) -> dict[str, str]:
        """Why payloads do not count, by the names of their saves."""

        def problem(save: Save) -> tuple[str, str | None]:
            try:
                self.verify(save)
            except NotWhole as error:
                return save.name, str(error)
            return save.name, None

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            return {name: text for name, text in pool.map(problem, saves) if text is not None}

    def _compare(self, root: int, name: str, wanted: FileDigest, contents: bool) -> None:
        with digest.opened_below(root, name) as (number, status):
            self._own(status, name)
            if not stat.S_ISREG(status.st_mode):
                raise NotWhole(f"{shown(name)} is no regular file")
            if status.st_size != wanted.size:
                raise NotWhole(f"{shown(name)} has {status.st_size} bytes instead of {wanted.size}")
            if contents and digest.of_file(number, wanted.algorithm) != wanted:
                raise NotWhole(f"{shown(name)} has not the digest that was written down")

    def _save(self, name: str) -> Save:
        expected = step_and_rank(name)
        try:
            fields = self._record(f"{name}/{METADATA}")
            save = _parsed(fields, self.path / name)
        except FileNotFoundError:
            raise NotWhole(f"it has no {METADATA}: it was not finished") from None
        except OSError as error:
            raise NotWhole(f"its {METADATA} cannot be read: {error}") from None
        unique = name.rpartition(".")[2]
        if (save.step, save.rank) != expected or folder_name(
            save.step, save.shard, save.rank, unique
        ) != name:
            raise NotWhole(f"its {METADATA} is that of step {save.step}, rank {save.rank}, another save")
        return save

    def _record(self, path: str) -> dict[str, Any]:
        """Raises NotWhole, and OSError."""
        try:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return unsealed(self._bytes(folder, path))
            finally:
                os.close(folder)
        except OSError:
            raise
        except ValueError as error:
            raise NotWhole(f"{path.rpartition('/')[2]} is damaged: {error}") from None

    def _bytes(self, folder: int, path: str) -> bytes:
        with digest.opened_below(folder, path) as (number, status):
            self._own(status, path)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is no regular file")
            text = os.pread(number, MOST_METADATA + 1, 0) if status.st_size <= MOST_METADATA else None
        if text is None or len(text) > MOST_METADATA:
            raise ValueError(f"it has more than {MOST_METADATA} bytes")
        return text

    def _own(self, status: os.stat_result, name: str) -> None:
        if status.st_uid != self.owner:
            raise NotWhole(f"{shown(name)} belongs to uid {status.st_uid}, and not to {self.owner}")


def read_export(path: Path, owner: int) -> dict[str, Any]:
    """The snapshot.json of a `recoveryctl snapshots export`. Raises NotWhole, in words behind its subject."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fields = json_object(Directory(path, owner)._bytes(folder, "snapshot.json"))
        finally:
            os.close(folder)
    except (OSError, ValueError) as error:
        raise NotWhole(f"its snapshot.json cannot be read: {error}") from None
    if not is_number(fields.get("step")):
        raise NotWhole("its snapshot.json names no step")
    if not is_number(fields.get("ranks")) or not isinstance(fields.get("one_for_all_ranks"), bool):
        raise NotWhole("its snapshot.json does not say for which ranks it is")
    return fields


def absent_at(payload: Path) -> str:
    """Ranks and hosts that did not arrive, by the metadata beside a payload, for people."""
    try:
        found = unsealed((payload.parent / METADATA).read_bytes())
    except (OSError, ValueError):
        return ""
    return ", ".join(f"rank {one['rank']} ({one['host']})" for one in found.get("absent", []))


def metadata_of(
    who: Identity,
    step: int,
    reason: str,
    root: Path | None,
    payload: str,
    files: Mapping[str, FileDigest],
    absent: Mapping[int, str],
    versions: Mapping[str, str],
) -> bytes:
    """The text of a save's metadata.

    `root`: where the payload of a periodic checkpoint lies. `absent`: host by rank, of the ranks that did not
    arrive.
    """
    return sealed(
        {
            "format": FORMAT, "kind": SAVED if root is None else PERIODIC, "step": step,
            "reason": reason[:_LONGEST_REASON],
            "job": who.job, "shard": who.shard, "rank": who.rank, "world_size": who.world_size,
            "host": who.host, "attempt": who.attempt, "root": None if root is None else str(root),
            "payload": payload, "algorithm": digest.ALGORITHM,
            "files": {name: [file.size, file.digest] for name, file in files.items()},
            "absent": [{"rank": rank, "host": host} for rank, host in sorted(absent.items())],
            "versions": dict(versions),
        }
    )  # fmt: skip


def _parsed(fields: Mapping[str, Any], folder: Path) -> Save:
    """Raises NotWhole."""
    if fields.get("kind") not in (SAVED, PERIODIC) or fields.get("algorithm") not in digest.ALGORITHMS:
        raise NotWhole("its metadata is of a kind that this version does not know")
    reason, root, payload = fields.get("reason"), fields.get("root"), fields.get("payload")
    if not isinstance(reason, str) or not isinstance(payload, str):
        raise NotWhole("its metadata has a reason or a payload that is no text")
    if (
        "root" not in fields
        or (fields["kind"] == SAVED) != (root is None)
        or not (root is None or _is_place(root))
    ):
        raise NotWhole("its metadata says of its payload that it lies nowhere")
    try:
        listed, algorithm = fields["files"].items(), fields["algorithm"]
        files = {name: _file(name, value, payload, algorithm) for name, value in listed}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise NotWhole("its metadata has a list of files that is none") from None
    if not 0 < len(files) <= digest.MOST_FILES:
        raise NotWhole(f"its metadata lists {len(files)} files")
    rank, world = _whole(fields, "rank"), _whole(fields, "world_size")
    if not rank < world or not _is_absence(fields.get("absent")):
        raise NotWhole("its metadata names ranks that are none")
    texts = {name: _text(fields, name) for name in ("job", "shard", "host", "attempt")}
    return Save(
        **texts, name=folder.name, root=folder if root is None else Path(root), payload=payload, rank=rank,
        world_size=world, step=_whole(fields, "step"), reason=reason, periodic=root is not None, files=files,
        digest=digest.of_payload(files), metadata=fields,
    )  # fmt: skip


def _file(name: str, value: Any, payload: str, algorithm: str) -> FileDigest:
    parts = name.split("/")
    size, found = value
    if parts[0] != payload or len(parts) > digest.DEEPEST + 1 or "\0" in name or {"", ".", ".."} & set(parts):
        raise ValueError(name)
    if not is_number(size) or not isinstance(found, str) or not _HEXADECIMAL.fullmatch(found):
        raise ValueError(value)
    return FileDigest(size, found, algorithm)


def _is_absence(ranks: object) -> bool:
    return isinstance(ranks, list) and all(
        isinstance(one, dict) and is_number(one.get("rank")) and isinstance(one.get("host"), str)
        for one in ranks
    )


def _is_place(text: object) -> bool:
    return (
        isinstance(text, str) and os.path.isabs(text) and "\0" not in text and os.path.normpath(text) == text
    )


def _whole(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if not is_number(value):
        raise NotWhole(f"its field {name!r} is {str(value)[:40]!r}, which is no number from 0 to 2^53")
    return int(value)  # type: ignore[arg-type]


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if complaint := text_problem(value):
        raise NotWhole(f"its field {name!r} {complaint}")
    return str(value)
