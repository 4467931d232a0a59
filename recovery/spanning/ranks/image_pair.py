"""A set of snapshots, and the images of workers that go with it: of use while all ranks can go back to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from understudy.protos import control_pb2 as pb
from understudy.recovery.spanning.ranks.image_file import Taken
from understudy.recovery.state.jobs import Session

EVERY_COMMIT = 1 << 62
"""Of no commit of a log shadows can be used."""

Worker = tuple[str, int, int]
"""Host, pid, start time: an image is of that very process."""


class Place(Protocol):
    """Where a snapshot lies in its rank's log: that of a commit, or what is told of one."""

    @property
    def log_offset(self) -> int: ...

    @property
    def step(self) -> int: ...


@dataclass
class Pair:
    """A set of snapshots, and an image of each worker that is not on our host; or what we have inherited."""

    serial: int
    ranks: frozenset[int]
    commits: Mapping[int, Place]
    """Of the snapshots, by rank."""
    folder: Path
    inherited: bool = False
    """It has images of the former leader's workers only."""
    images: dict[int, Taken] = field(default_factory=dict)
    workers: dict[int, set[Worker]] = field(default_factory=dict)
    """Those that the images are of, and those that have come from them since."""

    @property
    def step(self) -> int:
        """Minibatches that are behind all of it."""
        return max((commit.step for commit in self.commits.values()), default=0)

    def why_useless(self, sessions: Sequence[Session]) -> str:
        """Empty: all ranks can go back to it."""
        if {session.rank for session in sessions} != self.ranks:
            return "workers have been started anew, or have ended"
        for session in sessions:
            known = self.workers.get(session.rank)
            if known is not None and worker_of(session) not in known:
                return f"rank {session.rank} has moved since they were taken"
            page, commit = session.log, self.commits[session.rank]
            places = [kept.commit.log_offset for kept in page.snapshots() if kept.serial == self.serial]
            if commit.log_offset not in places:
                return f"the snapshot that goes with them is gone on rank {session.rank}"
            if page.freed_segments * page.segment_bytes > commit.log_offset:
                return f"the log of rank {session.rank} does not reach back to them"
            if session.host and known is None and not self.inherited:
                return f"rank {session.rank} was on the leading host when they were taken"
        return ""

    def as_set(self) -> pb.ImageSet:
        """The same, of which no other host keeps anything."""
        images = pb.ImageSet(serial=self.serial, cut=cut_of(self.commits))
        for rank, workers in self.workers.items():
            for host, pid, ticks in workers:
                images.workers.add(rank=rank, host=host, worker=pb.Process(pid=pid, start_ticks=ticks))
        return images


def cut_of(commits: Mapping[int, Place]) -> list[pb.CutPlace]:
    """Where snapshots lie, as it is written down."""
    return [
        pb.CutPlace(rank=rank, log_offset=commit.log_offset, step=commit.step)
        for rank, commit in sorted(commits.items())
    ]


def worker_of(session: Session) -> Worker:
    """The process that runs now."""
    return session.host, session.worker.pid, session.worker.start_ticks
