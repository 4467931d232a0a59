"""Ranks that are rolled forward through their optimizer step, in virtual time (tests/harness/simulation)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import structlog
from simulation.layouts import Job, Shape
from simulation.programs import Do
from simulation.run import quiet, simulate_case
from simulation.schedules import Fault, Schedule

SEED = 3
SHAPE = Shape(
    data=2, tensor=1, pipeline=1, steps=6, batches=1, layers=2, sharded=False, private=True, norm=False,
    everybody=True, barrier=True, crossing=False, keeps=False, reads=1.0, automatic=0.0,
    leaves=False, passing=False,
)  # fmt: skip
DIES = 1
"""The rank."""


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    quiet()
    yield
    structlog.reset_defaults()


def schedule(*faults: Fault) -> Schedule:
    """A job that has run for long, without pre-images in its optimizer steps, with two spares."""
    return Schedule(
        faults, spares=2, optimizer_preimages=False, shadow_limit=1000, late_calls=False, believes=True,
        snapshots=True,
    )  # fmt: skip


def records_of_steps(shape: Shape = SHAPE) -> list[int]:
    """Records behind the beginning of an optimizer step, its commit included, from the third step on."""
    found: list[int] = []
    inside, steps = False, 0
    for number, record in enumerate(Job(shape, SEED).programs()[DIES].records):
        if inside and steps >= 2:
            found.append(number)
        if record[0] is Do.OPTIMIZER:
            inside = True
        elif record[0] is Do.COMMIT and record[1]:
            inside, steps = False, steps + 1
    return found


def test_a_server_that_dies_at_any_record_of_its_step_is_rolled_forward() -> None:
    """Unless its peer is late and can go back itself; some steps have a loss too large for a shadow."""
    done: Counter[str] = Counter()
    for record in records_of_steps():
        outcome = simulate_case(SEED, SHAPE, schedule(Fault("kill", DIES, record)))
        assert (outcome.violations, outcome.ended) == ([], 2), record
        assert outcome.plans["roll-forward"] or set(outcome.plans) == {"restart-copy-replay"}, record
        done.update(recovery.plan for recovery in outcome.recoveries)
    print(done)
    assert done["roll-forward"] >= len(records_of_steps()) // 2


def test_a_server_that_dies_while_it_is_rolled_forward_is_so_again() -> None:
    plans: Counter[str] = Counter()
    for record in records_of_steps():
        twice = schedule(Fault("kill", DIES, record), Fault("kill", DIES, record - 1))
        outcome = simulate_case(SEED, SHAPE, twice)
        assert (outcome.violations, outcome.ended) == ([], 2), record
        plans.update(outcome.plans)
    assert plans["roll-forward"] >= len(records_of_steps())


def test_a_replica_that_dies_while_its_peer_is_rolled_forward_leaves_it_to_the_snapshots() -> None:
    plans: Counter[str] = Counter()
    for record in records_of_steps():
        for call in ("Restore", "RebuildCommunicators", "Resume"):
            faults = (Fault("kill", DIES, record), Fault("kill-other", 1 - DIES, call=call, nth=1))
            outcome = simulate_case(SEED, SHAPE, schedule(*faults))
            assert outcome.violations == [], (record, call)
            plans.update(outcome.plans)
    print(plans)
    assert plans["roll-forward"] and plans["restore-snapshot-replay"]


def test_steps_with_collectives_are_not_rolled() -> None:
    shape = replace(SHAPE, norm=True)
    plans: Counter[str] = Counter()
    for record in records_of_steps(shape):
        outcome = simulate_case(SEED, shape, schedule(Fault("kill", DIES, record)))
        assert outcome.violations == [], record
        plans.update(outcome.plans)
    print(plans)
    assert "restore-snapshot-replay" in plans
