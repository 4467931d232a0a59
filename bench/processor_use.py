"""What the two sides of a run take of the processor for one step: CPU seconds and switches between tasks.

Wall times of a shared machine vary by tens of per cent with what else runs on it, CPU seconds by much less.
Switches say whether an idle side was woken for nothing.
"""

import contextlib
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

SPAWNER = "understudy.proxy_server.spawner"
BETWEEN = (0.25, 0.9)
"""Shares of a run's steps at which is looked: the first steps learn shapes, then all may have left."""


@dataclass(frozen=True)
class Use:
    """Of all threads of one side. A task sleeps where it waits, and is preempted for others."""

    cpu_s: float = 0.0
    sleeps: int = 0
    preemptions: int = 0

    def __add__(self, other: "Use") -> "Use":
        return Use(self.cpu_s + other.cpu_s, self.sleeps + other.sleeps, self.preemptions + other.preemptions)

    def per_step(self, before: "Use", steps: int) -> dict[str, float]:
        """What has come since `before`, in `steps` steps."""
        now, then = asdict(self), asdict(before)
        return {name: (now[name] - then[name]) / steps for name in now}


def of_task(task: Path) -> Use:
    """Of a folder in /proc/PID/task. A task that has ended has used nothing."""
    try:
        run_ns = int((task / "schedstat").read_text().split()[0])
        lines = (task / "status").read_text().splitlines()
    except OSError:
        return Use()
    switches = {key: int(value) for key, _, value in (line.partition(":") for line in lines) if "ctxt" in key}
    return Use(run_ns / 1e9, switches["voluntary_ctxt_switches"], switches["nonvoluntary_ctxt_switches"])


def of_sides(script: str) -> dict[str, Use]:
    """What descendants of this process have used so far: those that run `script`, device servers, others."""
    used = {"worker": Use(), "server": Use(), "control": Use()}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            words = process.cmdline()
            side = "server" if SPAWNER in words else "control"
            if any(word.endswith(script) for word in words) and not any("proxyrun" in word for word in words):
                side = "worker"
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                used[side] += of_task(task)
    return used


Sides = dict[str, dict[str, float]]
"""By side (worker, server, control): cpu_s, sleeps and preemptions of one step."""


class Meter:
    """Looks twice, at what the script says of its steps: `on_step` of `Training.run`."""

    def __init__(self, script: str, steps: int) -> None:
        self._script = Path(script).name
        self._looks = [share * steps for share in BETWEEN]
        self._begin()

    def _begin(self) -> None:
        self._awaited = [*self._looks]
        self._seen: list[tuple[int, dict[str, Use]]] = []
        self._step = 0

    def on_step(self, step: int) -> None:
        if step < self._step:  # a native run that hung at its end is run again
            self._begin()
        self._step = step
        if self._awaited and step >= self._awaited[0]:
            del self._awaited[0]
            self._seen.append((step, of_sides(self._script)))

    def per_step(self) -> Sides:
        """Empty if the script did not say enough steps."""
        if self._awaited or self._seen[0][0] == self._seen[1][0]:
            return {}
        (begin, before), (end, behind) = self._seen
        return {side: behind[side].per_step(before[side], end - begin) for side in behind}


def medians(turns: list[Sides]) -> Sides:
    """Over runs of which each said enough steps; empty if one did not."""
    if not all(turns):
        return {}
    return {
        side: {name: statistics.median(turn[side][name] for turn in turns) for name in turns[0][side]}
        for side in turns[0]
    }


def rows(used: dict[str, Sides]) -> list[tuple[str, str, str]]:
    """For `make bench`: CPU time of both sides together beside native's, and who sleeps how often."""
    native, proxied = used["native"], used["proxied"]
    if not native or not proxied:
        return []
    ours = sum(side["cpu_s"] for side in proxied.values())
    theirs = sum(side["cpu_s"] for side in native.values())
    worker, server = proxied["worker"], proxied["server"]
    return [
        (
            "  CPU time of a step",
            f"{ours / theirs:.3f} x",
            f"worker {1e6 * worker['cpu_s']:.0f}, server {1e6 * server['cpu_s']:.0f}, proxyd "
            f"{1e6 * proxied['control']['cpu_s']:.0f}, native {1e6 * theirs:.0f} us",
        ),
        (
            "  server: sleeps a step",
            f"{server['sleeps']:.2f}",
            f"preempted {server['preemptions']:.2f}; worker sleeps {worker['sleeps']:.2f}, preempted "
            f"{worker['preemptions']:.2f}; native {native['worker']['sleeps']:.2f}, "
            f"{native['worker']['preemptions']:.2f}",
        ),
    ]
