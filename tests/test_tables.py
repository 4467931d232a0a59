"""What `recoveryctl status` shows a person."""

from __future__ import annotations

import io

from rich.console import Console

from understudy.recovery.control import pb
from understudy.recovery.tables import status_tables


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
