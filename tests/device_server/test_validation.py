"""A minibatch executed twice: the executor's verdict, and what a job is told."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator

import pytest
import torch
from executor_harness import OPERATOR, PHASE, Harness, vector
from training_run import driver

FORWARD, OPTIMIZER = 0, 1
FLIP_BIT = 10  # recovery/drills/fault_table.py


def begin_second_minibatch(h: Harness) -> None:
    """It is to be validated; buffer 1 holds threes then, buffer 2 twos."""
    h.log.validate_step = 2
    h.new(1, [1, 1, 1, 1])
    h.new(2, [2, 2, 2, 2])
    h.commit()
    h.add(1, 2)


def first_pass(h: Harness) -> None:
    """To the end of the minibatch, where its server stands."""
    h.commit()
    stands(h)


def stands(h: Harness) -> None:
    fault = h.executor.wait_for_fault(20_000)
    assert fault is not None
    assert fault[0] == "validation"
    assert h.log.validated_step == 0


def execute_again(h: Harness, commit: int) -> None:
    h.executor.park()
    h.executor.rewind(commit)
    h.executor.resume()
    h.synchronize()


def drift(h: Harness, drifting: str, handle: int) -> None:
    """Make a buffer by an operator that does not replay."""
    outputs = [1 | 1 << 8, 0 | 6 << 8 | 1 << 16, 0, 16, 4, 1]
    h.writer.append(OPERATOR, h.template(drifting, vector(), outputs), [1, handle])


def test_a_minibatch_that_replays_exactly_is_validated_and_training_goes_on() -> None:
    with Harness() as h:
        begin_second_minibatch(h)
        first_pass(h)
        execute_again(h, 1)
        assert (h.log.validated_step, h.log.validations_failed, h.log.validation_message) == (2, 0, "")
        h.add(1, 2)
        assert h.read(1) == (5, 5, 5, 5)


def test_a_minibatch_may_be_validated_from_an_earlier_commit_than_its_own() -> None:
    with Harness() as h:
        h.log.validate_step = 3
        h.new(1, [1, 1, 1, 1])
        h.new(2, [2, 2, 2, 2])
        h.commit()
        h.add(2, 1)
        h.commit()
        h.add(1, 2)
        first_pass(h)
        execute_again(h, 1)
        assert (h.log.validated_step, h.log.validations_failed, h.log.validation_message) == (3, 0, "")
        assert h.read(1) == (4, 4, 4, 4)


def test_only_the_asked_for_minibatch_stands_still() -> None:
    with Harness() as h:
        h.log.validate_step = 3
        h.new(1, [1, 1, 1, 1])
        h.commit()
        h.writer.append(PHASE, OPTIMIZER, [])
        h.commit()
        h.synchronize()
        assert h.log.validated_step == 0


@pytest.fixture
def drifting() -> Iterator[str]:
    """An operator whose result depends on how often it was called."""
    library = torch.library.Library("aten", "IMPL")
    count = itertools.count()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is overridden is meant
        library.impl("digamma", lambda x: x + next(count), driver().upper())
    yield "aten::digamma"
    library._destroy()


def test_the_first_call_that_replays_differently_is_named(drifting: str) -> None:
    with Harness() as h:
        begin_second_minibatch(h)
        drift(h, drifting, 3)
        h.add(2, 3)
        first_pass(h)
        execute_again(h, 1)
        assert (h.log.validated_step, h.log.validations_failed) == (2, 1)
        assert "buffer 3 after record" in h.log.validation_message
        assert drifting in h.log.validation_message


def test_an_optimizer_step_is_validated_where_pre_images_lead_out_of_it(drifting: str) -> None:
    with Harness() as h:
        begin_second_minibatch(h)
        h.writer.append(PHASE, OPTIMIZER, [])
        drift(h, drifting, 3)
        h.add(2, 3)
        first_pass(h)
        execute_again(h, 1)
        assert (h.log.validated_step, h.log.validations_failed) == (2, 1)
        assert drifting in h.log.validation_message


def test_a_minibatch_ends_before_its_optimizer_step_where_no_way_leads_out_of_that(drifting: str) -> None:
    with Harness(optimizer_preimages=False) as h:
        begin_second_minibatch(h)
        h.writer.append(PHASE, OPTIMIZER, [])
        stands(h)
        drift(h, drifting, 3)
        h.commit()
        execute_again(h, 1)
        assert (h.log.validated_step, h.log.validations_failed) == (2, 0)


@pytest.mark.parametrize("drifts", [False, True])
def test_a_rank_alone_is_validated_by_a_snapshot_of_the_minibatchs_beginning(
    drifts: bool, drifting: str
) -> None:
    with Harness(protect=False, world=1, snapshot_bytes=64 << 20) as h:
        begin_second_minibatch(h)
        h.writer.append(PHASE, OPTIMIZER, [])
        if drifts:
            drift(h, drifting, 3)
        h.add(2, 3 if drifts else 1)
        first_pass(h)
        assert [(kept.commit.number, kept.commit.step) for kept in h.log.snapshots()] == [(1, 1)]
        h.executor.park()
        h.executor.restore_snapshot(1)
        h.executor.resume()
        h.synchronize()
        assert (h.log.validated_step, h.log.validations_failed) == (2, int(drifts))
        assert h.read(1) == (3, 3, 3, 3)


@pytest.mark.parametrize("snapshot_bytes", [0, 64 << 20])
def test_a_rank_alone_that_has_no_way_back_does_not_stand_still(snapshot_bytes: int) -> None:
    """It takes no snapshots, or one of another commit is awaited, which proxyd counts on."""
    with Harness(protect=False, world=1, snapshot_bytes=snapshot_bytes) as h:
        if snapshot_bytes:
            h.log.order_snapshot(1, 7)
        h.log.validate_step = 2
        for step in range(3):
            h.new(step, [1, 1, 1, 1])
            h.commit()
        h.synchronize()
        assert (h.log.validated_step, h.log.validate_step) == (0, 0)
        assert h.log.snapshots() == []


@pytest.mark.cpu_driver
def test_a_rewind_notices_memory_that_changed_by_itself() -> None:
    with Harness() as h:
        h.new(1, [1, 1, 1, 1])
        h.new(2, [2, 2, 2, 2])
        h.commit()
        h.add(1, 2)
        h.commit()
        h.synchronize()
        h.log.add_drill(FLIP_BIT, 3, 2)
        h.add(2, 2)
        h.add(1, 2)
        h.commit()
        h.synchronize()
        h.executor.park()
        with pytest.raises(RuntimeError, match="is not what it was at commit 2: its memory was corrupted"):
            h.executor.rewind(2)
