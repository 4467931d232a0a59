"""A rank as its host describes it to another."""

from __future__ import annotations

from understudy import replay
from understudy.protos import control_pb2 as pb
from understudy.recovery.config.settings import Settings
from understudy.recovery.state.jobs import Session


def description(
    session: Session, settings: Settings, whole: pb.RankNews, *, parked: bool
) -> pb.RankDescription:
    """All that a leader must know of a rank that it does not know yet.

    `whole`: its control page (Feed.whole); `parked`: its server stands still, as a leader told it.
    """
    page, server = session.log, session.server
    return pb.RankDescription(
        rank=session.rank, world=session.world, device=session.device, device_index=session.device_index,
        asked_index=session.asked_index, threads=session.threads, worker=session.worker.message(),
        server=server.process.message(), socket=str(server.socket), directory=str(session.directory),
        relay=session.relay, generation=session.generation,
        holds_state=session.has_state and not session.rolling, restored_commit=session.restored_commit,
        resumed_commit=session.resumed_commit, state=b"".join(block.data for block in whole.blocks),
        manifests=whole.manifests, sequence=whole.sequence, now_ns=whole.now_ns,
        data_address=server.data_address, lost=session.state == "lost", parked=parked,
        leaving=session.moving is not None, suspect=server.suspect, orders=replay.control_orders(page),
        sizes=pb.LogSizes(
            segment_bytes=page.segment_bytes, segment_count=page.segment_count,
            dictionary_bytes=page.dictionary_bytes, reply_bytes=settings.reply_bytes,
            shadow_bytes=settings.shadow_bytes,
            snapshot_bytes=settings.snapshot_bytes if settings.snapshot_overhead else 0,
        ),
    )  # fmt: skip
