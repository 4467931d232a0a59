"""The table that says where a worker is (recovery/migration/worker_state.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from understudy.recovery.migration.relay.whereabouts import Whereabouts
from understudy.recovery.migration.worker_state import (
    NEXT,
    WITHOUT_ORDERS,
    Event,
    NoSuchStep,
    WorkerState,
    after,
)

RUNNING, REMOTE, RELEASED = WorkerState.RUNNING, WorkerState.REMOTE, WorkerState.RELEASED
ORDERS = (Event.DUMP, Event.RELEASE, Event.RESUME, Event.REMOVE, Event.RESTORE)
"""Of a move from host to host, to an init."""


def test_each_state_can_be_reached_and_none_but_the_end_is_for_good() -> None:
    reached = {state for steps in NEXT.values() for state in steps.values()} | {WorkerState.ARRIVING}
    assert reached == set(WorkerState) == set(NEXT)
    assert [state for state, steps in NEXT.items() if set(steps.values()) <= {state}] == [WorkerState.ENDED]


@pytest.mark.parametrize("state", WorkerState)
def test_wherever_a_worker_is_nobody_may_want_it_any_more(state: WorkerState) -> None:
    assert after(state, Event.DISMISS) in (REMOTE, WorkerState.ENDED)


WITH_PROCESSES = [one for one in WorkerState if one not in (WorkerState.ARRIVING, WorkerState.RECEIVED)]


@pytest.mark.parametrize("state", WITH_PROCESSES)
def test_processes_may_end_in_each_state_that_has_some(state: WorkerState) -> None:
    known = state in (RUNNING, WorkerState.DUMPED, WorkerState.ENDED)
    assert after(state, Event.END) is (WorkerState.ENDED if known else REMOTE)


def test_time_lets_no_worker_run_that_may_run_on_another_host() -> None:
    assert {state: after(state, event) for state, event in WITHOUT_ORDERS.items()} == {
        WorkerState.DUMPED: RUNNING, WorkerState.RESTORED: REMOTE,
    }  # fmt: skip


def test_what_cannot_happen_is_refused_with_a_sentence() -> None:
    with pytest.raises(NoSuchStep, match="the worker is running, so 'remove' makes no sense"):
        after(RUNNING, Event.REMOVE)
    init = Whereabouts(1, RUNNING)
    for order in ("where ", "receive", "end", "give-up", "dismiss", 7, None, ["dump"]):
        with pytest.raises(ValueError, match="is no order"):
            init.obey({"do": order})
    for wrong in ("release", "remove", "restore"):
        with pytest.raises(ValueError, match="the worker is running"):
            init.obey({"do": wrong})
    assert init.obey({"do": "where"}) == init.obey({"do": "resume"}) == {"state": "running", "pid": 1}


Pair = tuple[WorkerState, WorkerState]


def steps(pair: Pair) -> Iterator[Pair]:
    """What may come next of the copies on two hosts, if source and destination keep to the protocol.

    A copy is made from one that is dumped.  It is let run once the other one is released, and that one again
    only if this one does not run, and never will.
    """
    for one, other, put in ((*pair, lambda a, b: (a, b)), (*pair[::-1], lambda a, b: (b, a))):
        for event in (*ORDERS, Event.END):
            allowed = {
                Event.RESTORE: other is WorkerState.DUMPED,
                Event.RESUME: {
                    WorkerState.RESTORED: other in (RELEASED, REMOTE),
                    RELEASED: other is REMOTE,
                }.get(one, True),
                Event.REMOVE: one is WorkerState.RESTORED or other is RUNNING,
            }.get(event, True)
            if allowed and event in NEXT[one]:
                yield put(after(one, event), other)
        if one in WITHOUT_ORDERS:
            yield put(after(one, WITHOUT_ORDERS[one]), other)


def test_of_two_copies_one_runs_at_most_whatever_comes_in_which_order() -> None:
    known, new = set[Pair](), {(RUNNING, REMOTE)}
    while new:
        known |= new
        new = {following for pair in new for following in steps(pair)} - known
    assert (RUNNING, RUNNING) not in known
    assert {(REMOTE, RUNNING), (RELEASED, RUNNING), (RUNNING, WorkerState.RESTORED)} <= known
