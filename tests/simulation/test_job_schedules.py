"""Random schedules of jobs on several hosts, with all their proxyds (tests/harness/job_simulation)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
from job_simulation.run import simulate
from simulation.run import quiet

from understudy.recovery.planning.takeover import takeover
from understudy.recovery.spanning.leader.lead import Lead

SCHEDULES = 40
"""`make simulate-jobs` runs 100,000."""


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    quiet()
    yield
    structlog.reset_defaults()


@pytest.mark.timeout(300)
def test_a_job_on_several_hosts_ends_as_undisturbed_or_for_a_reason(seed: int) -> None:
    """Whichever servers, proxyds, links and devices fail, whoever moves, with etcd there or not."""
    faults: Counter[str] = Counter()
    ended = adopted = 0
    for number in range(seed * SCHEDULES, (seed + 1) * SCHEDULES):
        outcome = simulate(number)
        assert not outcome.violations, f"--seed {number}: {outcome.violations[0]}"
        faults.update(outcome.faults)
        ended, adopted = ended + outcome.ended, adopted + outcome.adopted
    print(ended, adopted, faults)
    assert ended > SCHEDULES and adopted and faults["cut"] and faults["proxyd died"]


@pytest.mark.parametrize("number", [51342, 52351, 52828, 61028])
def test_a_schedule_that_once_went_wrong_does_not(number: int) -> None:
    assert not simulate(number).violations


def test_a_schedule_runs_in_the_same_way_each_time() -> None:
    once, again = simulate(7), simulate(7)
    assert (once.events, once.plans, once.virtual_s) == (again.events, again.plans, again.virtual_s)


async def nobody_is_told(_: Lead) -> None:
    """Of what was decided."""


CARELESS: dict[str, tuple[Any, str, Callable[..., Any], int]] = {
    "what was decided is done before it is written down": (Lead, "settle", nobody_is_told, 0),
    "whoever takes a job over is told of no fault": (
        takeover, "notices_of", lambda reports: iter(()), 73
    ),
    "faults of ranks that a leader hears of anew do not matter": (
        Lead, "_tell_of_faults", lambda lead, member, news: member.told_all({}), 78
    ),
    "ranks of which their host tells no more go on": (Lead, "_not_there", lambda *_: None, 15),
}  # fmt: skip


@pytest.mark.parametrize("how", CARELESS)
def test_the_schedules_show_what_would_go_wrong_if(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, careless, number = CARELESS[how]
    monkeypatch.setattr(owner, name, careless)
    found = simulate(number, longest_s=200.0).violations
    print(*found, sep="\n")
    assert found
