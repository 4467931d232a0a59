"""What the agent needs of jobs on several hosts (spans.py, which needs the agent)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from understudy import replay
from understudy.protos import control_pb2 as pb
from understudy.recovery.host.placement import HostPlacement
from understudy.recovery.migration.places import Place
from understudy.recovery.rendezvous.forwarder import JobHosts
from understudy.recovery.snapshots.writing.part_writer import Parts, PartWriter
from understudy.recovery.snapshots.writing.request import Written
from understudy.recovery.spanning.member.deputy import Deputy
from understudy.recovery.state.jobs import Job, Session


class Started(Protocol):
    """A job that we lead."""

    def start(self) -> None:
        """Once it is open here."""

    async def settle(self) -> None:
        """Until what is known of it outlives this host, if that is to outlive its loss."""


class Images(Protocol):
    """Images of a job's workers."""

    def kept_from(self, session: Session) -> int:
        """Log offset from which on its log is needed for them; 0: it is not."""

    def offer(
        self, serial: int, sessions: Sequence[Session], commits: Mapping[int, replay.Commit], *, pressed: bool
    ) -> None:
        """A set of snapshots that counts, of these commits by rank.  `pressed`: a log is filling up."""


class JobSpans(JobHosts, Protocol):
    """The jobs on several hosts of one proxyd."""

    def begin(self, job: Job) -> Started:
        """We lead it."""

    async def settle_store(self, job: str) -> None:
        """Until what was written to its workers' store outlives this host, if anything is to."""

    def placement(self, job: Job) -> HostPlacement:
        """Where its ranks get devices and servers from."""

    def deputy(self, job: Job) -> Deputy:
        """In place of its coordinator, where another host leads."""

    def parts(self, job: Job, writer: PartWriter, take: Callable[[Written], None]) -> Parts:
        """Who writes snapshots of its ranks: `writer` those of this host."""

    def images(self, job: Job) -> Images | None:
        """Images of workers of a job that we lead, if any are to be taken."""

    async def close(self, job: Job) -> pb.JobReport | None:
        """It is over here; its leader's report, if another host leads and gave one."""

    async def move(self, session: Session, place: Place) -> str:
        """A rank to another host, or any other; raises Refused: it is where it was."""

    def came_here(self, session: Session, directory: Path, pid: int, relay: str) -> None:
        """A rank of another host of a job that we lead, unawaited; raises NotDone and LogError."""

    async def begin_rank(self, job: Job, rank: int, world: int) -> pb.BeginRankReply:
        """Before a rank of a member opens; raises Refused."""

    async def end_rank(self, job: Job, rank: int, session: Session | None) -> None:
        """It has opened, or not; raises Refused."""

    async def ended(self, session: Session) -> None:
        """A rank of another host."""
