"""Random fault schedules through the real planner and coordinator, in virtual time (harness/simulation)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
from places import HARNESS
from simulation.chunks import count
from simulation.layouts import Shape
from simulation.run import Outcome, quiet, simulate, simulate_case
from simulation.schedules import CALL_FAULTS, Fault, Move, Schedule

pytestmark = pytest.mark.drawn(10)

SCHEDULES = int(os.environ.get("UNDERSTUDY_TEST_SCHEDULES") or 200)
"""`make simulate` runs 100,000."""
PLAIN = Shape(
    data=2, tensor=1, pipeline=1, steps=3, batches=1, layers=1, sharded=False, private=False, norm=False,
    everybody=True, barrier=True, crossing=False, keeps=False, reads=0.0, automatic=0.0,
    leaves=False, passing=False,
)  # fmt: skip


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    quiet()
    yield
    structlog.reset_defaults()


def schedule(
    *faults: Fault, spares: int = 1, optimizer_preimages: bool = True, late: bool = False, validates: int = 0,
    drifts: bool = False,
) -> Schedule:  # fmt: skip
    return Schedule(
        faults,
        spares,
        optimizer_preimages,
        shadow_limit=1000,
        late_calls=late,
        validates=validates,
        drifts=drifts,
    )


@pytest.mark.drawn(1)
@pytest.mark.timeout(600)
def test_no_schedule_breaks_an_invariant(seed: int, tmp_path: Path) -> None:
    """Every rank resumes at one cut, nothing waits for ever, all bits are those of an undisturbed run."""
    state = tmp_path / "state.json"
    range_ = ("--first", str(seed * SCHEDULES), "--count", str(SCHEDULES), "--state", str(state))
    environment = os.environ | {"PYTHONPATH": str(HARNESS)}
    subprocess.run([sys.executable, "-P", "-m", "simulation", *range_], env=environment, check=False)
    chunks = json.loads(state.read_text())["chunks"]
    assert count(chunks, "numbers")["schedules"] >= SCHEDULES
    plans = count(chunks, "plans")
    print(plans)
    told = "\n".join(
        f"PYTHONPATH=tests/harness python -P -m simulation --seed {number}: {text}"
        for chunk in chunks
        for number, text in chunk["failing"].items()
    )
    assert not told, told
    assert all(plans[name] for name in ("restart-copy-replay", "rewind-in-place", "give-up"))


def test_a_server_that_goes_back_to_a_snapshot_late_takes_the_manifest_of_its_successor_along() -> None:
    """Its commit has none any more when the next one wants it: that round fails, and the next one knows."""
    assert not simulate(5461342863051).violations


def test_a_copy_comes_from_another_buffer_of_equal_content_where_the_first_has_none_left() -> None:
    """Both are zero by chance, and its rank has freed the first one since."""
    assert not simulate(2899312583817).violations


def test_wrong_numbers_end_nobody_whose_peer_has_ended_when_they_are_found() -> None:
    """All are held first: else rank 0 ended while rank 1 was parked, which was given up for it."""
    assert not simulate(1248051053017).violations


def test_a_server_that_dies_while_corrupted_state_is_let_stay_is_recovered_from() -> None:
    """Its rank stood still for good: the fault was forgotten with the corruption."""
    outcome = simulate(99978)
    assert not outcome.violations and outcome.rounds == 1


@pytest.mark.parametrize("seed", [54039, 56208, 88449])
def test_nobody_is_lost_for_an_order_to_move_that_finds_no_way_back_once_all_stand(seed: int) -> None:
    """Since it was given, ranks have begun a step whose pre-images do not fit: it is declined instead."""
    assert not simulate(seed).violations


def test_a_communicator_given_up_long_ago_bars_no_way_though_one_rank_has_forgotten_it() -> None:
    """Of a rank that was restored, the log keeps commits of several lives, and not all of any."""
    assert not simulate(31389491545).violations


@pytest.mark.parametrize("seed", [65919, 73164])
def test_a_set_that_is_found_damaged_amid_a_move_is_a_fault_that_a_job_may_end_of(seed: int) -> None:
    """Without pre-images a rank that has just begun its step cannot go back but by what is on storage."""
    assert not simulate(seed).violations


@pytest.mark.parametrize("unread", [0.3, 1.0])
def test_state_that_is_not_reached_comes_by_storage_or_from_elsewhere(unread: float) -> None:
    """Of three replicas; where none is ever reached, and storage every other time, nobody is lost for it."""
    shape = replace(PLAIN, data=3, steps=4)
    outcomes = []
    for number in range(60):
        killed = schedule(Fault("kill", 1, 12 + number))
        outcomes.append(simulate_case(number, shape, replace(killed, believes=True, unread=unread)))
    assert not [violation for outcome in outcomes for violation in outcome.violations]
    assert sum(outcome.faults["unread"] for outcome in outcomes) >= 5
    assert all(outcome.ended == 3 for outcome in outcomes)


def test_a_server_that_dies_as_it_is_told_to_run_on_may_have_overwritten_what_its_predecessor_kept() -> None:
    """Nobody knows, so the job is given up, and that is not held against the planner."""
    assert not simulate(77000067).violations


def test_a_seed_runs_the_same_way_in_another_process() -> None:
    here = [simulate(seed) for seed in range(40, 60)]
    code = (
        "from simulation.run import quiet, simulate\nquiet()\n"
        "print([(o.events, o.rounds, o.ended) for o in map(simulate, range(40, 60))])"
    )
    environment = os.environ | {"PYTHONPATH": str(HARNESS), "PYTHONHASHSEED": "7"}
    there = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == str([(o.events, o.rounds, o.ended) for o in here])


def died(outcome: Outcome) -> list[str]:
    return [done.reason for done in outcome.recoveries if done.plan == "give-up"]


def test_a_server_that_dies_at_any_record_is_replaced_and_nobody_notices() -> None:
    records = 40
    for record in range(records):
        outcome = simulate_case(3, PLAIN, schedule(Fault("kill", 1, record)))
        assert not outcome.violations
        assert outcome.ended == 2 or died(outcome)  # at its very end its peer may have left


def test_servers_that_die_while_they_are_prepared_are_no_failure_of_a_record() -> None:
    """Their deaths were counted against the record where the rank stood, which no server had tried again."""
    faults = [Fault("kill", 1, 20)] + [Fault("kill-during", call="Attach", nth=n) for n in (1, 2, 3)]
    outcome = simulate_case(3, PLAIN, schedule(*faults, spares=2))
    assert not outcome.violations
    assert outcome.ended == 2


def test_many_workers_that_leave_during_a_recovery_use_up_no_round() -> None:
    """Each interrupted the round under way, and eight of them ended the attempt to recover the others."""
    shape = Shape(
        data=24, tensor=2, pipeline=1, steps=1, batches=1, layers=1, sharded=False, private=False, norm=False,
        everybody=False, barrier=False, crossing=False, keeps=False, reads=0.0, automatic=0.0,
    leaves=False, passing=False,
    )  # fmt: skip
    for seed in range(12):
        for record in (8, 14, 18):
            outcome = simulate_case(
                seed, shape, schedule(Fault("collective", 40, record), Fault("kill", 3, record))
            )
            assert not outcome.violations
            assert not any("rounds" in reason for reason in died(outcome))


def test_a_request_that_was_held_up_does_not_disturb_the_next_round() -> None:
    """A Resume of the round before let a rank run on between its rewind and the new communicators."""
    kinds = ("kill-other", "lose-reply", "refuse")
    for seed in range(40):
        for kind in kinds:
            faults = (Fault("kill", 1, 20), Fault(kind, 0, call="Resume", nth=1 + seed % 3))
            outcome = simulate_case(seed, PLAIN, schedule(*faults, late=True))
            assert not outcome.violations


def test_a_server_that_hangs_while_it_goes_back_costs_one_round() -> None:
    """It was asked to park once more, which took 20 s and a round; with four of them a job was given up."""
    for call in ("Rewind", "Resume"):
        faults = (Fault("kill", 1, 20), Fault("hang", 0, call=call, nth=1))
        outcome = simulate_case(3, PLAIN, schedule(*faults, spares=2))
        assert not outcome.violations
        assert (outcome.ended, outcome.rounds) == (2, 2), call


def test_a_job_that_does_not_replay_is_validated_once_and_trains_on() -> None:
    outcome = simulate_case(3, replace(PLAIN, steps=8), schedule(validates=2, drifts=True))
    assert not outcome.violations
    assert (outcome.ended, outcome.validations, outcome.rounds) == (2, 1, 1)


def test_a_job_is_validated_again_and_again_with_faults_in_between() -> None:
    """A rank that its new server took to its validation anew, alone, was not let go on after a recovery."""
    shape = replace(PLAIN, steps=8)
    undisturbed = simulate_case(3, shape, schedule(validates=2))
    assert (undisturbed.ended, undisturbed.violations) == (2, [])
    assert undisturbed.validations > 1
    for record in range(10, 60):
        outcome = simulate_case(3, shape, schedule(Fault("kill", 1, record), validates=2))
        assert not outcome.violations
        assert outcome.ended == 2


def test_a_request_of_a_validation_that_goes_wrong_ends_nobody() -> None:
    for call in ("Park", "Rewind", "RebuildCommunicators", "Resume"):
        for kind in CALL_FAULTS:
            faults = Fault(kind, 0, call=call, nth=1)
            outcome = simulate_case(3, replace(PLAIN, steps=6), schedule(faults, validates=2))
            assert not outcome.violations
            assert outcome.ended == 2, f"{call}: {kind}"


def test_server_that_dies_while_its_successor_elsewhere_does_not_start_is_known_to_have_died() -> None:
    """It is retired then, so its death means nothing; later rounds waited for a notice that did not come."""
    faults = [
        Fault("kill", 1, record=34), Fault("kill", 0, at=0.07242868505696824),
        Fault("outage", 0, at=0.0703524301470504, lasts=70.0),
    ]  # fmt: skip
    moves = [
        Move(2, 0.008037563826689341, drains=False), Move(1, 0.06918465903641154, drains=True),
        Move(0, 0.0005150768498903621, drains=True), Move(1, 0.005742946595101403, drains=True),
    ]  # fmt: skip
    shape = replace(PLAIN, data=1, pipeline=3, steps=2, barrier=False)
    drained = replace(
        schedule(*faults, validates=1), shadow_limit=6, believes=True, snapshots=True, storage=True,
        moves=tuple(moves),
    )  # fmt: skip
    outcome = simulate_case(7295826368038, shape, drained)
    assert outcome.violations == []
    assert outcome.ended == 3


def test_ranks_that_die_together_while_their_snapshots_are_on_storage_alone_come_back(seed: int) -> None:
    """Storage is damaged now and then: what a job may be given up for is the oracle's to say."""
    plans: Counter[str] = Counter()
    for number in range(20):
        faults = [Fault("kill", rank, at=0.2 + 0.04 * number) for rank in (0, 1)]
        stored = replace(schedule(*faults, spares=2), snapshots=True, storage=True)
        outcome = simulate_case(20 * seed + number, replace(PLAIN, steps=60), stored)
        assert outcome.violations == [], number
        plans += outcome.plans
    assert plans["restore-stored-replay"] >= 5, plans
