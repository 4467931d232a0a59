"""proxyd dies in the middle of what it does for a job: its successor does it again, or does without."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import test_proxyd_recovery
from proxied import until
from running_node import Node

from understudy import replay
from understudy.recovery.drills.fault_table import BY_NAME

pytestmark = pytest.mark.drawn(4)

variables = test_proxyd_recovery.variables  # the fixture

ROUNDS = 3
STEPS = 20 * (ROUNDS + 2)
"""More than the ranks may do before proxyd has died for the last time."""
AFTER_THE_STEP = 7
"""A call: the mark behind the optimizer's, in a minibatch that follows one that printed nothing."""
LONGEST_S = {"sticky-error": 0.3, "driver-suspect": 0.3, "device-gone": 0.3, "network-partition": 0.3}
"""A recovery is begun and over within so long; when proxyd dies in it is what is tried."""
SAMPLED = ("sticky-error", "device-gone")


def await_fault(log: replay.Log, slot: int) -> None:
    until(lambda: log.drills()[slot][3], "the fault")


def await_order(log: replay.Log) -> None:
    until(lambda: log.validate_step > log.validated_step, "the order to validate")


def await_validation(log: replay.Log) -> None:
    until(lambda: log.step >= log.validate_step, "the minibatch to be validated")


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[] if kind in SAMPLED else pytest.mark.long) for kind in LONGEST_S
])  # fmt: skip
def test_a_proxyd_killed_while_it_recovers_changes_no_value(
    kind: str, variables: dict[str, str], tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    with Node(tmp_path, variables, "--devices", "cpu:6") as node:
        node.train(STEPS, limit=20)
        for number in range(1, ROUNDS + 1):
            node.await_step(20 * number)
            log = node.logs()[number % 2]
            slot = len(log.drills())
            log.add_drill(BY_NAME[kind].number, 20 * number + 3, 4)
            node.let(20 * number + 20)
            await_fault(log, slot)
            time.sleep(LONGEST_S[kind] * chance.random())
            node.kill()
            node.restart()
        report = node.finish()
        assert "it did not answer when proxyd came back" not in node.said()
        assert len(report["adoptions"]) == ROUNDS
        assert report["recoveries"] and all(recovery["recovered"] for recovery in report["recoveries"])


def test_a_proxyd_killed_while_a_rank_is_rolled_forward_changes_no_value(
    variables: dict[str, str], tmp_path: Path, seed: int
) -> None:
    """The server dies when it has changed the parameter and has not committed; it keeps no pre-images."""
    chance = random.Random(seed)
    with Node(tmp_path, variables | {"AWAIT_FLOOR": "1"}, "--optimizer-preimages", "off") as node:
        node.train(STEPS, limit=20)
        for number in range(1, ROUNDS + 1):
            node.await_step(20 * number)
            log = node.logs()[number % 2]
            slot = len(log.drills())
            log.add_drill(BY_NAME["kill-server"].number, 21 * number + 2, AFTER_THE_STEP)
            node.let(20 * number + 20)
            await_fault(log, slot)
            time.sleep(0.2 * chance.random())
            node.kill()
            node.restart()
        report = node.finish()
        assert len(report["adoptions"]) == ROUNDS
        assert all(recovery["recovered"] for recovery in report["recoveries"])
        plans = [recovery["plan"] for recovery in report["recoveries"]]
        others = {"restart-copy-replay", "restore-snapshot-replay", "rewind-in-place"}  # if its peer is late
        assert plans and set(plans) <= {"roll-forward", *others}


def test_a_proxyd_killed_while_a_minibatch_is_executed_twice_changes_no_value(
    variables: dict[str, str], tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    with Node(tmp_path, variables, "--validate-every", "10") as node:
        node.train(STEPS, limit=8)
        for number in range(1, ROUNDS + 1):
            log = node.logs()[0]
            await_order(log)
            node.let(20 * number)
            await_validation(log)
            time.sleep(0.05 * chance.random())
            node.kill()
            node.restart()
        report = node.finish()
        assert "it did not answer when proxyd came back" not in node.said()
        assert len(report["adoptions"]) == ROUNDS
        assert report["not_replayable"] == "" and report["validations"] >= 1
        assert {recovery["plan"] for recovery in report["recoveries"]} <= {"rewind-in-place"}
