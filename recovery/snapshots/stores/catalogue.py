"""What a directory of stores holds: sets of snapshots, and which of them are complete on all ranks.

Nothing here writes.  A store that is damaged or is none is told of, and does not hide others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from typing_extensions import Buffer

from understudy.recovery.snapshots._store import Store, StoreError
from understudy.recovery.snapshots.stores.layout import runs_of, stores_of
from understudy.recovery.snapshots.stores.retention import newest_first


class PayloadStream(Protocol):
    """A payload from its beginning to its end."""

    def read_into(self, into: Buffer) -> None: ...


class Payload(Protocol):
    """What a part consists of: those calls of a Store that read one snapshot, each with its sequence."""

    def extents(self, sequence: int) -> list[tuple[int, int, int]]: ...
    def layout(self, sequence: int) -> list[tuple[int, int, int, int]]: ...
    def read(self, sequence: int, index_of_extent: int, into: Buffer) -> None: ...
    def read_all(self, sequence: int, into: Sequence[Buffer]) -> None: ...
    def read_into(
        self, sequence: int, extents: Sequence[tuple[int, int]], area: Buffer, *, in_place: bool = False
    ) -> None: ...
    def digests(self, sequence: int) -> list[int]: ...
    def stream(self, sequence: int) -> PayloadStream: ...
    def verify(self, sequence: int) -> list[int]: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True)
class StoredPart:
    """One rank's part of a snapshot."""

    path: Path
    sequence: int
    rank: int
    step: int
    bytes: int
    time_ns: int
    """When its bytes were written, nanoseconds since 1970."""

    def open(self) -> Payload:
        """For reading; raises OSError or StoreError."""
        return Store.open(str(self.path), writable=False)


@dataclass(frozen=True)
class StoredSet:
    """A snapshot of all ranks, as far as it is there."""

    job: str
    run: str
    serial: int
    world: int
    parts: Mapping[int, StoredPart]

    @property
    def complete(self) -> bool:
        """Whether every rank's part is durable."""
        return set(self.parts) == set(range(self.world))

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return max(part.step for part in self.parts.values())

    @property
    def bytes(self) -> int:
        """The bytes of all parts."""
        return sum(part.bytes for part in self.parts.values())

    @property
    def time_ns(self) -> int:
        """When the last of its parts was."""
        return max(part.time_ns for part in self.parts.values())


@dataclass(frozen=True)
class Catalogue:
    """`sets` newest first; `problems`: a sentence for each store or slot that cannot be used."""

    sets: tuple[StoredSet, ...]
    problems: tuple[str, ...]


def read_catalogue(directory: Path) -> Catalogue:
    """Raises OSError if there is no such directory."""
    runs = [read_run(run) for run in runs_of(directory)]
    sets = [one for found in runs for one in found.sets]
    sets = newest_first(sets, lambda one: (f"{one.job}/{one.run}", one.serial, one.time_ns))
    return Catalogue(tuple(sets), tuple(problem for found in runs for problem in found.problems))


def read_run(run: Path) -> Catalogue:
    """Reads the directory of one run; raises OSError if there is none."""
    parts: dict[int, dict[int, StoredPart]] = defaultdict(dict)
    worlds: dict[int, int] = {}
    problems: list[str] = []
    for file in stores_of(run):
        try:
            with Store.open(str(file.path), writable=False) as store:
                entries = store.snapshots()
        except (OSError, StoreError) as problem:
            problems.append(f"{file.path}: {problem}")
            continue
        for entry in entries:
            if not entry.valid_header:
                problems.append(f"{file.path}: slot {entry.slot} is damaged")
            elif entry.rank != file.rank:
                problems.append(f"{file.path}: slot {entry.slot} is of rank {entry.rank}")
            else:
                worlds[entry.serial] = max(worlds.get(entry.serial, 1), entry.world)
                parts[entry.serial][entry.rank] = StoredPart(
                    file.path, entry.sequence, entry.rank, entry.step, entry.bytes, entry.time_ns
                )
    sets = [
        StoredSet(run.parent.name, run.name, serial, worlds[serial], found) for serial, found in parts.items()
    ]
    sets.sort(key=lambda one: one.serial, reverse=True)
    return Catalogue(tuple(sets), tuple(problems))


def find_set(run: Path, serial: int) -> StoredSet:
    """A complete set of a run; raises OSError, or StoreError if it is not there."""
    found = read_run(run)
    for one in found.sets:
        if one.serial == serial and one.complete:
            return one
    raise StoreError("; ".join(found.problems) or f"{run} holds no complete snapshot {serial} any more")
