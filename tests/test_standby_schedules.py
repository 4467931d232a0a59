"""Through many rough schedules: whoever leads a job on knows of all that was answered or done; one leads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from standby_simulation import simulate

from understudy.recovery.membership import job_leadership
from understudy.recovery.spanning.leader.standby_replication import StandbyReplication

SCHEDULES = int(os.environ.get("UNDERSTUDY_TEST_SCHEDULES") or 150)
LONG_SCHEDULES = int(os.environ.get("UNDERSTUDY_TEST_SCHEDULES") or 3000)


def check(seeds: range, folder: Path) -> None:
    print(f"seeds {seeds}")
    totals = {"writes": 0, "acts": 0, "named": 0, "voided": 0, "led_on": 0, "gave_way": 0}
    for seed in seeds:
        home = folder / str(seed)
        home.mkdir()
        outcome = simulate(seed, home)
        assert not outcome.violations, f"seed {seed}: {outcome.violations}"
        totals = {name: total + getattr(outcome, name) for name, total in totals.items()}
    print(totals)
    assert all(totals.values()), totals  # or it would have shown nothing


def test_no_answered_write_and_no_decision_is_lost_and_no_two_hosts_lead(tmp_path: Path) -> None:
    check(range(SCHEDULES), tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_answered_write_and_no_decision_is_lost_and_no_two_hosts_lead_in_full(tmp_path: Path) -> None:
    check(range(1000, 1000 + LONG_SCHEDULES), tmp_path)


async def _answer_at_once(leaving: StandbyReplication) -> None:
    """Whatever the standby has."""


async def _forget_only(leaving: StandbyReplication, why: str) -> None:
    leaving._forget()
    leaving._lapsed(why)


CARELESS: dict[str, tuple[Any, str, Callable[..., Any], range]] = {
    "a write is answered before the standby has it": (
        StandbyReplication,
        "settle",
        _answer_at_once,
        range(30),
    ),
    "what was decided is done before the standby knows": (
        StandbyReplication,
        "settle_job",
        _answer_at_once,
        range(30),
    ),
    "a standby is let go of but stays named": (StandbyReplication, "_void", _forget_only, range(30)),
    "whose a job is does not matter": (job_leadership, "_other_owner", lambda entry, mine: "", range(400)),
}


@pytest.mark.parametrize("how", CARELESS)
def test_the_schedules_show_what_would_go_wrong_if(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, careless, seeds = CARELESS[how]
    monkeypatch.setattr(owner, name, careless)
    for seed in seeds:
        home = tmp_path / str(seed)
        home.mkdir()
        if found := simulate(seed, home).violations:
            print(f"seed {seed}: {found[0]}")
            return
    pytest.fail(f"nothing was seen in {seeds}")
