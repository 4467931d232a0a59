"""How checkpoints lie on disk, and which of them are whole (paper 002 §4.3).

    latest.json                       the pointer: the newest checkpoint that was finished
    000012-step-40/rank-00000.pt      what torch.save writes, and anybody may load
    000012-step-40/rank-00000.json    published after it: its size, digest, and whose it is

Each file is written under a temporary name, made durable, renamed, and its folder made durable; then comes
the next one, the pointer last. A reader so finds the former state or the new one. `000012` counts
checkpoints, not steps: a run that was taken back to an earlier step goes on with higher numbers. Files are
for their owner alone (0600), and are never executed as pickles: `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from understudy import durable

POINTER = "latest.json"
_FOLDER = re.compile(r"(\d{6,18})-step-(\d{1,18})")
_CHUNK = 1 << 20
_DIGEST = 32


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none can be read."""


class NotWhole(CheckpointError):
    """Of one checkpoint: it is torn, damaged or was never finished. The one before it may be whole."""


@dataclass(frozen=True, order=True)
class Place:
    """One checkpoint: the how-manieth of its directory, and the step behind which it was taken."""

    sequence: int
    step: int

    @property
    def name(self) -> str:
        return f"{self.sequence:06d}-step-{self.step}"


@dataclass(frozen=True)
class Part:
    """What one rank wrote of a checkpoint. Sharded: there are `world_size` of them; else one, of rank 0."""

    sequence: int
    step: int
    rank: int
    world_size: int
    sharded: bool
    size: int
    digest: str
    """BLAKE2b of the payload, 32 bytes as hexadecimal digits."""

    @property
    def parts(self) -> int:
        return self.world_size if self.sharded else 1

    @classmethod
    def of(cls, text: bytes) -> Part:
        """Raises ValueError for what is no such record."""
        fields = durable.json_object(text)
        wanted = {
            name: {"bool": bool, "str": str}.get(str(kind), int) for name, kind in cls.__annotations__.items()
        }
        for name, kind in wanted.items():
            if type(fields.get(name)) is not kind:
                raise ValueError(f"its field {name!r} is {fields.get(name)!r:.40}")
        return cls(**{name: fields[name] for name in wanted})


def payload_name(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def record_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def places(directory: Path) -> list[Place]:
    """All that were begun, newest first; nothing is said of whether they are whole."""
    names = [entry.name for entry in directory.iterdir()] if directory.is_dir() else []
    found = (_FOLDER.fullmatch(name) for name in names)
    return sorted((Place(int(match[1]), int(match[2])) for match in found if match), reverse=True)


def pointed_at(directory: Path) -> Place | None:
    """What the pointer names; None where there is none. Raises NotWhole where it is damaged."""
    try:
        fields = durable.json_object((directory / POINTER).read_bytes())
        match = _FOLDER.fullmatch(str(fields.get("folder")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise NotWhole(f"The pointer {directory / POINTER} cannot be read: {error}.") from None
    if match is None:
        raise NotWhole(f"The pointer {directory / POINTER} names no checkpoint.")
    return Place(int(match[1]), int(match[2]))


def point_at(directory: Path, place: Place) -> None:
    """From now on this is the newest checkpoint."""
    fields = {"folder": place.name, "sequence": place.sequence, "step": place.step}
    publish(directory / POINTER, lambda file: _write_line(file, fields))


def write_part(directory: Path, place: Place, rank: int, world_size: int, sharded: bool, state: Any) -> Part:
    """Payload, then record, each durable before the next. Raises CheckpointError with nothing published."""
    folder = directory / place.name
    make_folder(folder)
    written: list[tuple[int, str]] = []

    def payload(file: IO[bytes]) -> None:
        through = _Hashing(file)
        torch.save(state, cast(IO[bytes], through))
        through.flush()
        _refuse_what_cannot_be_read_back(file.name)
        written.append((through.size, through.hash.hexdigest()))

    publish(folder / payload_name(rank), payload)
    part = Part(place.sequence, place.step, rank, world_size, sharded, *written[0])
    publish(folder / record_name(rank), lambda file: _write_line(file, asdict(part)))
    return part


def read_part(directory: Path, place: Place, rank: int) -> Part:
    """The record of a part, without its payload. Raises NotWhole."""
    path = directory / place.name / record_name(rank)
    try:
        part = Part.of(path.read_bytes())
    except FileNotFoundError:
        raise NotWhole(f"{path} is not there: the checkpoint was not finished.") from None
    except (OSError, ValueError) as error:
        raise NotWhole(f"{path} is damaged: {error}.") from None
    if (part.sequence, part.step, part.rank) != (place.sequence, place.step, rank):
        raise NotWhole(f"{path} is that of another checkpoint: number {part.sequence}, step {part.step}.")
    return part


def is_finished(directory: Path, place: Place) -> bool:
    """Whether all parts have been published, by their records alone."""
    return not missing_parts(directory, place)


def missing_parts(directory: Path, place: Place) -> list[int]:
    """Ranks whose parts have not been published."""
    try:
        parts = read_part(directory, place, 0).parts
    except NotWhole:
        return [0]
    return [rank for rank in range(1, parts) if not (directory / place.name / record_name(rank)).is_file()]


def read_payload(directory: Path, place: Place, part: Part) -> Any:
    """What a part holds, if it is what was written. Raises NotWhole."""
    path = directory / place.name / payload_name(part.rank)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != part.size:
                raise NotWhole(f"{path} has {size} bytes instead of {part.size}.")
            if _digest(file) != part.digest:
                raise NotWhole(f"{path} is damaged: its digest is not the one that was written down.")
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, pickle.UnpicklingError, RuntimeError) as error:
        if isinstance(error, NotWhole):
            raise
        raise NotWhole(f"{path} cannot be read: {error}") from error


def keep_newest(directory: Path, newest: Place, keep: int) -> None:
    """Remove what is older than `newest`, but for the `keep` newest finished ones; the unfinished go, too."""
    older = [place for place in places(directory) if place < newest]
    kept = [place for place in older if is_finished(directory, place)][: keep - 1]
    for place in older:
        if place not in kept:
            shutil.rmtree(directory / place.name, ignore_errors=True)  # the next checkpoint tries again


def publish(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """A file that is there whole and durable, or not at all. Raises CheckpointError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
        durable.sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError | RuntimeError) and not isinstance(error, CheckpointError):
            raise CheckpointError(
                f"{path} could not be written, and what was there before still counts: {error}"
            ) from error
        raise


def make_folder(folder: Path) -> None:
    """For its owner alone, its name durable. Raises CheckpointError where it cannot be."""
    try:
        durable.make_folder(folder)
    except OSError as error:
        raise CheckpointError(f"The folder {folder} cannot be made: {error}") from error


def _refuse_what_cannot_be_read_back(payload: str) -> None:
    """Now, and not when the run has to go on."""
    if foreign := sorted(torch.serialization.get_unsafe_globals_in_checkpoint(payload)):
        raise CheckpointError(
            f"The state holds objects of {', '.join(foreign)}, which are not read back, because that would "
            "execute what the file says; let state_dict() return tensors, numbers, texts, lists and "
            "dictionaries, or name the classes in torch.serialization.add_safe_globals."
        )


def _write_line(file: IO[bytes], fields: Mapping[str, Any]) -> None:
    file.write(json.dumps(fields).encode() + b"\n")


def _digest(file: IO[bytes]) -> str:
    found = hashlib.blake2b(digest_size=_DIGEST)
    while chunk := file.read(_CHUNK):
        found.update(chunk)
    return found.hexdigest()


class _Hashing:
    """A file that knows size and digest of what went through it, so that nothing is read again."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.hash = hashlib.blake2b(digest_size=_DIGEST)
        self.size = 0

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        self.size += len(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()
