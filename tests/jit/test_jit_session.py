"""What asks for a just-in-time save, and what refuses it: whole processes (paper 001 §3)."""

from __future__ import annotations

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
from jit_child import Job, Start, assert_is_step, children, expected, wait_for_signal

from understudy import jit

pytestmark = pytest.mark.drawn(2)


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Start]:
    with children(tmp_path / "ckpt") as start:
        yield start


@pytest.mark.parametrize("boundary", [True, False])
def test_exception_in_a_step_saves_the_end_of_the_step_before_and_its_traceback_follows(
    child: Start, boundary: bool
) -> None:
    def script(directory: Path) -> None:
        job = Job(directory)
        job.run(3, boundary)
        job.loss().backward()
        raise RuntimeError("the peer is gone")

    ended = child(script).end()
    assert ended.status == 1
    assert_is_step(ended.saved(), 3)
    lines = ended.said.splitlines()
    save = next(n for n, line in enumerate(lines) if "rank 0: step 3 saved in" in line)
    assert "(RuntimeError: the peer is gone); all ranks arrived." in lines[save]
    assert lines[-1] == "RuntimeError: the peer is gone" and save < len(lines) - 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_whoever_ends_the_script_deliberately_gets_no_save(child: Start, error: type[BaseException]) -> None:
    def script(directory: Path) -> None:
        Job(directory).run(3)
        raise error

    ended = child(script).end()
    assert ended.saved() is None and "understudy.jit" not in ended.said.replace(
        "understudy.jit: rank 0: Noth", ""
    )


def test_exception_before_the_first_step_or_between_optimizer_and_boundary_saves_nothing_and_says_why(
    child: Start, tmp_path: Path
) -> None:
    def early(directory: Path) -> None:
        Job(directory)
        raise RuntimeError("early")

    def between(directory: Path) -> None:
        job = Job(directory)
        job.run(2)
        job.step()
        raise RuntimeError("between")

    for script, sentence in ((early, "no step was completed"), (between, "between the optimizer's step")):
        ended = child(script).end()
        assert ended.saved() is None and ended.status == 1
        assert f"nothing is saved (RuntimeError): {sentence}" in ended.said.replace("the fault lies ", "")


def test_save_that_raises_leaves_nothing_that_counts_and_is_shown(child: Start) -> None:
    def script(directory: Path) -> None:
        def save(path: Path) -> None:
            path.write_text("half")
            raise OSError("the disk is full")

        Job(directory, save=save).run(2)
        raise RuntimeError("the peer is gone")

    ended = child(script).end()
    assert ended.saved() is None and ended.status == 1
    assert "step 2 could not be saved" in ended.said and "the disk is full" in ended.said
    assert ended.said.splitlines()[-1] == "RuntimeError: the peer is gone"


@pytest.mark.parametrize("boundary", [True, False])
def test_sigterm_saves_and_the_process_ends_as_if_killed_by_it(child: Start, boundary: bool) -> None:
    def script(directory: Path) -> None:
        job = Job(directory)
        job.run(4, boundary)
        job.loss()
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_signal()

    ended = child(script).end()
    assert ended.status == -signal.SIGTERM
    assert_is_step(ended.saved(), 4)
    assert "step 4 saved" in ended.said and "(SIGTERM)" in ended.said


@pytest.mark.parametrize("boundary", [True, False])
def test_sigterm_behind_the_optimizer_waits_for_the_end_of_the_step(child: Start, boundary: bool) -> None:
    def script(directory: Path) -> None:
        job = Job(directory)
        job.run(2, boundary)
        job.step()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)
        job.scheduler.step()
        if boundary:
            jit.boundary()
        job.loss()

    ended = child(script).end()
    assert ended.status == -signal.SIGTERM
    assert_is_step(ended.saved(), 3)


def test_sigterm_inside_the_optimizer_waits_as_well_and_gives_up_behind_the_grace(child: Start) -> None:
    def script(directory: Path) -> None:
        job = Job(directory, grace=0.2)
        job.run(2)
        job.step()
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_signal()

    ended = child(script).end()
    assert (ended.status, ended.saved()) == (-signal.SIGTERM, None)
    assert "nothing is saved (SIGTERM, 0.2 s ago)" in ended.said


def test_handler_of_the_script_is_called_where_nothing_is_saved(child: Start) -> None:
    def script(directory: Path) -> None:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(31))
        Job(directory)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_signal()

    assert child(script).end().status == 31


def test_handler_that_the_script_installs_later_gets_one_behind_it_at_the_next_step(child: Start) -> None:
    def script(directory: Path) -> None:
        job = Job(directory)
        before = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *given: before(*given))  # type: ignore[operator,misc]
        job.run(2)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_signal()

    ended = child(script).end()
    assert ended.status == -signal.SIGTERM
    assert_is_step(ended.saved(), 2)


def test_workers_of_a_loader_that_end_with_the_job_do_not_spoil_the_save(child: Start) -> None:
    """A launcher ends all processes of the job, and PyTorch raises in the main thread when a worker ends."""

    def script(directory: Path) -> None:
        def save(path: Path) -> None:
            (worker,) = iterator._workers
            os.kill(worker.pid, signal.SIGKILL)
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
            job.save(path)

        job = Job(directory, save=save)
        job.run(2)
        iterator: Any = iter(torch.utils.data.DataLoader([1.0] * 4, num_workers=1))
        next(iterator)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_signal()

    ended = child(script).end()
    assert ended.status == -signal.SIGTERM
    assert_is_step(ended.saved(), 2)


def test_sigterm_during_a_save_does_not_save_twice_or_end_it(child: Start) -> None:
    def script(directory: Path) -> None:
        def save(path: Path) -> None:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)
            job.save(path)

        job = Job(directory, save=save)
        job.run(2)
        raise RuntimeError("the peer is gone")

    ended = child(script).end()
    assert ended.status == 1 and ended.said.count("saved in") == 1
    assert_is_step(ended.saved(), 2)


def test_forks_of_a_rank_save_nothing_and_end_as_without_this(child: Start) -> None:
    def script(directory: Path) -> None:
        job = Job(directory)
        job.run(2)
        hears, tells = os.pipe()
        for fails in (True, False):
            if (worker := os.fork()) == 0:
                assert sys.excepthook is sys.__excepthook__
                assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
                if fails:
                    raise ValueError("in a worker")
                os.write(tells, b"x")
                wait_for_signal()
            if not fails:
                os.read(hears, 1)
                os.kill(worker, signal.SIGTERM)
            _, status = os.waitpid(worker, 0)
            assert os.waitstatus_to_exitcode(status) == (1 if fails else -signal.SIGTERM)
        assert not list(directory.glob("step-*"))
        job.loss()
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_signal()

    ended = child(script).end()
    assert ended.status == -signal.SIGTERM
    assert_is_step(ended.saved(), 2)


def test_close_leaves_nothing_behind_and_may_be_followed_by_another_init(child: Start) -> None:
    def script(directory: Path) -> None:
        threads = threading.active_count()
        for _ in range(2):
            job = Job(directory)
            with pytest.raises(jit.JitError, match="was called before"):
                jit.init(job.save, directory, job="test")
            job.run(1)
            jit.close()
            jit.close()
        deadline = time.monotonic() + 10
        while threading.active_count() > threads and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threading.active_count() == threads
        assert sys.excepthook is sys.__excepthook__
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and signal.set_wakeup_fd(-1) == -1
        with pytest.raises(jit.JitError, match=r"jit\.init has not been called"):
            jit.boundary()
        job.run(2, boundary=False)

    ended = child(script).end()
    assert ended.status == 0, ended.said


def test_close_in_a_finally_clause_does_not_keep_the_exception_from_saving(child: Start) -> None:
    def script(directory: Path) -> None:
        job = Job(directory)
        try:
            job.run(2)
            raise RuntimeError("the peer is gone")
        finally:
            jit.close()

    assert_is_step(child(script).end().saved(), 2)


def test_job_that_is_started_again_goes_on_with_count_state_and_generators(child: Start) -> None:
    def fails(directory: Path) -> None:
        job = Job(directory)
        job.run(3)
        job.loss()
        raise RuntimeError("the peer is gone")

    def goes_on(directory: Path) -> None:
        job = Job(directory)
        path = jit.get_checkpoint_path()
        assert path is not None
        job.model.load_state_dict(torch.load(path, weights_only=False)["model"])
        torch.manual_seed(77)
        assert jit.restore_generators()
        assert jit.completed_steps() == 3
        assert torch.equal(torch.get_rng_state(), expected_state)

    expected_state = expected(3)[2]
    child(fails).end()
    ended = child(goes_on).end()
    assert ended.status == 0, ended.said


def test_generators_that_are_gone_are_told(child: Start) -> None:
    def script(directory: Path) -> None:
        job = Job(directory)
        job.run(1)
        own = directory.parent / "own"
        job.save(own)
        jit.saved(own, 1)
        jit.close()
        for file in (directory / "slots").rglob("*-*"):
            if file.is_file():
                file.unlink()
        Job(directory)
        assert jit.get_checkpoint_path() is not None and jit.completed_steps() == 1
        assert not jit.restore_generators()

    ended = child(script).end()
    assert ended.status == 0, ended.said
    assert "own generators of step 1 are not in" in ended.said


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"save_checkpoint": None}, "must be a function"),
        ({"grace": 0.0}, "must be above 0"),
        ({"minimum_stall": float("nan")}, "must be above 0"),
    ],
)
def test_init_refuses_what_cannot_be_in_one_sentence(
    tmp_path: Path, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(jit.JitError, match=sentence):
        given: dict[str, Any] = {"save_checkpoint": print, "directory": tmp_path} | settings
        jit.init(**given)


def test_state_without_a_replica_is_told_at_init(child: Start) -> None:
    def script(directory: Path) -> None:
        with pytest.warns(UserWarning, match=r"^Nothing to save from: one process alone has this state"):
            jit.init(print, directory, job="test")
        jit.close()

    ended = child(script).end()
    assert ended.status == 0, ended.said


def test_previous_wakeup_descriptor_still_hears_of_signals(child: Start) -> None:
    def script(directory: Path) -> None:
        hears, tells = os.pipe()
        os.set_blocking(tells, False)
        signal.set_wakeup_fd(tells)
        signal.signal(signal.SIGUSR1, lambda *_: None)
        Job(directory)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert os.read(hears, 1) == bytes([signal.SIGUSR1])
        jit.close()
        assert signal.set_wakeup_fd(-1) == tells

    ended = child(script).end()
    assert ended.status == 0, ended.said


def test_ignored_sigterm_stays_ignored(child: Start) -> None:
    def script(directory: Path) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Job(directory).run(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN

    assert child(script).end().status == 0
