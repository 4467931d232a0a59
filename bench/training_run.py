"""One run of an example or workload, native or under the proxy, and what it left behind."""

import contextlib
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
WARMUP_STEPS = 5  # the first steps learn shapes and fill caches; medians leave them out


def installed(name: str) -> list[str]:
    """The beginning of a command line: one of the installed commands, run by the Python that runs this."""
    return [sys.executable, str(BIN / name)]


OVERDUE = "did not end within"
NATIVE_ABORT = "terminate called without an active exception"
NATIVE_ATTEMPTS = 5
_COUNT = "import torch; print(torch.cuda.device_count() if torch.version.cuda else 0)"


def driver() -> str:
    """What runs are made on: `cpu`, or `cuda` if UNDERSTUDY_TEST_DRIVER names that or simulated GPUs."""
    name = os.environ.get("UNDERSTUDY_TEST_DRIVER", "cpu")
    if name not in ("cpu", "cuda", "simulated-cuda"):
        raise ValueError(f"UNDERSTUDY_TEST_DRIVER={name} is not a driver: use cpu, cuda or simulated-cuda")
    return name.removeprefix("simulated-")


def native_device() -> str:
    """Where scripts run without us: only our device servers have the simulated GPUs."""
    return "cpu" if os.environ.get("UNDERSTUDY_TEST_DRIVER") == "simulated-cuda" else driver()


@functools.cache
def gpus() -> int:
    """GPUs that PyTorch can use here; asked in a process of its own, so that none is used in this one."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _COUNT], capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else 0


class TooFewGpus(RuntimeError):
    """Natively ranks that share a GPU hang in NCCL or are refused; the message is a sentence."""


def check_gpus(ranks: int) -> None:
    """Raises TooFewGpus where runs are made on real GPUs and there is not one for each rank."""
    if os.environ.get("UNDERSTUDY_TEST_DRIVER") == "cuda" and ranks > gpus():
        raise TooFewGpus(f"{ranks} ranks need as many GPUs, PyTorch finds {gpus()} here")


class RunFailed(RuntimeError):
    """A run ended with an error, or not at all; the message holds the end of its output."""


@dataclass(frozen=True)
class Outcome:
    """`losses[rank][step]` as hexadecimal bits, `seconds[rank][step]`, proxyrun's report (native: empty)."""

    losses: list[list[str]]
    seconds: list[list[float]]
    report: dict[str, Any]

    @property
    def step_seconds(self) -> float:
        """Median over the steps of rank 0, warm-up left out."""
        steps = self.seconds[0]
        return statistics.median(steps[min(WARMUP_STEPS, len(steps) // 2) :])


@dataclass(frozen=True)
class Training:
    """A training to run, always with the same threads and arguments: `run` says how.

    `script` lies in examples/, or is a path from the root. `pinned`: all its processes share one core.
    `launched`: by torchrun, as several ranks always are.
    """

    script: str
    ranks: int
    steps: int
    arguments: list[str] = field(default_factory=list)
    pinned: bool = False
    launched: bool = False

    def run(
        self,
        folder: Path,
        *,
        proxied: bool,
        drills: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
        on_step: Callable[[int], None] = lambda step: None,
        timeout_s: float = 600,
        expected: Sequence[int] = (0,),
    ) -> Outcome:
        """Run it once; files go into `folder`, which must be new.

        Raises RunFailed if the command ends with a status that is not `expected`, or a result is missing;
        TooFewGpus.
        """
        check_gpus(self.ranks)
        folder.mkdir()
        report = folder / "report.json"
        command = self.command(folder, native=not proxied)
        if proxied:
            command = under_proxy(command, self.ranks, report, drills, options)
        if self.pinned:
            command = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), *command]

        def on_line(line: str) -> None:
            words = line.split()
            if len(words) > 1 and words[0] == "step" and words[1].isdigit():
                on_step(int(words[1]))

        if proxied:
            execute(command, timeout_s, on_line, expected)
        else:
            execute_natively(command, timeout_s, on_line)
        timings = folder / "timings"
        return Outcome(
            losses=self.losses(folder / "losses"),
            seconds=[json.loads(_of_rank(timings, rank).read_text()) for rank in range(self.ranks)],
            report=json.loads(report.read_text()) if proxied else {},
        )

    def command(self, folder: Path, *, native: bool) -> list[str]:
        """Without proxyrun; what it leaves goes into `folder`."""
        words = [sys.executable]
        if self.ranks > 1 or self.launched:
            words = [*installed("torchrun"), "--standalone", "--nproc-per-node", str(self.ranks)]
        script = Path(self.script) if "/" in self.script else Path("examples", self.script)
        words += [str(ROOT / script), "--steps", str(self.steps), *self.arguments]
        words += ["--losses", str(folder / "losses"), "--timings", str(folder / "timings")]
        return [*words, "--device", native_device()] if native else words

    def losses(self, path: Path) -> list[list[str]]:
        """Of all ranks, from the file of rank 0 and those beside it."""
        return [_of_rank(path, rank).read_text().split() for rank in range(self.ranks)]


def under_proxy(
    command: list[str],
    ranks: int,
    report: Path,
    drills: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
) -> list[str]:
    """The same command under proxyrun: with an embedded proxyd, one device per rank and `options` for it, or
    with the one whose --socket they name."""
    words = ["--report", str(report), *options]
    if "--socket" not in options:
        words += ["--devices", f"{driver()}:{ranks}"]
    for drill in drills:
        words += ["--drill", drill]
    return [*installed("proxyrun"), *words, *command]


def execute(
    command: list[str],
    timeout_s: float,
    on_line: Callable[[str], None] = lambda line: None,
    expected: Sequence[int] = (0,),
) -> str:
    """Run a command with one thread per process; its whole output.

    Raises RunFailed if it ends with a status that is not `expected`; leaves no process.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        _stop(process)

    timer = threading.Timer(timeout_s, expire)
    timer.start()
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            on_line(line)
        status = process.wait()
    except BaseException:
        _stop(process)
        raise
    finally:
        timer.cancel()
    if status not in expected:
        why = f"{OVERDUE} {timeout_s:.0f} s" if expired.is_set() else f"ended with status {status}"
        raise RunFailed(f"{' '.join(command)}\n{why}; its last lines:\n{''.join(lines[-80:])}")
    return "".join(lines)


def execute_natively(
    command: list[str], timeout_s: float, on_line: Callable[[str], None] = lambda line: None
) -> str:
    """As execute(), for commands without our code in them.

    PyTorch 2.13 with Gloo may abort while its process ends, all work done: often if one rank leaves before
    the other, rarely otherwise. Seldom it hangs, and is given up after half of `timeout_s`. A reference run
    that does is run again; nothing of ours is ever excused so.
    """
    for _ in range(NATIVE_ATTEMPTS - 1):
        try:
            return execute(command, timeout_s / 2, on_line)
        except RunFailed as failure:
            if NATIVE_ABORT not in str(failure) and OVERDUE not in str(failure):
                raise
    return execute(command, timeout_s, on_line)


def _stop(process: subprocess.Popen[str]) -> None:
    """As Ctrl-C would; by force after 10 s, with torchrun's workers, which have sessions of their own."""
    below = _descendants(process)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    for one in {*below, *_descendants(process)}:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.kill()
    process.wait()


def _descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _of_rank(path: Path, rank: int) -> Path:
    return path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")
