"""A training under `proxyrun --migratable` that goes as far as a test lets it, and its worker's moves."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import proxied
import pytest
from proxied import until
from running_proxyd import RunningProxyd

from understudy.recovery.base.control import blocking_channel, pb, rpc
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.machine.criu import find
from understudy.recovery.migration.preflight.survey import trouble_of_machine
from understudy.recovery.migration.process import namespaces

LOADED_GPT = proxied.WORKLOADS / "migration" / "loaded_gpt.py"
EXAMPLES = proxied.WORKLOADS.parent.parent / "examples"
LONG_S = 100.0


def skip_without_criu() -> None:
    """Where no process can be moved there is nothing to test."""
    if reason := trouble_of_machine(find()) or namespaces.trouble_making():
        pytest.skip(f"no worker can be moved here: {reason}")


def skip_without_namespaces() -> None:
    """Where no pid namespace can be made, no relay can work."""
    if reason := namespaces.trouble_making():
        pytest.skip(f"no pid namespace can be made here: {reason}")


class MigratableRun:
    """Of `ranks` ranks, under a proxyd of its own."""

    def __init__(self, folder: Path, ranks: int = 1) -> None:
        self.folder, self.ranks = folder, ranks
        folder.mkdir(mode=0o700, exist_ok=True)
        self.proxyd = self._start_proxyd()
        self.run: subprocess.Popen[str] | None = None
        self.steps = 0

    def _start_proxyd(self) -> RunningProxyd:
        return RunningProxyd(self.folder / "proxyd.sock", self.ranks, log=self.folder / "proxyd.log")

    def replace_proxyd(self) -> None:
        """It is killed, and another one adopts the job."""
        self.proxyd.kill()
        self.proxyd = self._start_proxyd()

    def train(self, steps: int, limit: int, *, migratable: bool = True) -> None:
        """LOADED_GPT; `limit`: steps that it may do for now."""
        self.steps = steps
        self.let(limit)
        arguments = (str(steps), str(self.folder / "losses"), str(self.folder / "limit"))
        command = (
            proxied.torchrun(self.ranks, LOADED_GPT, *arguments)
            if self.ranks > 1
            else proxied.python(LOADED_GPT, *arguments)
        )
        self.start(command, migratable=migratable)

    def start(self, command: list[str], *, migratable: bool = True, **popen: Any) -> None:
        options = ["--migratable"] if migratable else []
        self.run = subprocess.Popen(
            [*module_command("recovery.proxyrun"), "--socket", str(self.proxyd.socket), *options, *command],
            env=os.environ | {"OMP_NUM_THREADS": "1", "EXAMPLES": str(EXAMPLES)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen,
        )  # fmt: skip

    def let(self, limit: int) -> None:
        new = self.folder / "limit.new"
        new.write_text(str(limit))
        new.rename(self.folder / "limit")

    def losses(self) -> list[list[str]]:
        """Of each rank, as written so far."""
        files = [self.folder / f"losses.{rank}" for rank in range(self.ranks)]
        return [file.read_text().split("\n")[:-1] if file.exists() else [] for file in files]

    def await_step(self, step: int) -> None:
        run = self.run
        assert run is not None
        until(
            lambda: run.poll() is not None or all(len(one) >= step for one in self.losses()),
            f"step {step}",
        )
        assert all(len(one) >= step for one in self.losses()), run.communicate()

    def rank(self, number: int = 0) -> Any:
        with blocking_channel(self.proxyd.socket) as channel:
            status = rpc.DaemonStub(channel).GetStatus(pb.StatusRequest(), timeout=30)
        return next(rank for rank in status.ranks if rank.rank == number)

    def recoveryctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*module_command("recovery.recoveryctl"), *arguments, "--socket", str(self.proxyd.socket)],
            capture_output=True, text=True, timeout=LONG_S, check=False,
            env=os.environ | {"COLUMNS": "300"},
        )  # fmt: skip

    def move(self, rank: int = 0) -> str:
        """By the operator's command; answers what it prints."""
        done = self.recoveryctl("migrate", "--rank", str(rank), "--images", str(self.folder))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def move_at_once(self, rank: int = 0) -> Any:
        """Without the time that a command takes to start."""
        request = pb.MoveWorkerRequest(rank=rank, images=str(self.folder))
        with blocking_channel(self.proxyd.socket) as channel:
            return rpc.DaemonStub(channel).MoveWorker(request, timeout=LONG_S)

    def finish(self) -> tuple[str, str]:
        """What it printed; it must end well."""
        assert self.run is not None
        self.let(self.steps)
        output, errors = self.run.communicate(timeout=LONG_S)
        assert self.run.returncode == 0, errors
        return output, errors

    def __enter__(self) -> MigratableRun:
        return self

    def __exit__(self, *_: object) -> None:
        if self.run is not None and self.run.poll() is None:
            self.run.terminate()
            self.run.communicate(timeout=LONG_S)
        self.proxyd.stop()
        print((self.folder / "proxyd.log").read_text())
