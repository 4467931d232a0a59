"""Two hundred random faults in one training of examples/char_gpt.py, some of them during recoveries.

    make soak                                  # 200 faults; writes docs/soak.md
    make soak OPTIONS="--faults 20 --seed 7"   # fewer; writes nothing

Losses, final parameters and generators must be those of an unfaulted run, bit for bit, and proxyd must hold
as much afterwards as before.  Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import psutil
from machine import describe_machine
from rich.console import Console
from running_proxyd import RunningProxyd, running_proxyd
from soak_faults import RANKS, SPARE_DEVICES, WEIGHTS, Aggressor, minibatches, schedule
from soak_report import as_markdown
from training_run import ROOT, RunFailed, execute, installed

from understudy.recovery.base.control import blocking_channel, pb, rpc
from understudy.recovery.drills.spec import Drill
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY

MODEL = ("--layers", "2", "--heads", "2", "--width", "48", "--block-size", "32", "--batch-size", "4")
SHARE_ONLINE = 0.2
"""Of the faults, those that are ordered while a recovery is under way."""
SPARES = 2
SETTLED_S = 30.0
"""For a job's processes, files and connections to go; what is there after that has leaked."""
TIMEOUT_S = 1800.0
LOG = ROOT / "sweep" / "results" / "soak.log"
GROWTH_BYTES = 24 << 20
"""Of proxyd's memory over a soak; its heap moves by a few MiB with every job."""


SOCKET = "socket"


@dataclass(frozen=True)
class Held:
    """What proxyd and its processes hold."""

    files: tuple[str, ...]
    processes: int
    shared_memory: int
    resident_bytes: int

    def within(self, before: Held) -> bool:
        """Whether nothing that is counted has grown."""
        return (
            self.processes <= before.processes
            and self.shared_memory <= before.shared_memory
            and not self.new_files(before)
        )

    def new_files(self, before: Held) -> list[str]:
        """What is open now and was not; of sockets what there are too many of.

        A device server that has worked keeps its connection to proxyd, a spare that never did has none yet.
        """
        new = list((Counter(self.files) - Counter(before.files)).elements())
        sockets = new.count(SOCKET)
        return new if sockets > self.processes else [name for name in new if name != SOCKET]


@dataclass(frozen=True)
class Run:
    """What a training left: values of each rank as bits, and proxyrun's report."""

    losses: list[list[str]]
    states: list[dict[str, str]]
    report: dict[str, Any]
    wall_s: float


@dataclass(frozen=True)
class Soak:
    """A soak that is over.  `struck`: fault -> (scheduled, during a recovery)."""

    seed: int
    steps: int
    struck: dict[str, tuple[int, int]]
    recoveries: list[dict[str, Any]]
    wall_s: float
    unfaulted_s: float
    before: Held
    after: Held
    problems: list[str]


class Jobs:
    """Runs trainings under one proxyd, and looks at what that holds between them."""

    def __init__(self, proxyd: RunningProxyd, log: Path) -> None:
        """What the trainings print goes into `log`."""
        self._proxyd = proxyd
        self._log = log

    def run(self, folder: Path, steps: int, drills: list[Drill]) -> Run:
        """One training; raises RunFailed."""
        folder.mkdir()
        command = [
            *installed("proxyrun"),
            "--socket",
            str(self._proxyd.socket),
            "--report",
            str(folder / "report"),
        ]
        for drill in drills:
            command += ["--drill", str(drill)]
        command += [*installed("torchrun"), "--standalone", "--nproc-per-node", str(RANKS)]
        command += [str(ROOT / "sweep" / "soak_training.py"), "--steps", str(steps), *MODEL]
        begin = time.monotonic()
        with self._log.open("a") as log:
            execute(
                [*command, "--losses", str(folder / "losses")],
                TIMEOUT_S,
                lambda line: print(line, end="", file=log),
            )
        wall_s = time.monotonic() - begin
        ranks = ("", ".rank1")
        return Run(
            [(folder / f"losses{rank}").read_text().split() for rank in ranks],
            [json.loads((folder / f"state.json{rank}").read_text()) for rank in ranks],
            json.loads((folder / "report").read_text()),
            wall_s,
        )

    def held(self, before: Held | None = None) -> Held:
        """Once spares are ready, no session is left and what has ended since `before` is gone."""
        deadline = time.monotonic() + SETTLED_S
        while True:
            with blocking_channel(self._proxyd.socket) as channel:
                status = rpc.DaemonStub(channel).GetStatus(pb.StatusRequest(), timeout=10)
            now = self._held_now()
            settled = not status.ranks and status.node.spares == SPARES
            if (settled and (before is None or now.within(before))) or time.monotonic() > deadline:
                return now
            time.sleep(0.05)  # waits for proxyd, which sends no events

    def _held_now(self) -> Held:
        process = psutil.Process(self._proxyd.pid)
        return Held(
            files=_open_files(self._proxyd.pid),
            processes=1 + len(process.children(recursive=True)),
            # Others' entries go meanwhile, and os.walk passes over a folder that has gone.
            shared_memory=sum(len(folders) + len(files) for _, folders, files in os.walk(SHARED_MEMORY)),
            resident_bytes=process.memory_info().rss,
        )


def _open_files(pid: int) -> tuple[str, ...]:
    """What the descriptors of a process are, without numbers of sockets and pipes."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(descriptor).split(":[")[0])
    return tuple(sorted(found))


def soak(count: int, seed: int, folder: Path, kinds: dict[str, int], log: Path) -> Soak:
    """`count` faults in one training, compared with an unfaulted one; what all print goes into `log`.

    Raises RunFailed.
    """
    chance = random.Random(seed)
    online = round(count * SHARE_ONLINE)
    options = ("--spares", str(SPARES))
    with running_proxyd(folder / "proxyd.sock", RANKS + SPARE_DEVICES, options, log) as proxyd:
        server = Jobs(proxyd, log)
        steps = minibatches(count - online)
        unfaulted = server.run(folder / "unfaulted", steps, [])
        calls = min(calls for calls in unfaulted.report["recent_calls"] if calls)
        drills = schedule(chance, count - online, calls, kinds)
        before = server.held()
        aggressor = Aggressor(proxyd.socket, chance, online)
        with aggressor.at_work():
            faulted = server.run(folder / "faulted", steps, drills)
        after = server.held(before)
    scheduled = [fault["kind"] for fault in faulted.report["faults"] if fault["fired"] and fault["step"]]
    return Soak(
        seed=seed,
        steps=steps,
        struck={
            kind: (scheduled.count(kind), aggressor.struck[kind]) for kind in {*scheduled, *aggressor.struck}
        },
        recoveries=faulted.report["recoveries"],
        wall_s=faulted.wall_s,
        unfaulted_s=unfaulted.wall_s,
        before=before,
        after=after,
        problems=[*_differences(unfaulted, faulted), *_leaks(before, after)],
    )


def _differences(unfaulted: Run, faulted: Run) -> list[str]:
    found = []
    for rank in range(RANKS):
        pairs = zip(unfaulted.losses[rank], faulted.losses[rank], strict=True)
        wrong = [step for step, (ours, theirs) in enumerate(pairs, 1) if ours != theirs]
        if wrong:
            found.append(f"rank {rank}: losses differ from step {wrong[0]} on")
        names = [
            name for name, value in unfaulted.states[rank].items() if faulted.states[rank][name] != value
        ]
        if names:
            found.append(f"rank {rank}: at the end {', '.join(names[:5])} differ")
    if faulted.report["replies_different"]:
        found.append(f"{faulted.report['replies_different']} replayed values differ")
    found += [
        f"{r['fault']} was not recovered: {r['reason']}"
        for r in faulted.report["recoveries"]
        if not r["recovered"]
    ]
    found += [
        f"{f['kind']} in step {f['step']} never fired" for f in faulted.report["faults"] if not f["fired"]
    ]
    return found


def _leaks(before: Held, after: Held) -> list[str]:
    found = [
        f"{name} of proxyd grew from {then} to {now}"
        for name, then, now in (
            ("processes", before.processes, after.processes),
            ("shared memory", before.shared_memory, after.shared_memory),
        )
        if now > then
    ]
    if new := after.new_files(before):
        found.append(f"files of proxyd grew from {len(before.files)} to {len(after.files)}: {', '.join(new)}")
    if after.resident_bytes > before.resident_bytes + GROWTH_BYTES:
        found.append(f"memory of proxyd grew from {before.resident_bytes:,} to {after.resident_bytes:,}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    console = Console()
    console.print(f"{arguments.faults} faults, seed {arguments.seed}")
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="understudy-soak-") as name:
        LOG.parent.mkdir(exist_ok=True)
        LOG.unlink(missing_ok=True)
        try:
            done = soak(arguments.faults, arguments.seed, Path(name), WEIGHTS, LOG)
        except RunFailed:
            console.print(f"the training did not survive; {LOG} tells why")
            return 1
    report = as_markdown(done, machine)
    console.print(report, markup=False, highlight=False, soft_wrap=True)
    if arguments.faults >= 200 and not done.problems:
        (ROOT / "docs" / "soak.md").write_text(report)
    return 1 if done.problems else 0


if __name__ == "__main__":
    sys.exit(main())
