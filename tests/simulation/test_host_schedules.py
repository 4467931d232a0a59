"""Random schedules of hosts that are cut off, and of proxyds that die (tests/harness/hosts_simulation)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hosts_simulation import moving
from simulation.run import quiet

from understudy.recovery.migration import worker_state
from understudy.recovery.migration.relay import whereabouts
from understudy.recovery.migration.transfer import moves
from understudy.recovery.migration.worker_state import NEXT, WITHOUT_ORDERS, Event, WorkerState

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


async def nobody_asks(*_: Any) -> bool:
    """What became of a relay."""
    return False


def without(state: WorkerState, event: Event) -> dict[WorkerState, dict[Event, WorkerState]]:
    """The table of where a worker is, but for one step."""
    table = {one: dict(steps) for one, steps in NEXT.items()}
    del table[state][event]
    return table


CARELESS: dict[str, tuple[Any, str, Any, range]] = {
    "who may run on another host goes on by itself": (
        whereabouts, "WITHOUT_ORDERS", {**WITHOUT_ORDERS, WorkerState.RELEASED: Event.RESUME}, range(40)
    ),
    "who went on by itself cannot be told to": (
        worker_state, "NEXT", without(WorkerState.RUNNING, Event.RESUME), range(90, 91)
    ),
    "nobody asks what became of a relay": (moves, "relay_has_ended", nobody_asks, range(282, 283)),
}  # fmt: skip
"""And in which schedules that is looked for."""


@pytest.mark.parametrize("how", CARELESS)
def test_the_schedules_show_what_would_go_wrong_if(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, careless, numbers = CARELESS[how]
    assert not moving.simulate(numbers[-1]).violations
    monkeypatch.setattr(owner, name, careless)
    assert any(moving.simulate(number).violations for number in numbers), f"not in {numbers}"
