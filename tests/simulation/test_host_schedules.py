"""Random schedules of hosts that are cut off, and of proxyds that die (tests/harness/hosts_simulation)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
from hosts_simulation import moving
from simulation.run import quiet

SCHEDULES = 120
"""`make simulate-hosts` runs 100,000."""


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    quiet()
    yield
    structlog.reset_defaults()


@pytest.mark.timeout(300)
def test_a_worker_that_moves_between_hosts_runs_once_at_any_time(seed: int) -> None:
    """Whoever dies and whatever is cut; in the end it runs, or has ended, and nothing else is left."""
    moved = 0
    for number in range(seed * SCHEDULES, (seed + 1) * SCHEDULES):
        outcome = moving.simulate(number)
        assert not outcome.violations, f"--seed {number}: {outcome.violations[0]}"
        moved += outcome.counts["moved"]
    assert moved > SCHEDULES


GONE_WRONG = [13, 23, 62, 86, 87, 97, 99, 167, 184, 282, 354, 462, 503, 781, 1335, 1978, 91638, 337565368239]


@pytest.mark.parametrize("number", GONE_WRONG)
def test_a_schedule_that_once_went_wrong_does_not(number: int) -> None:
    assert not moving.simulate(number).violations


def test_a_schedule_runs_in_the_same_way_each_time() -> None:
    assert moving.simulate(7).told == moving.simulate(7).told
