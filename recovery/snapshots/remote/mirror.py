"""The second tier as a whole: which sets are complete there, copying one more, and what may go."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from understudy import replay
from understudy.recovery.snapshots.remote.mirror_manifest import (
    CHUNK_BYTES,
    LARGEST_MANIFEST,
    Extent,
    MirroredPart,
    MirroredSet,
    decode_manifest,
    encode_manifest,
)
from understudy.recovery.snapshots.remote.second_tier import (
    MANIFEST,
    Remote,
    RemoteFile,
    SetName,
    part_name,
)
from understudy.recovery.snapshots.stores.catalogue import StoredPart, StoredSet
from understudy.recovery.snapshots.stores.layout import in_use
from understudy.recovery.snapshots.stores.retention import (
    KeptSet,
    Retention,
    newest_first,
    superfluous_sets,
)

Tell = Callable[[int], object]
"""Called with the bytes that were moved since the last call."""


@dataclass(frozen=True)
class MirrorCatalogue:
    """`sets`: complete ones, newest first; `problems`: a sentence for each that cannot be used; `orphans`:
    what uploads that were cut short have left."""

    sets: tuple[MirroredSet, ...]
    problems: tuple[str, ...]
    orphans: tuple[RemoteFile, ...]


class Mirror:
    """Every call may raise OSError."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self._manifests: dict[tuple[SetName, int], MirroredSet] = {}
        """By their size too; written once, so that each is read once."""

    def read(self, job: str = "") -> MirrorCatalogue:
        """What is there, of one job or of all."""
        files: dict[SetName, dict[str, RemoteFile]] = defaultdict(dict)
        for file in self.remote.files(job):
            files[file.of][file.name] = file
        sets: list[MirroredSet] = []
        problems: list[str] = []
        orphans: list[RemoteFile] = []
        for of, found in files.items():
            if MANIFEST not in found:
                orphans += found.values()
                continue
            try:
                stored = self._manifest(of, found[MANIFEST].bytes)
                for part in stored.parts:
                    if part.name not in found or found[part.name].bytes != part.bytes:
                        raise ValueError(f"the file of rank {part.rank} is missing or not of its size")
            except (ValueError, FileNotFoundError) as problem:
                problems.append(f"{where(self.remote, of)}: its manifest cannot be used: {problem}")
                continue
            named = {MANIFEST, *(part.name for part in stored.parts)}
            orphans += (file for name, file in found.items() if name not in named)
            sets.append(stored)
        sets = newest_first(sets, lambda one: (f"{one.of.job}/{one.of.run}", one.of.serial, one.time_ns))
        return MirrorCatalogue(tuple(sets), tuple(problems), tuple(orphans))

    def upload(self, stored: StoredSet, tell: Tell = lambda _: None) -> MirroredSet:
        """Copy a complete set; it counts when this returns.  Also raises StoreError.

        It is read with all checksums: one that is overwritten meanwhile is refused, and never copied wrong.
        """
        of = SetName(stored.job, stored.run, stored.serial)
        with contextlib.ExitStack() as stack:
            for run in {part.path.parent for part in stored.parts.values()}:
                stack.enter_context(in_use(run))
            parts = [self._upload_part(of, part, tell) for _, part in sorted(stored.parts.items())]
        mirrored = MirroredSet(of, stored.step, stored.time_ns, CHUNK_BYTES, tuple(parts))
        for known in [known for known in self._manifests if known[0] == of]:
            del self._manifests[known]
        self.remote.write_manifest(of, encode_manifest(mirrored))
        return mirrored

    def tidy(self, job: str, present: str, rule: Retention) -> list[SetName]:
        """Remove what an interrupted upload left, and sets of a job that its retention does not keep.

        Precondition: nobody else uploads sets of this job.  The manifest goes first: whenever this is cut
        short, what is left does not count.
        """
        found = self.read(job)
        by_name = {(one.of.run, one.of.serial): one for one in found.sets}
        kept = [KeptSet(one.of.run, one.of.serial, one.step, one.time_ns) for one in found.sets]
        gone = [by_name[one.run, one.serial] for one in superfluous_sets(kept, present, rule)]
        doomed = [(one.of, [MANIFEST, *(part.name for part in one.parts)]) for one in gone]
        doomed += [(orphan.of, [orphan.name]) for orphan in found.orphans]
        problems: list[OSError] = []
        for of, names in doomed:
            try:
                self.remote.remove(of, names)
            except OSError as problem:  # one that cannot go does not keep the others
                problems.append(problem)
        if problems:
            raise problems[0]
        return [one.of for one in gone]

    def _manifest(self, of: SetName, count: int) -> MirroredSet:
        if count > LARGEST_MANIFEST:
            raise ValueError(f"it has {count} bytes")
        if (of, count) not in self._manifests:
            self._manifests[of, count] = decode_manifest(self.remote.read(of, MANIFEST, 0, count), of)
        return self._manifests[of, count]

    def _upload_part(self, of: SetName, part: StoredPart, tell: Tell) -> MirroredPart:
        name, digests = part_name(part.rank), []
        with part.open() as store:
            payload = store.stream(part.sequence)

            def pieces() -> Iterator[bytes]:
                for begin in range(0, part.bytes, CHUNK_BYTES):
                    content = bytearray(min(CHUNK_BYTES, part.bytes - begin))
                    payload.read_into(content)
                    piece = bytes(content)
                    digests.append(replay.digest(piece))
                    yield piece
                    tell(len(piece))

            extents = tuple(Extent(*row) for row in store.layout(part.sequence))
            self.remote.write(of, name, pieces(), part.bytes)
        return MirroredPart(part.rank, name, part.bytes, extents, tuple(digests))


def where(remote: Remote, of: SetName) -> str:
    """For a person."""
    return f"{remote.url}/{of.job}/{of.run}/{of.serial}"
