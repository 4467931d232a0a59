"""What is kept of sessions that have ended."""

from __future__ import annotations

from typing import Any, cast

import made_up_ranks

from understudy.recovery.control import pb
from understudy.recovery.jobs import Ended


def test_values_that_differed_still_count_once_their_session_has_ended() -> None:
    """torchrun starts ranks anew: the script goes on, and its first session is no more."""
    job = made_up_ranks.a_job(2)
    cast(Any, made_up_ranks.log_of(job, 0)).replies_different = 2
    former = Ended(
        rank=0, clean=False, steps=1, calls_per_step=1, bytes_per_step=1, replies_compared=9,
        replies_different=3, recent_calls=(), status=pb.RankStatus(),
    )  # fmt: skip
    job.ended.append(former)
    assert job.replies_different() == {0: 5, 1: 0}
    assert job.report().replies_different == 5
