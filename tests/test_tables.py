"""What `recoveryctl status` shows a person."""

from __future__ import annotations

import io
from typing import Any, cast

import made_up_ranks
from rich.console import Console

from understudy.recovery.control import pb
from understudy.recovery.jobs import Ended
from understudy.recovery.tables import status_json, status_tables


def shown(status: pb.Status) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(status_tables(status))
    return out.getvalue()


def test_who_leads_a_job_and_who_would_lead_it_on_is_told_once_for_all_its_ranks() -> None:
    ours = [pb.RankStatus(job="ours", rank=rank, heir="c") for rank in (0, 1)]
    others = [pb.RankStatus(job="others", rank=rank, leader="b") for rank in (0, 1)]
    told = shown(pb.Status(ranks=[*ours, *others]))
    assert told.count("job ours: host c leads it on if this one is lost") == 1
    assert told.count("job others: host b leads it") == 1
    assert "leads" not in shown(pb.Status(ranks=[pb.RankStatus(job="alone", rank=0)]))


def test_replayed_values_that_differ_are_told_once_for_all_ranks_of_their_job() -> None:
    status = pb.Status(ranks=[pb.RankStatus(job="ours", rank=rank, replies_different=3) for rank in (0, 1)])
    assert shown(status).count("job ours: 3 replayed values differ from what the program was given") == 1
    assert [rank["replies_different"] for rank in status_json(status)["ranks"]] == [3, 3]
    assert "replayed" not in shown(pb.Status(ranks=[pb.RankStatus(job="ours", rank=0)]))


def test_why_a_jobs_log_may_not_be_relied_on_is_told_once_for_all_its_ranks() -> None:
    def of(**account: str) -> str:
        return shown(pb.Status(ranks=[pb.RankStatus(job="ours", rank=rank, **account) for rank in (0, 1)]))

    assert of(not_validated="no optimizer step").count("job ours: not validated: no optimizer step") == 1
    differing = of(not_replayable="buffer 3", not_validated="no optimizer step")
    assert differing.count("job ours: replay would give other numbers: buffer 3") == 1
    assert "validated" not in differing and "validated" not in of()


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
