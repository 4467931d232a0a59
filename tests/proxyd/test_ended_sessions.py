"""What is kept of sessions that have ended."""

from __future__ import annotations

from typing import Any, cast

import made_up_ranks

from understudy.protos import control_pb2 as pb
from understudy.recovery.state.counts import Ended


def _ended(rank: int, device: str = "cpu:0", replies_different: int = 0) -> Ended:
    return Ended(
        rank=rank, clean=False, steps=1, calls_per_step=1, bytes_per_step=1, replies_compared=9,
        replies_different=replies_different, recent_calls=(), status=pb.RankStatus(rank=rank, device=device),
    )  # fmt: skip


def test_values_that_differed_still_count_once_their_session_has_ended() -> None:
    """torchrun starts ranks anew: the script goes on, and its first session is no more."""
    job = made_up_ranks.a_job(2)
    cast(Any, made_up_ranks.log_of(job, 0)).replies_different = 2
    job.ended.append(_ended(0, replies_different=3))
    assert job.replies_different() == {0: 5, 1: 0}
    assert job.report().replies_different == 5


def test_the_report_tells_ranks_by_number_whichever_ended_first_and_lives_of_a_rank_in_turn() -> None:
    job = made_up_ranks.a_job(2)
    job.ended += [_ended(1, "cpu:1"), _ended(0, "cpu:0"), _ended(1, "cpu:3"), _ended(0, "cpu:2")]
    told = [(status.rank, status.device) for status in job.report().ranks]
    assert told == [(0, "cpu:0"), (0, "cpu:2"), (1, "cpu:1"), (1, "cpu:3")]
