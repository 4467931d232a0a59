"""How soon the death of a device server is known: by the word in its log, and by its pidfd.

    .venv/bin/python bench/death_notice.py [--megabytes 10 60 200 600] [--kills 15] [--threads 20]

A process with so much memory, all of it touched, and so many sleeping threads holds the word of a log as a
device server does, and is killed. Both notices of each death go into one event loop, that of proxyd, so they
are measured on the same deaths: `word` has asked whether all threads are in their exits, as in proxyd.
Milliseconds from just before the SIGKILL; `proxyd` is what is used: whichever comes first.

    .venv/bin/python bench/death_notice.py --drills 6 [--ranks 2] [--turns 2]

Device servers of a training that are killed by drills, parts of their recoveries: with proxyd as it is, and
in turns with one whose kernel has no futex_waitv, where pidfds are the only notice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from running_proxyd import running_proxyd
from training_run import RunFailed, Training, installed

HOLDER = """
import mmap, sys, threading, time
from understudy import replay

memory = mmap.mmap(-1, max(1, int(sys.argv[2])) << 20)
for page in range(0, len(memory), mmap.PAGESIZE):
    memory[page] = 1
for _ in range(int(sys.argv[3])):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
held = replay.HeldLog(sys.argv[1])
print("held", flush=True)
time.sleep(1000)
"""
SHARED_MEMORY = "/dev/shm"
PARTS = ("detect_s", "restart_s", "copy_s", "communicators_s", "replay_s")
EVERY = 6
"""Minibatches from one drill to the next."""


@dataclass(frozen=True)
class Death:
    """Milliseconds from the kill to each notice."""

    word: float
    pidfd: float


async def one_death(megabytes: int, threads: int) -> Death:
    """Of a process made for it; raises RunFailed if there is no early notice within ten seconds."""
    from understudy import replay
    from understudy.recovery.host.early_notice import EarlyNotice
    from understudy.recovery.machine.processes import Watched

    folder = Path(tempfile.mkdtemp(prefix="understudy-bench-", dir=SHARED_MEMORY))
    early = EarlyNotice()
    try:
        replay.create_log(str(folder), segment_bytes=4 << 20, segment_count=1, dictionary_bytes=1 << 20,
                          reply_bytes=4096, shadow_bytes=4096)  # fmt: skip
        command = [sys.executable, "-P", "-c", HOLDER, str(folder), str(megabytes), str(threads)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            await asyncio.to_thread(holder.stdout.readline)
            watched = Watched(holder.pid)
            early.follow(watched, folder)
            await asyncio.sleep(0.05)  # the waiter sleeps in the kernel
            begin = time.monotonic_ns()
            os.kill(holder.pid, signal.SIGKILL)
            async with asyncio.timeout(10):
                await watched.ended.wait()
                first = watched.ended_ns
                await watched.memory_gone.wait()
            gone = time.monotonic_ns()
            watched.close()
        if not early.usable:
            raise RunFailed("this kernel has no futex_waitv")
        return Death((first - begin) / 1e6, (gone - begin) / 1e6)
    finally:
        early.close()
        shutil.rmtree(folder, ignore_errors=True)


def spread(values: Sequence[float]) -> str:
    """Best, median and worst."""
    return f"{min(values):8.2f} {statistics.median(values):8.2f} {max(values):8.2f}"


def by_size(sizes: Sequence[int], kills: int, threads: int) -> None:
    """Sizes in turns, as load comes and goes."""
    deaths: dict[int, list[Death]] = {size: [] for size in sizes}
    for _ in range(kills):
        for size in sizes:
            deaths[size].append(asyncio.run(one_death(size, threads)))
    print(f"{kills} kills of each, {threads} threads; ms: best, median, worst")
    for size, found in deaths.items():
        words, pidfds = [death.word for death in found], [death.pidfd for death in found]
        print(f"{size:5} MB resident   word {spread(words)}   pidfd {spread(pidfds)}")


def drilled(folder: Path, ranks: int, kills: int, *, early: bool) -> list[dict[str, float]]:
    """Recoveries of one training."""
    drills = tuple(
        f"kill-server rank={n % ranks} step={EVERY * (n + 1)} call={20 + 30 * n}" for n in range(kills)
    )
    program = installed("proxyd")
    if not early:
        program = [sys.executable, str(Path(__file__).parent / "old_kernel.py"), *program]
    folder.mkdir(mode=0o700)
    training = Training("char_gpt.py", ranks, EVERY * (kills + 1), ["--log-every", "1000"])
    with running_proxyd(folder / "proxyd.sock", ranks, program=program, log=folder / "log") as proxyd:
        options = ("--socket", str(proxyd.socket))
        report = training.run(folder / "run", proxied=True, drills=drills, options=options).report
    recoveries: list[dict[str, float]] = report["recoveries"]
    if len(recoveries) < kills or not all(entry["recovered"] for entry in recoveries):
        raise RunFailed(f"{len(recoveries)} of {kills} deaths were recovered from")
    return recoveries


def by_drills(ranks: int, kills: int, turns: int) -> None:
    """Both ways in turns."""
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="understudy-bench-") as folder:
        for turn in range(turns):
            for early in (False, True):
                run = drilled(Path(folder, f"{turn}-{early}"), ranks, kills, early=early)
                found[early] += run
    for early, entries in found.items():
        name = "word and pidfd" if early else "pidfd alone   "
        medians = {part: 1000 * statistics.median(entry[part] for entry in entries) for part in PARTS}
        parts = ", ".join(f"{part.removesuffix('_s')} {median:.1f}" for part, median in medians.items())
        whole = [1000 * (entry["total_s"] - entry["replay_s"]) for entry in entries]
        print(f"{name} {len(entries)} deaths, {ranks} ranks; ms, medians: {parts}")
        print(f"  without replay, best, median, worst: {spread(whole)}")
    print(json.dumps({str(early): entries for early, entries in found.items()}), file=sys.stderr)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 60, 200, 600], help="resident")
    parser.add_argument("--kills", type=int, default=15, help="of each size (15)")
    parser.add_argument("--threads", type=int, default=20, help="that sleep, beside the others (20)")
    parser.add_argument(
        "--drills", type=int, default=0, help="kill so many device servers of a training instead"
    )
    parser.add_argument("--ranks", type=int, default=2, help="of that training (2)")
    parser.add_argument("--turns", type=int, default=2, help="trainings each way (2)")
    options = parser.parse_args()
    if options.drills:
        by_drills(options.ranks, options.drills, options.turns)
    else:
        by_size(options.megabytes, options.kills, options.threads)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
