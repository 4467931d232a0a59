"""What a takeover makes of the ranks that are remembered, and tells of them."""

from __future__ import annotations

from collections.abc import Callable

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.server import Server
from understudy.recovery.planning.takeover.notices import FaultNotice
from understudy.recovery.planning.takeover.reports import OpenFault
from understudy.recovery.planning.takeover.servers import ServerReport, serving
from understudy.recovery.state.jobs import Session


def open_fault(report: pb.FaultReport | None) -> OpenFault | None:
    """At which a device server stands; None: at none."""
    if report is None or not report.kind:
        return None
    return OpenFault(report.kind, report.message, report.record_index)


def report_of(notice: FaultNotice, session: Session) -> pb.FaultReport:
    """A notice of what is true now of a rank: whichever generation it came up in, it is none of the past."""
    index = notice.record_index
    return pb.FaultReport(
        job=session.job.name, rank=notice.rank, kind=notice.kind, message=notice.message,
        generation=session.generation if notice.of_communicators else session.server.generation,
        record_index=session.log.cursor_index if index is None else index,
    )  # fmt: skip


def keep_one_server(session: Session, retire: Callable[[Server], None]) -> None:
    """Whoever had one server of a rank follow another is gone: one of them goes on with it.

    The other is ended by `retire`.
    """
    server, source = session.server, session.source_server
    if source is None or source is server:  # nothing has come of the other one yet
        return
    found = (
        ServerReport(server.process.running, session.has_state and not session.rolling),
        ServerReport(source.process.running, holds_state=True),
    )
    chosen, session.source_server = serving(found), None
    if chosen.index:
        session.server, session.lacks_state, session.rolled_commit = source, False, 0
        source.suspect, source.retired = chosen.suspect, False
    retire(server if chosen.index else source)
