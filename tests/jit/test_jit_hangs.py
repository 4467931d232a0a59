"""Training that hangs, and saves that hang: who takes over, and what is told (paper 001 §3.1)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jit_child import Job, Start, assert_is_step, children, pretend_a_collective, wait_for_signal

from understudy import jit
from understudy.jit import watchdog

pytestmark = pytest.mark.drawn(3)

LOOKS = 30
"""Of the watchdog, in which it would say again what it has said."""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Start]:
    with children(tmp_path / "ckpt") as start:
        yield start


class Hung:
    """A mutex of C that its owner waits for: no signal ends that, and the GIL is free."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(None)
        self.mutex = ctypes.create_string_buffer(64)
        self.library.pthread_mutex_lock(self.mutex)

    def hang(self) -> None:
        self.library.pthread_mutex_lock(self.mutex)

    def release(self) -> None:
        self.library.pthread_mutex_unlock(self.mutex)


def test_sigterm_is_taken_over_by_a_thread_while_the_main_thread_hangs(child: Start) -> None:
    def script(directory: Path) -> None:
        job, hung = Job(directory), Hung()
        job.run(2)
        job.loss()
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        hung.hang()

    ended = child(script).end()
    assert ended.status == -signal.SIGTERM
    assert_is_step(ended.saved(), 2)


def test_hang_saves_from_the_watchdogs_thread_and_exits_with_75(child: Start) -> None:
    def script(directory: Path) -> None:
        job = Job(directory, minimum_stall=0.2)
        job.run(4)
        hung = Hung()
        job.loss()
        pretend_a_collective(jit.completed_steps())
        print("not lost", file=sys.stderr, end="")
        hung.hang()

    ended = child(script).end()
    assert ended.status == 75
    assert_is_step(ended.saved(), 4)
    assert "a collective has not moved for" in ended.said and "not lost" in ended.said


def test_training_that_comes_back_during_the_save_changes_nothing_of_it(child: Start) -> None:
    def script(directory: Path) -> None:
        calls: list[int] = []

        def save(path: Path) -> None:
            calls.append(1)
            if len(calls) == 1:
                torch.rand(1)  # what the C call that comes back may have done
                hung.release()
            time.sleep(0.3)  # the main thread has every chance to go on
            job.save(path)

        job = Job(directory, minimum_stall=0.2, save=save)
        job.run(4)
        hung = Hung()
        job.loss()
        pretend_a_collective(jit.completed_steps())
        hung.hang()
        job.run(100)
        raise AssertionError("the training went on")

    ended = child(script).end()
    assert ended.status == 75
    assert_is_step(ended.saved(), 4)


def test_hang_where_nothing_can_be_saved_is_said_once_and_left_to_the_time_out(child: Start) -> None:
    def script(directory: Path) -> None:
        job = Job(directory, minimum_stall=0.2)
        job.run(4)
        job.step()
        pretend_a_collective(jit.completed_steps())
        session: Any = jit._session
        say, look, later = session.say, watchdog.counts, iter(range(LOOKS))
        told, over = threading.Event(), threading.Event()

        def say_so(sentence: str) -> None:
            say(sentence)
            told.set()

        def look_again() -> Any:
            if told.is_set() and next(later, None) is None:
                over.set()
            return look()

        session.say, watchdog.counts = say_so, look_again  # type: ignore[assignment]
        over.wait()
        os._exit(9)

    ended = child(script).end()
    assert (ended.status, ended.saved()) == (9, None)
    assert ended.said.count("nothing is saved (a collective has not moved") == 1


def test_save_that_calls_a_collective_counts_for_nothing_and_is_told(child: Start) -> None:
    def script(directory: Path) -> None:
        import torch.distributed as dist

        def save(path: Path) -> None:
            job.save(path)
            dist.all_reduce(torch.ones(1))

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        job = Job(directory, save=save)
        job.run(2)
        raise RuntimeError("the peer is gone")

    ended = child(script).end()
    assert ended.saved() is None
    assert "save_checkpoint called a collective" in ended.said


def test_save_that_hangs_in_a_collective_is_ended_behind_the_grace_and_its_line_is_named(
    child: Start,
) -> None:
    def script(directory: Path) -> None:
        def save(path: Path) -> None:
            all_reduce(path)

        code = compile(
            "def all_reduce(path):\n    hang()\n", "/torch/distributed/distributed_c10d.py", "exec"
        )
        names: dict[str, Any] = {"hang": Hung().hang}
        exec(code, names)
        all_reduce = names["all_reduce"]
        Job(directory, save=save, grace=0.3).run(2)
        raise RuntimeError("the peer is gone")

    ended = child(script).end()
    assert (ended.status, ended.saved()) == (1, None)
    assert "save_checkpoint hangs in a collective, all_reduce (" in ended.said
    assert f"{Path(__file__).name}:" in ended.said and "RuntimeError: the peer is gone" in ended.said


def test_save_that_takes_longer_than_the_grace_is_told_and_goes_on(child: Start) -> None:
    def script(directory: Path) -> None:
        def save(path: Path) -> None:
            time.sleep(0.4)
            job.save(path)

        job = Job(directory, save=save, grace=0.1)
        job.run(2)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_signal()

    ended = child(script).end()
    assert_is_step(ended.saved(), 2)
    assert "has not ended within the grace of 0.1 s and goes on" in ended.said
