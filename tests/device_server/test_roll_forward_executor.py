"""An optimizer step that a new server finishes with contents of its end: what runs, what is left out, what is
refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from executor_harness import (
    ALLOCATE,
    COLLECTIVE,
    COMMIT,
    COMMUNICATOR_CREATE,
    DEVICE_TO_HOST,
    FLOAT,
    HOST_TO_DEVICE,
    OPERATOR,
    OPERATOR_SYNC,
    PHASE,
    RESIZE,
    Harness,
    double,
    vector,
)

from understudy.proxy_server import _server

PARAMETER, GRADIENT, MOMENTUM, LOSS, METRIC = 1, 2, 3, 4, 5
FRESH = 50
OPTIMIZER, AUTOMATIC = 1, 1
END = (100.0, 100.0, 100.0, 100.0)
"""What the replica's parameter holds at the end of the step; nothing here computes it."""


class Step:
    """A rank whose server died somewhere in an optimizer step."""

    def __init__(self) -> None:
        self.h = Harness(optimizer_preimages=False)
        h = self.h
        for handle, value in ((PARAMETER, 1.0), (GRADIENT, 2.0), (MOMENTUM, 3.0), (LOSS, 4.0), (METRIC, 5.0)):
            h.new(handle, [value] * 4)
        h.commit()
        h.add(LOSS, METRIC)  # so that the commit before is not that of the step
        h.writer.append(PHASE, OPTIMIZER, [])

    def __enter__(self) -> Step:
        return self

    def __exit__(self, *problem: object) -> None:
        self.h.__exit__(None, None, None)

    def multiply(self, target: int, source: int, result: int) -> None:
        """A fresh buffer: target * source."""
        fresh = [1 | 1 << 8, 0 | FLOAT << 8 | 1 << 16, 0, 16, 4, 1]
        template = self.h.template("aten::mul.Tensor", [*vector(), *vector()], fresh)
        self.h.writer.append(OPERATOR, template, [target, source, result])

    def die(self) -> None:
        """Everything so far was run, and is forgotten, but for what its replica did as well."""
        self.h.run_all()
        self.h.executor.park()
        self.begin = max(commit.number for commit in self.h.log.commits() if commit.optimizer)
        self.digest = self.h.log.commits()[-1].step_digest

    def roll(
        self, *, rolled: tuple[int, ...] = (PARAMETER,), steady: tuple[int, ...] = (),
        own: tuple[int, ...] = (), lost: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """Another server begins at the step, with the replica's contents of its end."""
        h = self.h
        h.executor = h.new_executor()
        h.executor.restore(self.begin)
        for handle in rolled:
            h.executor.adopt_replica(handle, 0, struct.pack("<4f", *END))
        h.executor.roll_forward(rolled=list(rolled), steady=list(steady), own=list(own), lost=list(lost),
                                step_digest=self.digest)  # fmt: skip
        h.executor.resume()

    def refusal(self) -> str:
        """Why it stands still."""
        fault = self.h.executor.wait_for_fault(30_000)
        assert fault is not None
        kind, message, _ = fault
        assert kind == "restart"
        return message


def test_a_commit_lies_right_before_an_optimizer_step_without_pre_images() -> None:
    with Step() as step:
        step.die()
        commits = step.h.log.commits()
        assert [(commit.number, commit.optimizer) for commit in commits] == [(1, False), (2, True)]
        rows = {row.handle: row for row in step.h.log.manifest(2)}
        assert all(row.digest is not None and row.shadowed for row in rows.values())


def test_with_pre_images_there_is_no_such_commit() -> None:
    with Harness() as h:
        h.new(1, [1.0] * 4)
        h.commit()
        h.writer.append(PHASE, OPTIMIZER, [])
        h.synchronize()
        assert [commit.optimizer for commit in h.log.commits()] == [False]


def test_a_large_buffer_of_the_minibatch_has_a_digest_there_but_no_shadow() -> None:
    with Harness(optimizer_preimages=False) as h:
        h.new(1, [1.0] * 4)
        h.commit()
        h.writer.append(ALLOCATE, 2, [2 << 20])
        h.writer.append(ALLOCATE, 3, [1 << 10])
        h.writer.append(PHASE, OPTIMIZER, [])
        h.run_all()
        rows = {row.handle: row for row in h.log.manifest(2)}
        assert [(rows[n].shadowed, rows[n].digest is not None) for n in (1, 2, 3)] == [
            (True, True), (False, True), (True, True)
        ]  # fmt: skip


def test_what_needs_nothing_of_the_replica_is_computed_and_the_rest_is_left_out() -> None:
    with Step() as step:
        step.h.add(MOMENTUM, GRADIENT)
        step.h.add(PARAMETER, MOMENTUM)
        step.h.commit()
        step.die()
        step.roll()
        assert step.h.read(MOMENTUM) == (5.0,) * 4
        assert step.h.read(PARAMETER) == END
        assert step.h.read(LOSS) == (9.0,) * 4
        assert step.h.log.commits()[-1].number == step.begin + 1


def test_from_its_end_on_everything_is_ordinary() -> None:
    with Step() as step:
        step.h.add(PARAMETER, GRADIENT)
        step.h.commit()
        step.die()
        step.roll()
        step.h.add(PARAMETER, GRADIENT)
        assert step.h.read(PARAMETER) == (102.0,) * 4
        step.h.executor.park()
        step.h.executor.rewind(step.begin + 1)
        step.h.executor.resume()
        assert step.h.read(PARAMETER) == (102.0,) * 4
        assert step.h.log.replies_different == 0


def test_a_result_of_a_call_left_out_may_be_used_and_freed_within_the_step() -> None:
    with Step() as step:
        step.multiply(PARAMETER, GRADIENT, FRESH)
        step.h.add(PARAMETER, FRESH)
        step.h.writer.free_later(FRESH)
        step.h.add(MOMENTUM, GRADIENT)
        step.h.commit()
        step.die()
        step.roll()
        assert step.h.read(PARAMETER) == END


def test_a_lost_gradient_may_be_used_by_what_is_left_out_and_freed_before_the_commit() -> None:
    with Step() as step:
        step.h.add(PARAMETER, GRADIENT)
        step.h.commit()
        step.die()
        step.roll(lost=(GRADIENT,))
        step.h.writer.free_later(GRADIENT)
        assert step.h.read(PARAMETER) == END


def test_a_value_that_was_told_is_not_told_again_from_a_call_left_out() -> None:
    with Step() as step:
        step.h.add(PARAMETER, GRADIENT)
        step.h.read(PARAMETER)
        step.h.commit()
        step.die()
        step.roll()
        assert step.h.read(PARAMETER) == END
        assert step.h.log.replies_compared == 0


def test_a_value_of_a_call_that_runs_is_compared_with_the_one_told() -> None:
    with Step() as step:
        step.h.add(MOMENTUM, GRADIENT)
        step.h.read(MOMENTUM)
        step.h.add(PARAMETER, GRADIENT)
        step.h.commit()
        step.die()
        step.roll()
        assert step.h.read(MOMENTUM) == (5.0,) * 4
        assert (step.h.log.replies_compared, step.h.log.replies_different) == (1, 0)


def test_a_buffer_that_does_not_change_is_read_as_it_is_until_a_call_that_changes_it_is_left_out() -> None:
    with Step() as step:
        step.h.add(LOSS, MOMENTUM)
        step.multiply(PARAMETER, GRADIENT, FRESH)
        step.h.add(MOMENTUM, FRESH)
        step.h.writer.free_later(FRESH)
        step.h.add(PARAMETER, MOMENTUM)
        step.h.commit()
        step.die()
        step.roll(steady=(MOMENTUM,))
        assert step.h.read(LOSS) == (12.0,) * 4
        assert step.h.read(MOMENTUM) == (3.0,) * 4
        assert step.h.read(PARAMETER) == END


def test_while_it_rolls_it_gives_no_state_to_others_and_cannot_go_back() -> None:
    with Step() as replica:
        replica.h.add(PARAMETER, GRADIENT)
        replica.h.commit()
        replica.die()
    with Step() as step:
        step.h.add(PARAMETER, GRADIENT)
        step.die()
        step.digest = replica.digest
        step.roll()
        assert step.h.executor.rolling
        step.h.executor.park()
        with pytest.raises(RuntimeError, match="between two commits"):
            step.h.executor.has_content(PARAMETER)
        with pytest.raises(RuntimeError, match="out of reach"):
            step.h.executor.rewind(step.begin)
        step.h.executor.resume()
        step.h.commit()
        assert step.h.read(PARAMETER) == END
        assert not step.h.executor.rolling


def test_who_parks_right_behind_the_step_stands_at_its_commit() -> None:
    with Step() as step:
        step.h.add(PARAMETER, GRADIENT)
        step.h.commit()
        step.die()
        step.h.log.commits()
        step.roll()
        step.h.run_all()
        step.h.executor.park()
        assert not step.h.executor.rolling
        assert step.h.log.commits()[-1].number == step.begin + 1


def ask(step: Step) -> None:
    step.h.writer.append(DEVICE_TO_HOST, PARAMETER, [99, 0, 0, 16])


def draw(step: Step) -> None:
    template = step.h.template("aten::uniform_", [*vector(), 7, 7, 11])
    step.h.writer.append(OPERATOR, template, [PARAMETER, double(0.0), double(1.0), 0])


def drop_out(step: Step) -> None:
    step.h.writer.append(OPERATOR, step.h.template("aten::bernoulli_.float", [*vector(), 7, 2]), [
        PARAMETER, double(0.5)])  # fmt: skip


def learn_a_shape(step: Step) -> None:
    template = step.h.template("aten::sum", [*vector(), 2], [])
    step.h.writer.append(OPERATOR_SYNC, template, [99, 0, PARAMETER, 1000])


def talk(step: Step) -> None:
    step.h.writer.append(COLLECTIVE, 1, [0] * 8)


def find_peers(step: Step) -> None:
    step.h.writer.append(COMMUNICATOR_CREATE, 1, [1, 2, 0, 2, 1000])


def let_it_grow(step: Step) -> None:
    step.h.writer.append(RESIZE, PARAMETER, [32])


def upload(step: Step) -> None:
    step.h.writer.append(HOST_TO_DEVICE, PARAMETER, [0, 8, double(1.0)])


def keep_a_result(step: Step) -> None:
    step.multiply(PARAMETER, GRADIENT, FRESH)
    step.h.add(PARAMETER, GRADIENT)
    step.h.commit()


def spoil_the_loss(step: Step) -> None:
    step.h.add(LOSS, PARAMETER)
    step.h.add(PARAMETER, GRADIENT)
    step.h.commit()


def leave_it_alone(step: Step) -> None:
    step.h.add(LOSS, GRADIENT)
    step.h.commit()


def put_in_its_own(step: Step) -> None:
    step.h.add(PARAMETER, METRIC)


def put_in_what_comes_of_its_own(step: Step) -> None:
    step.multiply(METRIC, GRADIENT, FRESH)
    step.h.add(PARAMETER, FRESH)


def put_in_a_tainted_result_of_its_own(step: Step) -> None:
    step.multiply(METRIC, PARAMETER, FRESH)
    step.h.add(PARAMETER, FRESH)


def put_in_an_upload(step: Step) -> None:
    step.h.new(FRESH, [1.0] * 4)
    step.h.add(PARAMETER, FRESH)


def begin_another_step(step: Step) -> None:
    step.h.writer.append(PHASE, OPTIMIZER, [])


def commit_amid_it(step: Step) -> None:
    step.h.writer.append(COMMIT, AUTOMATIC, [])


REFUSED: dict[Callable[[Step], None], str] = {
    ask: "asks for the content of buffer 1",
    draw: "uniform_ would have drawn random numbers",
    drop_out: "bernoulli_.float would have drawn random numbers",
    learn_a_shape: "the worker waits for aten::sum",
    talk: "a collective lies within the step",
    find_peers: "a collective lies within the step",
    let_it_grow: "buffer 1 changes its size",
    upload: "the worker writes into buffer 1 itself",
    keep_a_result: "the content of buffer 50 outlives the step",
    spoil_the_loss: "the content of buffer 4 outlives the step",
    leave_it_alone: "did not change buffer 1 in the step",
    put_in_its_own: "into buffer 1 what its replica does not hold",
    put_in_what_comes_of_its_own: "into buffer 1 what its replica does not hold",
    put_in_a_tainted_result_of_its_own: "into buffer 1 what its replica does not hold",
    put_in_an_upload: "into buffer 1 what its replica does not hold",
    begin_another_step: "a step begins within the step",
    commit_amid_it: "a commit lies within the step",
}


@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_a_step_that_cannot_be_finished_exactly_is_refused(program: Callable[[Step], None]) -> None:
    with Step() as step:
        step.die()
        step.roll(own=(METRIC, LOSS))
        program(step)
        step.h.writer.append(PHASE, 0, [])  # whatever came before takes effect
        assert REFUSED[program] in step.refusal()
        assert step.h.executor.rolling, "its state is that of no commit"
        assert step.h.log.commit_count == step.begin


def scaled(by: float) -> Callable[[Step], None]:
    """The factor lies in the record, not in its template."""

    def program(step: Step) -> None:
        template = step.h.template("aten::mul_.Scalar", [*vector(), 7])
        step.h.writer.append(OPERATOR, template, [PARAMETER, double(by)])

    return program


def added(*calls: tuple[int, int]) -> Callable[[Step], None]:
    def program(step: Step) -> None:
        for target, source in calls:
            step.h.add(target, source)

    return program


def uploaded(value: float) -> Callable[[Step], None]:
    def program(step: Step) -> None:
        step.h.new(FRESH, [value] * 4)
        step.h.add(LOSS, FRESH)
        step.h.add(PARAMETER, GRADIENT)

    return program


def with_a_fresh_buffer(handle: int) -> Callable[[Step], None]:
    def program(step: Step) -> None:
        step.multiply(PARAMETER, GRADIENT, handle)
        step.h.add(PARAMETER, handle)
        step.h.writer.free_later(handle)

    return program


def digest_of(program: Callable[[Step], None]) -> int:
    """Of a replica's step."""
    with Step() as replica:
        program(replica)
        replica.h.commit()
        replica.die()
        return replica.digest


ANOTHER_STEP = {
    "another number": (scaled(0.5), scaled(0.25)),
    "another operator": (scaled(2.0), added((PARAMETER, PARAMETER))),
    "another order": (added((PARAMETER, GRADIENT), (MOMENTUM, GRADIENT)),
                      added((MOMENTUM, GRADIENT), (PARAMETER, GRADIENT))),
    "other buffers": (added((PARAMETER, GRADIENT)), added((PARAMETER, MOMENTUM))),
    "one call more": (added((PARAMETER, GRADIENT)), added((PARAMETER, GRADIENT), (LOSS, GRADIENT))),
    "other numbers of the worker": (uploaded(1.0), uploaded(2.0)),
}  # fmt: skip


@pytest.mark.parametrize("case", ANOTHER_STEP)
def test_a_step_that_is_not_its_replica_s_is_refused(case: str) -> None:
    mine, theirs = ANOTHER_STEP[case]
    with Step() as step:
        mine(step)
        step.h.commit()
        step.die()
        assert step.digest not in (0, digest_of(theirs))
        step.digest = digest_of(theirs)
        step.roll()
        step.h.writer.append(PHASE, 0, [])
        assert "the step of its replica was another one" in step.refusal()


@pytest.mark.parametrize("program", [scaled(0.5), uploaded(1.0), with_a_fresh_buffer(FRESH)])
def test_the_same_step_has_the_same_digest_whatever_its_buffers_are_called(
    program: Callable[[Step], None],
) -> None:
    assert digest_of(program) == digest_of(program) != 0
    assert digest_of(with_a_fresh_buffer(FRESH)) == digest_of(with_a_fresh_buffer(FRESH + 7))


def test_a_rank_that_was_brought_back_to_its_step_has_the_digest_of_one_that_was_not() -> None:
    with Step() as step:
        step.h.add(PARAMETER, GRADIENT)
        step.h.commit()
        step.die()
        step.h.executor = step.h.new_executor()
        step.h.executor.restore(step.begin)
        step.h.executor.resume()
        step.h.run_all()
        step.h.executor.park()
        assert step.h.log.commits()[-1].step_digest == step.digest != 0


def test_contents_that_the_commit_does_not_know_are_no_roll_forward() -> None:
    with Step() as step:
        step.die()
        step.h.executor = step.h.new_executor()
        step.h.executor.restore(step.begin)
        with pytest.raises(RuntimeError, match="buffer 77 is to be rolled forward, but has no content"):
            step.h.executor.roll_forward(rolled=[77], steady=[], own=[], lost=[], step_digest=1)
        assert _server.Executor is type(step.h.executor)


def test_a_shadow_of_the_step_s_beginning_does_not_pass_for_one_of_its_end() -> None:
    with Step() as step:
        step.h.add(PARAMETER, GRADIENT)
        step.h.commit()
        step.die()
        step.roll()
        step.h.executor.set_replicated([])  # from the next commit on everything is shadowed
        step.h.add(PARAMETER, GRADIENT)
        assert step.h.read(PARAMETER) == (102.0,) * 4
        step.h.executor.park()
        step.h.executor = step.h.new_executor()
        step.h.executor.restore(step.begin + 1)
        step.h.executor.resume()
        assert step.h.read(PARAMETER) == (102.0,) * 4
