"""What somebody who takes a job over is told of its ranks, as if their device servers told it now."""

from __future__ import annotations

from understudy.protos import control_pb2 as pb
from understudy.recovery.planning.takeover.notices import FaultNotice
from understudy.recovery.planning.takeover.reports import OpenFault
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
