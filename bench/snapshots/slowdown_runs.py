"""Runs of one training, natively with others' snapshots and proxied with ours, as turns."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import baseline_training
import psutil
from running_proxyd import RunningProxyd, running_proxyd
from slowdown_plan import Segment, Turn, spelled
from training_run import RunFailed, Training, execute_natively

from understudy.recovery.base.own_modules import name_of

SCRIPT = "bench/workloads/adam_gpt.py"
LONGEST_S = 600.0
WRITER = name_of("recovery.snapshots.writing.writer")
LOOK_S = 0.1
"""Between two looks at memory."""


# ---------------------------------------------------------------- natively, others' ways
@dataclass(frozen=True)
class Native:
    """One process, that took all its segments one after another."""

    turns: list[Turn]
    plain_s: list[float]
    """Steps of the segments without snapshots."""
    start_s: float
    """From the start of its process until it could have loaded."""
    load_s: float
    state_bytes: int


def native(way: str, segments: Sequence[Segment], folder: Path, tiny: bool) -> Native:
    """Raises RunFailed."""
    folder.mkdir()
    output = folder / "out.json"
    command = [sys.executable, baseline_training.__file__, "--way", way, "--segments", spelled(segments)]
    command += ["--directory", str(folder), "--output", str(output), *(["--tiny"] if tiny else [])]
    execute_natively(command, LONGEST_S)
    found = json.loads(output.read_text())
    shutil.rmtree(folder)
    plain = [one for one in found["segments"] if not one["interval"]]
    return Native(
        list(_turns(way, found["segments"])), [one["step_s"] for one in plain],
        found["start_s"], found["load_s"], found["state_bytes"],
    )  # fmt: skip


def _turns(way: str, found: Sequence[dict[str, Any]]) -> Iterator[Turn]:
    """Each segment beside the two without snapshots around it."""
    for number, one in enumerate(found):
        if one["interval"]:
            around = (found[number - 1], found[number + 1])
            plain_s, plain_processor_s = (
                sum(other[what] for other in around) / 2 for what in ("step_s", "processor_s")
            )
            yield Turn(
                way, one["interval"], one["steps"], one["step_s"], plain_s, one["processor_s"],
                plain_processor_s, len(one["durable_s"]), tuple(one["durable_s"]),
            )  # fmt: skip


# ---------------------------------------------------------------- proxied, ours
@dataclass(frozen=True)
class Durable:
    """A set of all ranks' parts that proxyd told of."""

    step: int
    at_s: float
    """Of Unix time."""
    bytes: int


@dataclass
class Footprint:
    """Peaks over a run."""

    shared_bytes: int = 0
    """Of the runtime directory: logs, pre-images of shared memory, snapshots."""
    snapshot_bytes: int = 0
    """... of snapshots alone."""
    writer_bytes: int = 0
    """Of the writer's own memory: its pool, but not what it has mapped of workers."""
    stored_bytes: int = 0
    """Blocks of the stores."""


@dataclass(frozen=True)
class Proxied:
    """One run."""

    segment: Segment
    step_s: float
    processor_s: float
    durable: list[Durable]
    """Of those that were written during the measured steps: from the one right before them on."""
    durable_s: tuple[float, ...]
    footprint: Footprint | None
    losses: list[str]

    def turn(self, way: str, plain: Proxied) -> Turn:
        """Beside a run without persistence."""
        return Turn(
            way, self.segment.interval, self.segment.steps, self.step_s, plain.step_s, self.processor_s,
            plain.processor_s, len(self.durable), self.durable_s,
        )  # fmt: skip


@dataclass
class Watch:
    """Looks at a run from outside, at the end of each step that its script tells of."""

    proxyd: RunningProxyd
    segment: Segment
    storage: Path
    footprint: Footprint | None
    ended_s: dict[int, float] = field(default_factory=dict)
    used_s: list[float] = field(default_factory=list)
    looked_s: float = 0.0

    def on_step(self, step: int) -> None:
        """`step` counts from 1."""
        self.ended_s[step] = time.time()
        if step in (self.segment.warm, self.segment.warm + self.segment.steps):
            self.used_s.append(processor_seconds((self.proxyd.pid, os.getpid())) - _own_seconds())
        if self.footprint is not None and self.ended_s[step] >= self.looked_s + LOOK_S:
            self.looked_s = self.ended_s[step]
            look(self.footprint, self.proxyd.pid, self.storage)


def _own_seconds() -> float:
    times = psutil.Process().cpu_times()
    return times.user + times.system


def processor_seconds(roots: Iterable[int]) -> float:
    """Of processes and all below them."""
    used = 0.0
    for process in family(roots):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used += times.user + times.system
    return used


def family(roots: Iterable[int]) -> set[psutil.Process]:
    """Processes and all below them."""
    found = set()
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {psutil.Process(root), *psutil.Process(root).children(recursive=True)}
    return found


def look(footprint: Footprint, proxyd: int, storage: Path) -> None:
    """Raise the peaks to what there is now."""
    for runtime in Path("/dev/shm").glob(f"understudy-{os.getuid()}-{proxyd}-*"):
        footprint.shared_bytes = max(footprint.shared_bytes, blocks_of(runtime))
        snapshots = sum(blocks_of(one.parent, "snapshot") for one in runtime.rglob("snapshot"))
        footprint.snapshot_bytes = max(footprint.snapshot_bytes, snapshots)
    footprint.stored_bytes = max(footprint.stored_bytes, blocks_of(storage))
    for process in family([proxyd]):
        with contextlib.suppress(psutil.Error, OSError):
            if WRITER in process.cmdline():
                footprint.writer_bytes = max(footprint.writer_bytes, anonymous_bytes(process.pid))


def blocks_of(folder: Path, name: str = "*") -> int:
    """Bytes that the files really take."""
    found = 0
    for path in folder.rglob(name):
        with contextlib.suppress(OSError):
            if path.is_file():
                found += 512 * path.stat().st_blocks
    return found


def anonymous_bytes(pid: int) -> int:
    """Resident memory that is no file's; raises OSError."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def proxied(
    segment: Segment,
    folder: Path,
    tiny: bool,
    options: tuple[str, ...] = (),
    watch_memory: bool = False,
    script: str = SCRIPT,
    arguments: Sequence[str] = (),
) -> Proxied:
    """A script under a proxyd of its own; it persists if the segment has an interval.  Raises RunFailed."""
    folder.mkdir(mode=0o700)
    storage, log = folder / "stores", folder / "log"
    steps = segment.warm + segment.steps + segment.tail
    training = Training(script, 1, steps, [*arguments, *(["--tiny"] if tiny else [])])
    words = ["--log-level", "debug", *options]  # which says when sets became durable
    if segment.interval:
        words += ["--persist", str(storage), "--persist-every", f"{segment.interval}steps"]
    with running_proxyd(folder / "proxyd.sock", 1, tuple(words), log) as proxyd:
        watch = Watch(proxyd, segment, storage, Footprint() if watch_memory else None)
        outcome = training.run(
            folder / "run", proxied=True, options=("--socket", str(proxyd.socket)), on_step=watch.on_step,
            timeout_s=LONGEST_S,
        )  # fmt: skip
    last = segment.warm + segment.steps
    durable = [one for one in durable_sets(log.read_text()) if segment.warm <= one.step < last]
    seconds = outcome.seconds[0][segment.warm : last]
    shutil.rmtree(folder)
    return Proxied(
        segment, sum(seconds) / len(seconds), (watch.used_s[1] - watch.used_s[0]) / segment.steps, durable,
        tuple(one.at_s - watch.ended_s[one.step] for one in durable), watch.footprint, outcome.losses[0],
    )  # fmt: skip


def durable_sets(log: str) -> list[Durable]:
    """What proxyd's log says; raises RunFailed if a snapshot was lost."""
    found = []
    for line in log.splitlines():
        if not line.startswith("{"):
            continue
        entry = json.loads(line)
        if entry["event"] == "a snapshot is not durable":
            raise RunFailed(f"a snapshot did not reach the storage: {entry['reason']}")
        if entry["event"] == "snapshot is durable":
            at = datetime.fromisoformat(entry["timestamp"])
            found.append(Durable(int(entry["step"]), at.timestamp(), int(entry["bytes"])))
    return found
