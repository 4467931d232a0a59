"""Through many rough schedules: whoever leads a job on knows of all that was answered or done; one leads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from standby_simulation import Writer, simulate

from understudy.recovery.membership import job_leadership
from understudy.recovery.record.job_record import JobRecord

SCHEDULES = int(os.environ.get("UNDERSTUDY_TEST_SCHEDULES") or 50)
LONG_SCHEDULES = int(os.environ.get("UNDERSTUDY_TEST_SCHEDULES") or 3000)


def check(seeds: range, folder: Path) -> None:
    print(f"seeds {seeds}")
    names = ("writes", "acts", "named", "ended", "led_on", "led_on_twice", "gave_way")
    totals = dict.fromkeys(names, 0)
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


async def _at_once(writer: Writer) -> None:
    """Whatever is written."""


CARELESS: dict[str, tuple[Any, str, Callable[..., Any], range]] = {
    "a write is answered before it is in the record": (Writer, "before_it_answers", _at_once, range(100)),
    "what was decided is done before it is in the record": (Writer, "before_it_acts", _at_once, range(100)),
    "a record goes on to count when its proxyd died": (
        JobRecord, "follow_predecessor", lambda record: None, range(60)
    ),
    "whose a job is does not matter": (job_leadership, "_other_owner", lambda entry, mine: "", range(400)),
}  # fmt: skip


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
