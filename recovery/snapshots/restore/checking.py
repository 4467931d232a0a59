"""Whether a stored set can be relied on: every checksum, and that whoever is named really holds the bytes."""

from __future__ import annotations

from understudy.recovery.snapshots._store import StoreError
from understudy.recovery.snapshots.restore.reading import Damaged, SetReader
from understudy.recovery.snapshots.stores.catalogue import StoredSet


def problems_of(stored: StoredSet) -> list[str]:
    """Reads all of it; empty if every byte is what it was and nothing is missing."""
    missing = sorted(set(range(stored.world)) - set(stored.parts))
    if missing:
        return [f"the part of rank {rank} is missing" for rank in missing]
    problems = []
    try:
        with SetReader(stored) as reader:
            for rank, part in reader.parts.items():
                if damaged := part.store.verify(part.part.sequence):
                    problems.append(
                        f"{part.part.path}: contents of rank {rank} are damaged ({len(damaged)}): not what "
                        "they were when their digests were taken"
                    )
                for handle in part.buffers:
                    try:
                        reader.place(rank, handle)
                    except Damaged as problem:
                        problems.append(str(problem))
    except (OSError, StoreError, Damaged) as problem:
        problems.append(str(problem))
    return problems
