"""Running the user's command: its environment, its signals, its exit status."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from understudy.recovery.base.own_modules import FOLDER, HOME
from understudy.recovery.samples.attempts import Attempt

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def environment(
    job: str, socket: Path, node: Any, relays: str = "", samples: Attempt | None = None
) -> dict[str, str]:
    """What turns a Python with PyTorch, started anywhere below the command, into a worker.

    `relays`: a directory, if workers are to be migratable. `samples`: where they write theirs, if at all.
    """
    capability = node.capability
    boot = str(FOLDER / "proxy_client" / "boot")
    before = os.environ.get("PYTHONPATH", "")
    return os.environ | {
        "UNDERSTUDY_JOB": job,
        "UNDERSTUDY_SOCKET": str(socket),
        "UNDERSTUDY_RELAYS": relays,
        "UNDERSTUDY_SAMPLES": "" if samples is None else str(samples.directory),
        "UNDERSTUDY_SAMPLES_ATTEMPT": "" if samples is None else str(samples.number),
        "UNDERSTUDY_HOME": str(HOME),
        "UNDERSTUDY_PYTHON": sys.executable,
        "UNDERSTUDY_DEVICE_COUNT": str(len(node.devices)),
        "UNDERSTUDY_CAPABILITY": json.dumps(
            {
                "driver": capability.driver,
                "device_name": capability.device_name,
                "total_memory": capability.total_memory,
                "major": capability.major,
                "minor": capability.minor,
                "multi_processor_count": capability.multi_processor_count,
                "cudnn_version": capability.cudnn_version,
            }
        ),
        "PYTHONPATH": f"{boot}{os.pathsep}{before}" if before else boot,
    }


def ranks_wanted(command: list[str]) -> int:
    """How many ranks a command line asks for, as torchrun and accelerate spell it; 1 if it does not say."""
    flags = ("--nproc-per-node", "--nproc_per_node", "--num-processes", "--num_processes")
    for position, word in enumerate(command):
        flag, _, value = word.partition("=")
        if flag in flags:
            value = value or (command[position + 1] if position + 1 < len(command) else "")
            return int(value) if value.isascii() and value.isdigit() and int(value) > 0 else 1
    return 1


class Command:
    """The user's command, with our signals passed on to it."""

    def __init__(self, command: list[str], variables: dict[str, str]) -> None:
        """Raises OSError if it cannot be started."""
        # On a terminal the command stays in our process group: Ctrl-C reaches it there, and it may read the
        # terminal.  Anywhere else it gets a group of its own, to which signals are forwarded.
        self._on_terminal = _in_foreground()
        self._before: list[tuple[signal.Signals, Any]] = []
        self._waiting: list[signal.Signals] = []
        self._process: subprocess.Popen[bytes] | None = None
        for number in FORWARDED:
            self._before.append((number, signal.signal(number, self._forward)))
        try:
            self._process = subprocess.Popen(
                command,
                env=variables,
                process_group=None if self._on_terminal else 0,
            )
        except OSError:
            self._restore()
            raise
        for number in self._waiting:
            self._send(number)

    def wait(self) -> int:
        """Its exit status; 128 + n if signal n ended it."""
        assert self._process is not None
        try:
            status = self._process.wait()
        finally:
            self._restore()
        return 128 - status if status < 0 else status

    def kill_rest(self) -> None:
        """End what the command left behind in its process group."""
        if self._process is not None and not self._on_terminal:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGTERM)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._process is None:
            self._waiting.append(signal.Signals(number))
        elif not (self._on_terminal and number == signal.SIGINT):  # the terminal sent it to all of the group
            self._send(signal.Signals(number))

    def _send(self, number: signal.Signals) -> None:
        assert self._process is not None
        deliver: Callable[[int, int], None] = os.kill if self._on_terminal else os.killpg
        with contextlib.suppress(ProcessLookupError):
            deliver(self._process.pid, number)

    def _restore(self) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Whether we are the foreground job of a terminal."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
