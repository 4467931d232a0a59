"""Shards on disk that several processes write, and what those that died leave (paper 001 §3.2-3.3)."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

from jit_shards import complete, hidden, identity, opened, taken, text

from understudy.jit.identity import JitError
from understudy.jit.storage import ShardDirectory

FORK = multiprocessing.get_context("fork")


def in_processes(count: int, work: Callable[[int], None]) -> None:
    """Runs `work(rank)` in forks that begin at the same moment; all of them must end well."""
    barrier = FORK.Barrier(count)

    def begin(rank: int) -> None:
        barrier.wait(60)
        work(rank)

    processes = [FORK.Process(target=begin, args=(rank,), daemon=True) for rank in range(count)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(100)
        assert [process.exitcode for process in processes] == [0] * count
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_ranks_that_open_announce_and_save_at_the_same_time_are_one_attempt(tmp_path: Path) -> None:
    directory, world, steps = tmp_path / "ckpt", 6, 8

    def work(rank: int) -> None:
        for attempt in ("first", "second"):
            mine = ShardDirectory(directory, identity(rank, world, f"s{rank % 2}", attempt))
            mine.announce()
            for step in range(steps):
                mine.save(step, text(f"s{rank % 2} of {step}"), "a test")

    in_processes(world, work)

    assert sorted(os.listdir(directory / "announced")) == ["000001", "000002"]
    assert not hidden(directory)
    choice = ShardDirectory(directory, identity(1, world, "s1", "third")).choose()
    assert choice is not None and choice.step == steps - 1 and choice.path.read_text() == f"s1 of {steps - 1}"
    assert not choice.remarks


def test_jobs_that_come_at_the_same_time_do_not_share_a_directory(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        try:
            ShardDirectory(tmp_path / "ckpt", identity(0, job=f"job-{rank}"))
            (tmp_path / f"in-{rank}").touch()
        except JitError:
            pass

    in_processes(4, work)

    assert len(list(tmp_path.glob("in-*"))) == 1


def test_a_save_in_progress_is_left_alone_until_its_process_is_dead(tmp_path: Path) -> None:
    complete(tmp_path, 3)
    writing, still = FORK.Event(), FORK.Event()

    def hang(path: Path) -> None:
        path.write_text("half")
        writing.set()
        still.wait()

    process = FORK.Process(
        target=lambda: ShardDirectory(tmp_path, identity()).save(4, hang, "a test"), daemon=True
    )
    process.start()
    try:
        assert writing.wait(60)
        assert taken(tmp_path) == (3, "s0 of 3")
        assert len(hidden(tmp_path)) == 1
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    assert taken(tmp_path) == (3, "s0 of 3") and not hidden(tmp_path)


def test_remains_of_other_ranks_are_theirs_and_those_of_ranks_that_are_no_more_are_removed(
    tmp_path: Path,
) -> None:
    ShardDirectory(tmp_path, identity())
    names = [f".save.rank-{rank}.{0:016x}" for rank in (0, 1, 2, 3)]
    for name in names:
        (tmp_path / name).mkdir()

    ShardDirectory(tmp_path, identity(0, 2))

    assert sorted(hidden(tmp_path)) == [names[1], names[3]]


def test_remains_that_came_after_the_opening_are_removed_by_the_next_save(tmp_path: Path) -> None:
    [rank] = opened(tmp_path, world=1)
    (tmp_path / f".save.rank-0.{0:016x}").mkdir()

    rank.save(3, text("state"), "a test")

    assert not hidden(tmp_path)
