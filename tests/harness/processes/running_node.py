"""A proxyd that tests kill and start again, and a job of two ranks that goes as far as they let it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import test_proxyd_recovery
from proxied import until
from running_proxyd import RunningProxyd
from test_proxyd_recovery import LAUNCH, expected

from understudy import replay
from understudy.recovery.base.control import blocking_channel, pb, rpc
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY

RANK = test_proxyd_recovery.__file__
LONG_S = 60.0


class Node:
    """A proxyd that can be killed and started again, and one job of two ranks under it."""

    def __init__(self, folder: Path, environment: dict[str, str], *options: str) -> None:
        self.folder, self.environment = folder, environment
        self.socket = folder / "proxyd.sock"
        self.options = options
        self.run: subprocess.Popen[str] | None = None
        self.steps = 0
        self.proxyd = self.start()

    def start(self, ranks: int = 2) -> RunningProxyd:
        """A proxyd that serves; raises RunFailed."""
        return RunningProxyd(self.socket, ranks, self.options, self.folder / "proxyd.log", self.environment)

    def kill(self) -> None:
        """As the kernel does when memory runs out."""
        self.proxyd.kill()

    def restart(self) -> None:
        self.proxyd = self.start()

    # -------------------------------------------------------------- its job
    def train(self, steps: int, limit: int, *flags: str) -> None:
        """Two ranks that may do `limit` of `steps` steps for now; rank 1 not even begin if it is 0."""
        self.steps = steps
        self.let(limit, 0)
        self.let(limit or -1, 1)
        self.run = subprocess.Popen(
            [*module_command("recovery.proxyrun"), "--socket", str(self.socket), "--report",
             str(self.folder / "report"), *flags, sys.executable, "-c", LAUNCH, RANK, "2", str(steps)],
            env=self.environment | {"LIMIT_FILE": str(self.folder / "limit")},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def let(self, limit: int, *ranks: int) -> None:
        """These ranks (all) may go on up to a step."""
        for rank in ranks or (0, 1):
            new = self.folder / f"limit.new{rank}"
            new.write_text(str(limit))
            new.rename(self.folder / f"limit.{rank}")

    def logs(self) -> list[replay.Log]:
        """Of both ranks, once they are there."""

        def found() -> list[replay.Log]:
            controls = sorted(SHARED_MEMORY.glob(f"understudy-{os.getuid()}-*/*/rank-*/control"))
            try:
                return [replay.Log(str(path.parent)) for path in controls] if len(controls) == 2 else []
            except replay.LogError:
                return []  # it is being made

        return sorted(until(found, "two logs"), key=lambda log: log.rank)

    def await_step(self, step: int) -> None:
        """Until both ranks have done so many steps, whether or not there is a proxyd."""
        logs = self.logs()
        until(lambda: all(log.step > step and log.cursor == log.tail for log in logs), f"step {step}")

    def status(self) -> Any:
        with blocking_channel(self.socket) as channel:
            return rpc.DaemonStub(channel).GetStatus(pb.StatusRequest(), wait_for_ready=True, timeout=30)

    def rank_status(self, rank: int) -> Any:
        return next(known for known in self.status().ranks if known.rank == rank)

    def recoveryctl(self, *arguments: str) -> str:
        """What it prints, in one line."""
        command = [*module_command("recovery.recoveryctl"), *arguments, "--socket", str(self.socket)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LONG_S, check=False,
            env=os.environ | {"COLUMNS": "250"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return " ".join(done.stdout.split())

    def open_again(self, rank: int) -> Any:
        """As a worker does that got no answer because proxyd died."""
        known = self.rank_status(rank)
        request = pb.OpenSessionRequest(
            job=known.job, rank=rank, world=2, device_index=rank, worker_pid=known.worker_pid,
            torch_version=metadata.version("torch"), threads=1,
        )  # fmt: skip
        with blocking_channel(self.socket) as channel:
            return rpc.DaemonStub(channel).OpenSession(request, timeout=30)

    def servers(self) -> list[int]:
        """Of ranks 0 and 1."""
        return [rank.server_pid for rank in sorted(self.status().ranks, key=lambda rank: rank.rank)]

    def finish(self) -> dict[str, Any]:
        """Let the ranks end; what they print must be right.  Answers the report."""
        assert self.run is not None
        self.let(self.steps)
        output, errors = self.run.communicate(timeout=120)
        assert self.run.returncode == 0, errors
        values = [part.split("\n")[:-1] for part in output.split("\0")]
        assert values == [expected(rank, 2, self.steps) for rank in (0, 1)]
        report = json.loads((self.folder / "report").read_text())
        assert report["replies_different"] == 0
        assert isinstance(report, dict)
        return report

    def said(self) -> str:
        return (self.folder / "proxyd.log").read_text()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends what still runs, and shows what proxyd said, which pytest keeps for a test that fails."""
        if self.run is not None and self.run.poll() is None:
            self.run.terminate()
            self.run.communicate(timeout=LONG_S)
        self.proxyd.stop()
        print(self.said())


def runtime_directories() -> list[Path]:
    return list(SHARED_MEMORY.glob(f"understudy-{os.getuid()}-*"))
