"""What a directory of stores holds: sets of snapshots, and which of them are complete on all ranks.

Nothing here writes.  A store that is damaged or is none is told of, and does not hide others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from recovery.persistence._store import Store, StoreError
from recovery.persistence.layout import runs_of, stores_of


@dataclass(frozen=True)
class StoredPart:
    """One rank's part of a snapshot."""

    path: Path
    sequence: int
    rank: int
    step: int
    bytes: int
    time_ns: int
    """When it was begun, nanoseconds since 1970."""


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
        """Of all parts."""
        return sum(part.bytes for part in self.parts.values())

    @property
    def time_ns(self) -> int:
        """When its last part was begun."""
        return max(part.time_ns for part in self.parts.values())


@dataclass(frozen=True)
class Catalogue:
    """`sets` newest first; `problems`: a sentence for each store or slot that cannot be used."""

    sets: tuple[StoredSet, ...]
    problems: tuple[str, ...]


def read_catalogue(directory: Path) -> Catalogue:
    """Raises OSError if there is no such directory."""
    parts: dict[tuple[str, str, int], dict[int, StoredPart]] = defaultdict(dict)
    worlds: dict[tuple[str, str, int], int] = {}
    problems: list[str] = []
    for run in runs_of(directory):
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
                    key = (run.parent.name, run.name, entry.serial)
                    worlds[key] = max(worlds.get(key, 1), entry.world)
                    parts[key][entry.rank] = StoredPart(
                        file.path, entry.sequence, entry.rank, entry.step, entry.bytes, entry.time_ns
                    )
    sets = [StoredSet(*key, worlds[key], found) for key, found in parts.items()]
    sets.sort(key=lambda one: (one.time_ns, one.serial), reverse=True)
    return Catalogue(tuple(sets), tuple(problems))
