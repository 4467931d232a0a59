"""What a server that begins anew at a commit waits for: content of buffers, of shadows and replicas."""

from __future__ import annotations

from collections.abc import Collection

from simulation.fabric import Violation
from simulation.log import Commit
from understudy import replay


class Arriving:
    """Content of buffers as it comes, until the restore is complete."""

    def __init__(self) -> None:
        self._contents: dict[int, bytes | None] = {}
        self._awaited: set[int] = set()

    def begin(self) -> None:
        """Nothing is to come."""
        self._contents, self._awaited = {}, set()

    def begin_at(self, commit: Commit, rank: int) -> None:
        """Shadows are there; all else of the commit that is not lost has to come.  Raises LogError."""
        if not commit.has_manifest:  # a server that went back to a snapshot late has taken it
            raise replay.LogError(f"commit {commit.number} has no manifest")
        if not commit.readable:
            raise Violation(f"rank {rank} is restored from shadows that may have been overwritten")
        self._contents = {row.handle: commit.shadows.get(row.handle) for row in commit.rows}
        self._awaited = self._contents.keys() - commit.shadows.keys() - commit.lost

    def adopt(self, handle: int, content: bytes | None) -> None:
        """Content of a replica; None: it was not kept there.  Raises LogError."""
        if handle not in self._contents:
            raise replay.LogError(f"a replica spoke of an unknown buffer {handle}")
        self._contents[handle] = content
        self._awaited.discard(handle)

    def complete(
        self, table: replay.ByteTable, rank: int, digests: dict[int, int], lost: Collection[int]
    ) -> None:
        """All is there, but what is lost: check it, and put it into the table."""
        self._awaited -= set(lost)
        if self._awaited:
            raise Violation(f"rank {rank} is restored without the content of {sorted(self._awaited)}")
        for handle, content in self._contents.items():
            table.adopt(handle, content or b"\xdd" * 8, content is not None)
            expected = digests.get(handle)
            if content is not None and expected is not None and int.from_bytes(content, "little") != expected:
                raise replay.LogError(f"buffer {handle} copied from a replica differs from this rank's own")
        self._contents = {}
