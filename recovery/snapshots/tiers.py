"""Where `recoveryctl snapshots` looks for sets: a directory of stores, or the second tier at a URL."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

from understudy import replay
from understudy.recovery.snapshots.remote.fetched import as_stored
from understudy.recovery.snapshots.remote.mirror import Mirror, where
from understudy.recovery.snapshots.remote.mirror_manifest import MirroredPart, MirroredSet
from understudy.recovery.snapshots.remote.second_tier import Remote, SetName, is_url
from understudy.recovery.snapshots.restore.checking import problems_of
from understudy.recovery.snapshots.restore.reading import Damaged
from understudy.recovery.snapshots.stores.catalogue import Catalogue, StoredSet, read_catalogue


class Tier(Protocol):
    """Holds sets.  Nothing there is changed."""

    def catalogue(self, job: str) -> Catalogue:
        """What is stored of one job, or of all ("").  Raises OSError."""

    def problems_of(self, stored: StoredSet) -> list[str]:
        """Reads all of it; empty if every byte is what it was and nothing is missing."""

    def readable(self, stored: StoredSet, beside: Path) -> AbstractContextManager[StoredSet]:
        """The set where SetReader can read it, within the block; may need room `beside` a path.

        Raises OSError or Damaged.
        """


class StoreDirectory:
    """What --persist named."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def catalogue(self, job: str) -> Catalogue:
        """As Tier has it."""
        found = read_catalogue(self._directory)
        return Catalogue(tuple(one for one in found.sets if job in ("", one.job)), found.problems)

    def problems_of(self, stored: StoredSet) -> list[str]:
        """As Tier has it."""
        return problems_of(stored)

    def readable(self, stored: StoredSet, beside: Path) -> AbstractContextManager[StoredSet]:
        """As Tier has it."""
        return nullcontext(stored)


class MirrorTier:
    """What --mirror named."""

    def __init__(self, url: str) -> None:
        """Raises BadInput."""
        self._remote = Remote(url)
        self._sets: dict[SetName, MirroredSet] = {}

    def catalogue(self, job: str) -> Catalogue:
        """As Tier has it; uploads that are not complete are not in it."""
        found = Mirror(self._remote).read(job)
        self._sets = {one.of: one for one in found.sets}
        return Catalogue(tuple(as_stored(one, Path()) for one in found.sets), found.problems)

    def problems_of(self, stored: StoredSet) -> list[str]:
        """As Tier has it; nothing is stored here."""
        found, problems = self._sets[_name(stored)], []
        for part in found.parts:
            try:
                for _ in self._checked(found, part):
                    pass
            except (OSError, Damaged) as problem:
                problems.append(str(problem))
        return problems

    @contextmanager
    def readable(self, stored: StoredSet, beside: Path) -> Iterator[StoredSet]:
        """As Tier has it: fetched into a directory that goes with the block."""
        found = self._sets[_name(stored)]
        beside.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{beside.name}.fetched-", dir=beside.parent) as folder:
            for part in found.parts:
                with open(os.open(Path(folder) / part.name, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                    file.writelines(self._checked(found, part))
            yield as_stored(found, Path(folder))

    def _checked(self, found: MirroredSet, part: MirroredPart) -> Iterator[bytes]:
        """Its payload, chunk by chunk; raises OSError or Damaged."""
        for index, digest in enumerate(part.digests):
            begin = index * found.chunk_bytes
            end = min(begin + found.chunk_bytes, part.bytes)
            chunk = self._remote.read(found.of, part.name, begin, end)
            if len(chunk) != end - begin or replay.digest(chunk) != digest:
                raise Damaged(
                    f"{where(self._remote, found.of)}/{part.name}: bytes {begin} to {end} of "
                    f"rank {part.rank} are not what they were"
                )
            yield chunk


def tier_at(text: str) -> Tier:
    """A URL or a directory; raises BadInput."""
    return MirrorTier(text) if is_url(text) else StoreDirectory(Path(text))


def _name(stored: StoredSet) -> SetName:
    return SetName(stored.job, stored.run, stored.serial)
