"""Deaths of device servers by the words of their logs: noticed, never made up, and in the end by pidfds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from places import ROOT, TESTS
from proxied import until

from understudy import replay
from understudy.recovery.host.early_notice import EarlyNotice
from understudy.recovery.host.gpu_health import GpuHealth
from understudy.recovery.host.placement import HostPlacement
from understudy.recovery.machine.processes import Watched, start_ticks
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY
from understudy.replay import LifeNews, LifeWatch, Log, LogError, ProcessEnd, create_log

HOLDER = TESTS / "workloads" / "life_holder.py"
OLD_KERNEL = ROOT / "bench" / "old_kernel.py"
OWNER_DIED, WAITERS = 0x40000000, 0x80000000
SOON_S, NOTHING_S = 20.0, 0.3
try:
    LifeWatch()
except LogError as problem:
    pytestmark = pytest.mark.skip(reason=str(problem))


def make_log(parent: str) -> str:
    directory = tempfile.mkdtemp(dir=parent)
    create_log(directory, segment_bytes=4 << 20, segment_count=1, dictionary_bytes=1 << 20, reply_bytes=4096,
               shadow_bytes=4096)  # fmt: skip
    return directory


@pytest.fixture
def parent() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="understudy-test-", dir=SHARED_MEMORY)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def directory(parent: str) -> str:
    return make_log(parent)


class Holder:
    """A process that holds the words of logs."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HOLDER), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None and self.process.stdin is not None
        self.out, self.into = self.process.stdout, self.process.stdin
        self.pid = self.process.pid
        first = self.out.readline().strip()
        if first.isdigit():
            self.pid = int(first)
            first = self.out.readline().strip()
        assert first == "held", first
        self.started = start_ticks(self.pid)

    def tell(self, line: str) -> None:
        self.into.write(f"{line}\n")
        self.into.flush()
        assert self.out.readline().strip() == "done"

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.into.close()
        self.out.close()


@contextmanager
def holding(*words: str) -> Iterator[Holder]:
    holder = Holder(*words)
    try:
        yield holder
    finally:
        holder.close()


def next_notices(watch: LifeWatch, within_s: float = SOON_S) -> list[tuple[int, LifeNews]]:
    """None if there are none in time."""
    if not select.select([watch.fileno()], [], [], within_s)[0]:
        return []
    return [(notice.id, notice.news) for notice in watch.take()]


def waiting_threads() -> set[int]:
    """Of this process."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            if (task / "comm").read_text().strip() == "life-watch":
                found.add(int(task.name))
    return found


def word_at(directory: str) -> int:
    """Where the word lies in the control page."""
    Log(directory).server_life = 0x12345678
    content = Path(directory, "control").read_bytes()
    at = content.index((0x12345678).to_bytes(4, "little"))
    Log(directory).server_life = 0
    return at


# ------------------------------------------------------------------ the word
def test_the_word_has_a_cache_line_of_its_own_and_does_not_travel_to_mirrors(parent: str) -> None:
    here, there = make_log(parent), make_log(parent)
    at = word_at(here)
    assert at % 64 == 0
    log, mirror = Log(here), Log(there)
    log.server_life = 77 | WAITERS
    replay.apply_control_state(mirror, replay.control_state(log), 0)
    assert (log.server_life, mirror.server_life) == (77 | WAITERS, 0)


def test_a_word_is_held_let_go_of_and_never_taken_from_who_holds_it_now(directory: str) -> None:
    log = Log(directory)
    first = replay.HeldLog(directory)
    of_first = log.server_life
    second = replay.HeldLog(directory)
    of_second = log.server_life
    first.let_go()  # another one holds it
    assert log.server_life == of_second
    first.hold()
    assert log.server_life == of_first != of_second
    second.let_go()
    assert log.server_life == of_first
    first.let_go()
    assert log.server_life == 0
    assert of_first & WAITERS and not of_first & OWNER_DIED


# ------------------------------------------------------------------ deaths
def test_a_killed_process_is_told_of_once_and_none_of_its_threads_runs_any_more(directory: str) -> None:
    watch = LifeWatch()
    with holding(directory) as holder:
        number = watch.watch(directory, holder.pid, holder.started)
        assert replay.process_end(holder.pid, holder.started) == ProcessEnd.RUNS
        holder.kill()
        assert next_notices(watch) == [(number, LifeNews.DIED)]
        assert replay.process_end(holder.pid, holder.started) == ProcessEnd.STOPPED
        assert next_notices(watch, 0.0) == []
    assert Log(directory).server_life == OWNER_DIED | WAITERS


def test_who_is_watched_before_it_takes_the_word_of_a_dead_one_is_told_of_when_it_dies(
    directory: str,
) -> None:
    watch = LifeWatch()
    with holding(directory) as former:
        former.kill()
        former.process.wait()
    log = Log(directory)
    assert log.server_life == OWNER_DIED | WAITERS
    process = subprocess.Popen([sys.executable, str(HOLDER), directory], stdin=subprocess.PIPE)
    try:
        number = watch.watch(directory, process.pid, start_ticks(process.pid))
        until(lambda: log.server_life & 0x3FFFFFFF, "the successor holds the word")
        assert next_notices(watch, NOTHING_S) == []
        process.kill()
        assert next_notices(watch) == [(number, LifeNews.DIED)]
    finally:
        process.kill()
        process.communicate()


def test_more_words_than_one_thread_can_wait_for_are_all_told_of(parent: str) -> None:
    directories = [make_log(parent) for _ in range(150)]
    watch, before = LifeWatch(), waiting_threads()
    with holding(*directories) as holder:
        numbers = {watch.watch(one, holder.pid, holder.started) for one in directories}
        until(lambda: len(waiting_threads() - before) == 2, "two threads wait")
        holder.kill()
        told: list[tuple[int, LifeNews]] = []

        def all_told() -> bool:
            told.extend(next_notices(watch, 1.0))
            return len(told) >= 150

        until(all_told, "all are told of")
        assert dict(told) == dict.fromkeys(numbers, LifeNews.DIED) and len(told) == 150


def test_a_process_of_another_namespace_of_pids_is_told_of(directory: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("a namespace of pids needs root")
    watch = LifeWatch()
    with holding("--other-namespace", directory) as holder:
        assert Log(directory).server_life & 0x3FFFFFFF < holder.pid  # the thread's id there
        number = watch.watch(directory, holder.pid, holder.started)
        holder.kill()
        assert next_notices(watch) == [(number, LifeNews.DIED)]


# ------------------------------------------------------------------ no deaths
def test_a_word_that_is_garbage_makes_no_death_of_a_living_process(directory: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    values = random.Random(seed)
    log, watch = Log(directory), LifeWatch()
    with holding(directory) as holder:
        for _ in range(8):
            number = watch.watch(directory, holder.pid, holder.started)
            log.server_life = values.getrandbits(30) | OWNER_DIED | values.choice((0, WAITERS))
            assert next_notices(watch) == [(number, LifeNews.DISBELIEVED)]
            log.server_life = values.getrandbits(30) & ~OWNER_DIED
            assert next_notices(watch, 0.02) == []
            watch.forget(number)


def test_a_word_that_changes_all_the_time_is_not_looked_at_for_ever(directory: str) -> None:
    log, watch = Log(directory), LifeWatch()
    with holding(directory) as holder:
        number = watch.watch(directory, holder.pid, holder.started)
        told: list[tuple[int, LifeNews]] = []
        value = iter(range(1, 1 << 30))

        def scribble() -> bool:
            log.server_life = next(value)
            told.extend(next_notices(watch, 0.001))
            return bool(told)

        until(scribble, "it is given up", pause_s=0)
        assert told == [(number, LifeNews.DISBELIEVED)]
        log.server_life = OWNER_DIED | WAITERS
        assert next_notices(watch, NOTHING_S) == []


def test_a_death_behind_a_word_that_was_garbage_before_is_still_believed(directory: str) -> None:
    log, watch = Log(directory), LifeWatch()
    with holding(directory) as holder:
        held = log.server_life
        number = watch.watch(directory, holder.pid, holder.started)
        log.server_life = OWNER_DIED
        assert next_notices(watch) == [(number, LifeNews.DISBELIEVED)]
        log.server_life = held
        assert next_notices(watch, 0.05) == []
        holder.kill()
        assert next_notices(watch) == [(number, LifeNews.DIED)]


def test_a_process_that_lets_go_and_lives_has_not_died(directory: str) -> None:
    watch = LifeWatch()
    with holding(directory) as holder:
        watch.watch(directory, holder.pid, holder.started)
        holder.tell("let-go")
        assert Log(directory).server_life == 0
        assert next_notices(watch, NOTHING_S) == []


def test_a_thread_that_ends_without_letting_go_is_not_the_death_of_its_process(directory: str) -> None:
    watch = LifeWatch()
    at = word_at(directory)
    with holding(directory) as holder:
        number = watch.watch(directory, holder.pid, holder.started)
        holder.tell(f"abandon {at}")
        until(lambda: Log(directory).server_life == OWNER_DIED | WAITERS, "the kernel has marked it")
        assert next_notices(watch) == [(number, LifeNews.DISBELIEVED)]


def test_a_process_whose_first_thread_has_ended_has_not_stopped(directory: str) -> None:
    log, watch = Log(directory), LifeWatch()
    with holding(directory) as holder:
        watch.watch(directory, holder.pid, holder.started)
        holder.tell("leader-ends")
        stat = Path(f"/proc/{holder.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "its first thread has ended")
        log.server_life = OWNER_DIED | WAITERS
        assert next_notices(watch, NOTHING_S) == []
        assert replay.process_end(holder.pid, holder.started) == ProcessEnd.DYING


def test_a_log_that_is_none_or_of_another_version_is_not_watched(directory: str) -> None:
    watch = LifeWatch()
    with pytest.raises(LogError, match="cannot open"):
        watch.watch(f"{directory}/none", os.getpid(), 1)
    with open(f"{directory}/control", "r+b") as control:
        control.seek(8)
        control.write((11).to_bytes(4, "little"))
    with pytest.raises(LogError, match="holds no log of this build"):
        watch.watch(directory, os.getpid(), 1)


def test_what_is_watched_and_forgotten_from_many_threads_leaves_no_thread_behind(parent: str) -> None:
    directories = [make_log(parent) for _ in range(4)]
    watches, before = [LifeWatch()], waiting_threads()

    def come_and_go(directory: str) -> None:
        watch = watches[0]
        for _ in range(200):
            watch.forget(watch.watch(directory, os.getpid(), start_ticks(os.getpid())))

    threads = [threading.Thread(target=come_and_go, args=(one,)) for one in directories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    watches.clear()
    assert waiting_threads() <= before


# ------------------------------------------------------------------ in proxyd
def scene(act: Callable[[EarlyNotice, Watched, Holder], Awaitable[None]], directory: str) -> None:
    async def run() -> None:
        early = EarlyNotice()
        with holding(directory) as holder:
            watched = Watched(holder.pid)
            try:
                await asyncio.wait_for(act(early, watched, holder), SOON_S)
            finally:
                watched.close()
                early.close()

    asyncio.run(run())


def test_a_death_is_an_end_at_once_and_its_memory_is_gone_when_the_pidfd_says_so(directory: str) -> None:
    async def act(early: EarlyNotice, watched: Watched, holder: Holder) -> None:
        assert early.follow(watched, Path(directory)) > 0
        asyncio.get_running_loop().remove_reader(watched._fd)  # the pidfd says nothing yet
        holder.kill()
        await watched.ended.wait()
        noticed = watched.ended_ns
        assert noticed and not watched.running and not watched.memory_gone.is_set()
        ending = asyncio.create_task(watched.end(0.0))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not ending.done()
        watched._on_end()
        await ending
        assert watched.ended_ns == noticed

    scene(act, directory)


@pytest.mark.parametrize(
    "broken", ["word never taken", "nobody waits", "waiters lost", "word scribbled over"]
)
def test_a_death_that_no_word_tells_of_is_noticed_by_its_pidfd(directory: str, broken: str) -> None:
    async def act(early: EarlyNotice, watched: Watched, holder: Holder) -> None:
        if broken == "word never taken":
            holder.tell("let-go")
        if broken != "nobody waits":
            early.follow(watched, Path(directory))
        if broken == "waiters lost":
            early.close()
        if broken == "word scribbled over":  # the kernel marks only what the dying thread holds
            Log(directory).server_life = 0x1234 | WAITERS
        holder.kill()
        await watched.ended.wait()
        assert watched.memory_gone.is_set()

    scene(act, directory)


def test_garbage_in_the_word_leaves_a_living_device_server_running(
    directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def act(early: EarlyNotice, watched: Watched, holder: Holder) -> None:
        early.follow(watched, Path(directory))
        Log(directory).server_life = OWNER_DIED | WAITERS
        said = ""
        while "tells of a death, and this device server runs" not in said:
            await asyncio.sleep(0.01)  # what is logged has no event
            said += capsys.readouterr().out
        assert watched.running and not watched.ended.is_set()

    scene(act, directory)


def test_a_kernel_without_futex_waitv_is_told_of_once_and_pidfds_remain(directory: str) -> None:
    script = """
import asyncio, pathlib, subprocess, sys
from understudy.recovery.host.early_notice import EarlyNotice
from understudy.recovery.machine.processes import Watched

async def main():
    early = EarlyNotice()
    child = subprocess.Popen(["sleep", "100"])
    watched = Watched(child.pid)
    assert not early.usable and early.follow(watched, pathlib.Path(sys.argv[1])) == 0
    child.kill()
    await asyncio.wait_for(watched.ended.wait(), 20)
    assert watched.memory_gone.is_set()
    early.leave(0)
    early.close()

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, str(OLD_KERNEL), sys.executable, "-P", "-c", script, directory],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("pidfd alone") == 1 and "Function not implemented" in done.stdout


def server_on(device: str) -> Any:
    """A new one, whose device computes."""

    async def execute(command: object, within_s: float) -> Any:
        return SimpleNamespace(error="")

    return SimpleNamespace(device=device, execute=execute)


@pytest.mark.parametrize("died", [True, False])
@pytest.mark.parametrize(("device", "waits"), [("cuda:0", True), ("cpu:0", False)])
def test_a_replacement_waits_for_the_memory_of_a_gpu_and_for_no_other(
    device: str, waits: bool, died: bool
) -> None:
    """Of a server whose death was noticed early, and of one that is killed to be replaced."""

    async def run() -> None:
        process = Watched.gone(1, 1)
        process.memory_gone.clear()
        if not died:
            process.ended.clear()

        class Pool:
            def retire(self, server: Any) -> None: ...

            async def take(self, device: str) -> Any:
                return server_on(device)

        leases = SimpleNamespace(is_homeless=lambda session: False, health=GpuHealth())
        session: Any = SimpleNamespace(
            server=SimpleNamespace(process=process), device=device, device_index=0, on_gpu=waits,
            destination=None, rank=0,
        )  # fmt: skip
        placement = HostPlacement(cast(Any, Pool()), cast(Any, leases))
        taken = asyncio.create_task(placement.replacement(session, keep_source=False))
        for _ in range(10):
            await asyncio.sleep(0)
        assert taken.done() is not waits
        process.memory_gone.set()
        assert (await taken).device == device

    asyncio.run(run())


def test_a_gpu_whose_memory_is_not_given_back_is_left_for_another_one() -> None:
    async def run() -> None:
        process = Watched.gone(1, 1)
        process.memory_gone.clear()
        fenced: list[str] = []

        def move(session: Any) -> bool:
            session.device = "cuda:1"
            return True

        class Pool:
            def retire(self, server: Any) -> None: ...

            async def take(self, device: str) -> Any:
                return server_on(device)

        leases = SimpleNamespace(
            fence=lambda session, reason: fenced.append(reason),
            is_homeless=lambda session: fenced, move=move, health=GpuHealth(),
        )  # fmt: skip
        session: Any = SimpleNamespace(
            server=SimpleNamespace(process=process), device="cuda:0", device_index=0, on_gpu=True,
            destination=None, rank=0,
        )  # fmt: skip
        placement = HostPlacement(cast(Any, Pool()), cast(Any, leases), emptied_s=0.0)
        found = await placement.replacement(session, keep_source=False)
        assert found.device == "cuda:1"
        assert fenced == ["its last server still held its memory 0 s after its end"]

    asyncio.run(run())
