"""The leader's side of snapshots on storage: each host writes the parts of its own ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import aclosing

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.commands import NotDone
from understudy.recovery.snapshots.writing.part_writer import Known, PartWriter
from understudy.recovery.snapshots.writing.request import Discard, Release, Written
from understudy.recovery.spanning.leader.lead import ASK_S, Lead
from understudy.recovery.state.jobs import Session

log = structlog.get_logger()

LONGEST_ERROR = 300
"""Characters of what a member says."""


class FarParts:
    """Has the parts of one job that we lead written."""

    def __init__(self, lead: Lead, writer: PartWriter, take: Callable[[Written], None]) -> None:
        """`writer` is this host's."""
        self._lead, self._writer, self._take = lead, writer, take
        self._run_here = ""
        """The newest of which this host writes parts."""

    def persist(self, serial: int, run: str, sessions: Sequence[Session], known: Known) -> None:
        """Each host those of its ranks."""
        hosts: dict[str, list[Session]] = defaultdict(list)
        for session in sessions:
            hosts[session.host].append(session)
        for host, there in hosts.items():
            if host:
                self._lead.run_beside(self._ask(host, serial, run, there, known))
            else:
                self._run_here = run
                self._writer.persist(serial, run, there, known)

    def tell(self, request: Release | Discard, step: int = 0) -> None:
        """All hosts; one that does not hear of it learns it with the next set."""
        if request.run == self._run_here:
            self._writer.tell(request, step)
        message = pb.ConcludeSetRequest(
            serial=request.serial, run=request.run, complete=isinstance(request, Release), step=step,
            **self._lead.credentials(),
        )  # fmt: skip
        for host in self._lead.members:
            self._lead.run_beside(self._conclude(host, message))

    def dismiss(self) -> None:
        """Members do so by themselves."""
        self._writer.dismiss()

    def break_off(self) -> None:
        """What others write is of no use, and does no harm."""
        self._writer.break_off()

    async def _ask(self, host: str, serial: int, run: str, sessions: Sequence[Session], known: Known) -> None:
        missing = {session.rank for session in sessions}
        request = pb.WritePartsRequest(
            serial=serial, run=run, ranks=sorted(missing), known=known or (), **self._lead.credentials()
        )
        try:
            for session in sessions:  # the lease of what is to be read
                await self._lead.steering.flush(session)
            async with aclosing(self._lead.members[host].stream("WriteParts", request)) as parts:
                async for part in parts:
                    if part.rank in missing:
                        missing.discard(part.rank)
                        self._take(written(serial, run, host, part))
            problem = f"host {host}: its answer is missing"
        except NotDone as failure:
            problem = str(failure)[:LONGEST_ERROR]
        for rank in sorted(missing):
            self._take(Written(serial, run, rank, error=problem))

    async def _conclude(self, host: str, message: pb.ConcludeSetRequest) -> None:
        try:
            await self._lead.members[host].ask("ConcludeSet", message, ASK_S)
        except NotDone as problem:
            log.debug("a host was not told of a set", job=message.job, host=host, problem=str(problem))


def written(serial: int, run: str, host: str, part: pb.WrittenPart) -> Written:
    """What a member tells of a rank's part, which need not be true."""
    error = f"host {host}: {part.error[:LONGEST_ERROR]}" if part.error else ""
    return Written(serial, run, part.rank, part.step, part.bytes, part.seconds, error, gone=part.gone)
