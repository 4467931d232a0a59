"""Ways for a rank to go on elsewhere, each measured a few times in one training of two ranks."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from running_proxyd import running_proxyd
from training_run import NATIVE_ATTEMPTS, ROOT, RunFailed, Training, execute, installed

from understudy.recovery.base.control import blocking_channel, pb, rpc

PARTS = ("detect", "restart", "copy", "communicators", "replay", "dump", "ship", "restore")
"""`restart`: all stand still, a plan is made, those that stay go back, a warm server attaches.

`ship`: images are sealed and their checksums compared; on one host they travel nowhere.

`restore`: until it runs.
"""
EVERY = 8
"""Steps from one event to the next."""
CHECKPOINT_EVERY, KILLED_AT = 10, 15
RESTARTED_WITHIN_S = 60.0
A_STORE_PER_ATTEMPT = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
"""Else a second attempt finds the first one's addresses in the agent's store, and Gloo waits for them."""
ANSWER_S = 120.0

Sample = dict[str, float]
"""Seconds of each part that there is, and their `total`."""


class Unavailable(RuntimeError):
    """It cannot be measured here; the text says why."""


@dataclass(frozen=True)
class Taken:
    """`losses`: of all ranks, bit for bit; empty for what is not ours."""

    samples: list[Sample]
    losses: list[list[str]]


def device_gone(count: int, folder: Path) -> Taken:
    """The device of a rank does not answer any more; it goes on on another one of the host."""
    drills = tuple(
        f"device-gone rank={i % 2} step={EVERY * (i + 1)} call={40 * (i + 1)}" for i in range(count)
    )
    with running_proxyd(Path(f"{folder}.sock"), 2 + count) as proxyd:
        options = ("--socket", str(proxyd.socket))
        outcome = _training(count).run(folder, proxied=True, drills=drills, options=options)
    return Taken(samples_of(outcome.report, "device-gone", count), outcome.losses)


def planned(count: int, folder: Path) -> Taken:
    """Nothing is broken: ranks go to the free device in turns."""

    def move(daemon: Any, event: int) -> Any:
        place = f"cpu:{(2, 0, 1)[event % 3]}"
        return daemon.MoveWorker(pb.MoveWorkerRequest(rank=event % 2, to=place), timeout=ANSWER_S)

    outcome, _ = _ordered(count, folder, move, ())
    return Taken(samples_of(outcome.report, "planned-move", count), outcome.losses)


def dumped(count: int, folder: Path) -> Taken:
    """A worker's process is dumped by CRIU, ended, and restored where it was; its device server goes on."""

    def move(daemon: Any, event: int) -> Any:
        return daemon.MoveWorker(pb.MoveWorkerRequest(rank=event % 2, images="/dev/shm"), timeout=ANSWER_S)

    outcome, told = _ordered(count, folder, move, ("--migratable",))
    return Taken([sample_of_dump(text) for text in told], outcome.losses)


def across_hosts(count: int, folder: Path) -> Taken:
    """A worker goes to another host and back, in turns: a job of two hosts and a spare one."""
    # Hosts are network namespaces, as tests make them.
    sys.path += [str(ROOT / "tests" / "harness" / folder) for folder in ("", "hosts", "processes")]
    import pytest
    from host_cluster import cluster, losses_of, report_of
    from proxied import until

    folder.mkdir()
    steps = EVERY * (count + 1)
    try:
        with cluster({"a": 1, "b": 1, "c": 1}) as hosts:
            runs = hosts.train(
                "ab", steps, folder / "losses", options=["--migratable"], arguments=["--log-every", "1"],
                first_options=["--report", str(folder / "report.json")],
            )  # fmt: skip
            for event in range(count):
                until(partial(_has_done, runs[0], EVERY * (event + 1)), "the next move", ANSWER_S)
                to = "cb"[event % 2]
                done = hosts["a"].recoveryctl("migrate", "--rank", "1", "--to", f"{to}:cpu:0")
                if done.returncode:
                    raise RunFailed(done.stderr)
            if any(run.wait(ANSWER_S) for run in runs):
                raise RunFailed("\n".join(runs[0].errors[-20:] + runs[1].errors[-20:]))
            report = report_of(folder / "report.json")
    except pytest.skip.Exception as reason:
        raise Unavailable(str(reason)) from reason
    samples = samples_of(report, "planned-move", count)
    for sample, one in zip(samples, report["recoveries"], strict=True):
        transfer = one["transfer"]
        sample["restart"] -= transfer["total_s"]
        sample |= {
            "dump": transfer["dump_s"], "ship": transfer["ship_s"],
            "restore": transfer["restore_s"] + transfer["switch_s"],
        }  # fmt: skip
    return Taken(samples, losses_of(folder / "losses", 2))


def _has_done(run: Any, step: int) -> bool:
    return run.process.poll() is not None or run.steps() >= step


def restarted(count: int, folder: Path) -> Taken:
    """What is done without us: a rank is killed, torchrun starts all again, they read the last checkpoint."""
    return Taken([_restart(folder.with_name(f"{folder.name}-{event}")) for event in range(count)], [])


def _restart(folder: Path) -> Sample:
    """One; like every native run it is made again if Gloo aborts at its end, or hangs."""
    for attempt in range(NATIVE_ATTEMPTS):
        try:
            return _restart_once(folder.with_name(f"{folder.name}-{attempt}"))
        except RunFailed as failure:
            problem = failure
    raise problem


def _restart_once(folder: Path) -> Sample:
    folder.mkdir()
    command = [
        "env", A_STORE_PER_ATTEMPT,
        *installed("torchrun"), "--standalone", "--nproc-per-node", "2", "--max-restarts", "1",
        str(ROOT / "bench/workloads/checkpointed_gpt.py"), "--steps", str(KILLED_AT + 1),
        "--every", str(CHECKPOINT_EVERY), "--folder", str(folder),
    ]  # fmt: skip
    reached: list[float] = []

    def on_line(line: str) -> None:
        if line.split()[:2] == ["step", str(KILLED_AT)]:
            reached.append(time.monotonic())
            if len(reached) == 1:
                os.kill(int((folder / "pid.1").read_text()), signal.SIGKILL)

    execute(command, RESTARTED_WITHIN_S, on_line)
    if len(reached) != 2:
        raise RunFailed(f"step {KILLED_AT} was done {len(reached)} times, and not twice")
    return {"total": reached[1] - reached[0]}


def samples_of(report: dict[str, Any], fault: str, count: int) -> list[Sample]:
    """Of a job's report: `count` recoveries of this kind, and nothing else.  Raises RunFailed."""
    found = report["recoveries"]
    if len(found) != count or not all(one["fault"] == fault and one["recovered"] for one in found):
        told = ", ".join(one["fault"] for one in found) or "none"
        raise RunFailed(f"{count} times {fault} was expected, and this was recovered from: {told}")
    parts = ("detect", "restart", "copy", "communicators", "replay", "total")
    return [{part: one[f"{part}_s"] for part in parts} for one in found]


def sample_of_dump(told: str) -> Sample:
    """Of proxyd's sentence on a worker that was moved in place.  Raises RunFailed."""
    found = re.search(r"moved in ([\d.]+) s \(dump ([\d.]+), checksums ([\d.]+), restore ([\d.]+);", told)
    if found is None:
        raise RunFailed(f"this does not tell of a move: {told}")
    total, dump, ship, restore = map(float, found.groups())
    return {"dump": dump, "ship": ship, "restore": restore, "total": total}


def _training(count: int) -> Training:
    return Training("char_gpt.py", 2, EVERY * (count + 1), ["--log-every", "1"])


def _ordered(
    count: int, folder: Path, order: Callable[[Any, int], Any], options: tuple[str, ...]
) -> tuple[Any, list[str]]:
    """A training, and what proxyd answers to orders, `EVERY` steps apart.  Raises RunFailed, Unavailable."""
    told: list[str] = []
    with running_proxyd(Path(f"{folder}.sock"), 3) as proxyd, blocking_channel(proxyd.socket) as channel:
        daemon = rpc.DaemonStub(channel)

        def on_step(step: int) -> None:
            if step % EVERY or len(told) == count:
                return
            reply = order(daemon, len(told))
            if reply.error:
                raise Unavailable(reply.error)
            told.append(reply.detail)

        outcome = _training(count).run(
            folder, proxied=True, options=("--socket", str(proxyd.socket), *options), on_step=on_step
        )
    return outcome, told


WAYS: dict[str, Callable[[int, Path], Taken]] = {
    "device gone, re-attached on this host": device_gone,
    "planned move to another device of this host": planned,
    "worker dumped and restored in place": dumped,
    "worker moved to another host": across_hosts,
    "without us: rank killed, restart from a checkpoint": restarted,
}
