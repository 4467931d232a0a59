"""Ranks of a job with several shards wait for one another before parameters change; one whose gate is broken
saves the states of both steps (understudy/jit/gate.py)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jit_child import Ended, Job, Start, assert_is_step, children, pretend_a_collective
from jit_training import Training

from understudy import jit
from understudy.jit.boundaries import Boundary, Zone
from understudy.jit.gate import Gate


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Start]:
    with children(tmp_path / "ckpt") as start:
        yield start


class Gated(Job):
    """A job whose gate does what a test says, from its third step on."""

    def __init__(self, directory: Path, third: Callable[[Callable[[], bool]], bool], **settings: Any) -> None:
        super().__init__(directory, **settings)
        self.third = third
        self.at: list[int] = []
        session: Any = jit._session
        session._gate = self
        session.boundary.pass_gate = session._pass_gate

    def passed(self, interrupted: Callable[[], bool]) -> bool:
        self.at.append(jit.completed_steps())
        return jit.completed_steps() < 2 or self.third(interrupted)

    def close(self) -> None:
        pass


def broken(_: Callable[[], bool]) -> bool:
    raise RuntimeError("Connection closed by peer")


def waits(interrupted: Callable[[], bool]) -> bool:
    """For a rank that does not come.

    It looks as seldom as the gate does: a thread that is seen elsewhere is one that moves, and what a stall
    may last grows with those that ended.
    """
    while not interrupted():
        time.sleep(0.2)
    return False


def saved_steps(ended: Ended) -> list[int]:
    """Those that were saved, each of which is looked at."""
    found = [torch.load(path, weights_only=False) for path in ended.directory.glob("step-*/payload")]
    for saved in found:
        assert_is_step(saved, saved["step"])
    return sorted(saved["step"] for saved in found)


def test_rank_whose_gate_breaks_saves_the_last_step_and_does_and_saves_the_next_one(child: Start) -> None:
    def script(directory: Path) -> None:
        keep_both()
        Gated(directory, broken).run(5)
        raise AssertionError("the training went on")

    ended = child(script).end()
    assert ended.status == 1 and ended.said.splitlines()[-1] == "RuntimeError: Connection closed by peer"
    assert saved_steps(ended) == [2, 3]


def keep_both() -> None:
    """A rank alone is a whole job, whose older save is removed when the newer one is complete."""
    from understudy.jit.storage import ShardDirectory

    ShardDirectory._remove_older = lambda *_: None  # type: ignore[method-assign]


def test_sigterm_at_the_gate_saves_both_steps(child: Start) -> None:
    def script(directory: Path) -> None:
        keep_both()

        def third(interrupted: Callable[[], bool]) -> bool:
            os.kill(os.getpid(), signal.SIGTERM)
            return waits(interrupted)

        Gated(directory, third).run(5)

    ended = child(script).end()
    assert ended.status == -signal.SIGTERM
    assert saved_steps(ended) == [2, 3]


def test_rank_that_nobody_comes_to_at_the_gate_saves_both_steps_and_exits_with_75(child: Start) -> None:
    def script(directory: Path) -> None:
        keep_both()

        def third(interrupted: Callable[[], bool]) -> bool:
            pretend_a_collective(2)
            return waits(interrupted)

        Gated(directory, third, minimum_stall=0.05).run(5)

    ended = child(script).end()
    assert ended.status == 75 and "a collective has not moved for" in ended.said
    assert saved_steps(ended) == [2, 3]


def test_older_of_both_steps_is_removed_only_when_the_newer_one_has_all_shards(child: Start) -> None:
    def script(directory: Path) -> None:
        Gated(directory, broken).run(5)

    ended = child(script).end()
    assert ended.said.count("saved in") == 2
    assert saved_steps(ended) == [3], "one rank is all shards here"


def test_step_that_its_rank_cannot_end_alone_is_given_up_behind_the_grace(child: Start) -> None:
    def script(directory: Path) -> None:
        job = Gated(directory, broken, grace=0.3)
        job.run(2)
        job.step()
        time.sleep(60)  # a collective in front of jit.boundary()

    ended = child(script).end()
    assert ended.status == 1 and "between the optimizer's step and jit.boundary()" in ended.said
    assert saved_steps(ended) == [2]


def test_gate_that_all_pass_changes_nothing(child: Start) -> None:
    def script(directory: Path) -> None:
        job = Gated(directory, lambda _: True)
        job.run(5)
        assert job.at == [1, 2, 3, 4], "in the first step nobody knows yet that jit.boundary() is called"
        job.loss()
        raise RuntimeError("the peer is gone")

    ended = child(script).end()
    assert saved_steps(ended) == [5]


def test_gate_is_passed_once_in_each_step_however_many_optimizers_it_has() -> None:
    zones: list[Zone] = []
    boundary = Boundary(lambda: None, lambda *_: None, print)
    boundary.pass_gate = lambda: zones.append(boundary.zone)
    boundary.install()
    try:
        one, two = Training(), Training()
        for count in (2, 0, 1, 2):
            for training in (one, two)[:count]:
                training.step()
            boundary.declare()
    finally:
        boundary.remove()
    assert zones == [Zone.WAITING] * 3


def test_job_of_several_shards_that_never_calls_boundary_is_told_once() -> None:
    said: list[str] = []
    boundary = Boundary(lambda: None, lambda *_: None, said.append)
    boundary.pass_gate = lambda: said.append("passed")
    boundary.install()
    try:
        training = Training()
        for _ in range(4):
            training.step()
    finally:
        boundary.remove()
    (sentence,) = said
    assert "several shards" in sentence and "jit.boundary()" in sentence


class Work:
    """A collective that takes some looks, and may fail."""

    def __init__(self, looks: int, fails: bool) -> None:
        self.looks, self.fails = looks, fails

    def wait(self, _: object) -> None:
        self.looks -= 1
        if self.looks or self.fails:
            raise RuntimeError("Operation timed out!" if self.looks else "Connection closed by peer")

    def is_completed(self) -> bool:
        return not self.looks


@pytest.mark.parametrize("fails", [False, True])
def test_wait_that_is_over_is_told_from_a_collective_that_has_failed(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    work = Work(3, fails)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: work)
    gate = Gate(None, {})
    if fails:
        with pytest.raises(RuntimeError, match="Connection closed"):
            gate.passed(lambda: False)
    else:
        assert gate.passed(lambda: False)
    assert not work.looks
    work.looks = 3
    assert not gate.passed(lambda: work.looks == 1)
