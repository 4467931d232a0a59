"""A proxyd for one run, where none is answering."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from understudy.recovery.base.errors import BadInput, ExitStatus, Failure, ForTheUser
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.config.config_file import variable_prefix
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY, RuntimeDirectory
from understudy.recovery.machine.socket_path import is_answering

MOST_RESTARTS = 5
"""Of a proxyd that is killed again and again."""
STOP_S = 20.0
SOCKET = "proxyd.sock"


_OF_PROXYD = f"{variable_prefix('proxyd')}_"
"""Options in variables are those of this machine's proxyd: ours has what its proxyrun was told."""


class EmbeddedDaemon:
    """A child process with a socket of its own; it stops when we end, however that happens.

    If it is killed, it is started again, and adopts what it left.
    """

    def __init__(
        self,
        devices: str,
        options: Mapping[str, str],
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start it and wait until it serves; raises ForTheUser with its sentence.

        `options`: by flag, "" of a switch.

        `tell` gets a sentence whenever it has to be started again.
        """
        try:  # where the next proxyd looks for what dead ones left behind, should we be killed
            self._directory = RuntimeDirectory.make()
        except OSError as full:
            raise Failure(f"cannot make a directory in {SHARED_MEMORY}: {full.strerror}") from full
        self.socket = self._directory.path / "own" / SOCKET
        """In a directory that the daemon makes, and locks while it begins to listen; we have locked ours."""
        self._command = [
            *module_command("recovery.proxyd"), "--devices", devices, "--socket", str(self.socket),
            "--log-level", os.environ.get("UNDERSTUDY_LOG_LEVEL") or "error",
            "--parent-pid", str(os.getpid()),
            *(f"{flag}={value}" if value else flag for flag, value in options.items()),
        ]  # fmt: skip
        self._tell = tell
        self._lock = threading.Lock()
        self._stopping = False
        self._process, ready = self._launch()
        problem = _answer(ready)
        if problem:
            self.stop()
            raise problem
        self._guard = threading.Thread(target=self._restart_when_killed, name="embedded proxyd", daemon=True)
        self._guard.start()

    def stop(self) -> None:
        """End it; it leaves nothing behind."""
        with self._lock:
            self._stopping = True
        if (self._process.poll() or 0) < 0:  # killed once too often: what it left has to be ended
            self._process, ready = self._launch()
            _answer(ready)
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._directory.remove()

    def _launch(self) -> tuple[subprocess.Popen[bytes], int]:
        """The process, and the pipe on which it will say that it is ready, or why not."""
        ours, theirs = os.pipe()
        # A session of its own: Ctrl-C is for the command, whose end then is ours.
        process = subprocess.Popen(
            [*self._command, "--ready-fd", str(theirs)],
            pass_fds=[theirs], start_new_session=True, stdin=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if not name.startswith(_OF_PROXYD)},
        )  # fmt: skip
        os.close(theirs)
        return process, ours

    def _restart_when_killed(self) -> None:
        for attempt in range(1, MOST_RESTARTS + 2):
            status = self._process.wait()
            with self._lock:
                if self._stopping or status >= 0:
                    return
                number = signal.Signals(-status)
                how = f"the embedded proxyd (pid {self._process.pid}) was ended by {number.name}"
                if attempt > MOST_RESTARTS:
                    self._tell(
                        f"{how} once too often: the job goes on without one, until something else breaks"
                    )
                    self.socket.unlink(missing_ok=True)  # nobody need wait for another
                    return
                self._tell(f"{how}; starting it again ({attempt} of at most {MOST_RESTARTS} times)")
                self._process, ready = self._launch()
            problem = _answer(ready)
            if problem and not self._stopping:
                self._tell(f"the embedded proxyd did not start again: {problem}")


def answering() -> list[Path]:
    """Sockets of those that serve runs of this user now."""
    found = []
    for path in sorted(SHARED_MEMORY.glob(f"understudy-{os.getuid()}-*/own/{SOCKET}")):
        with contextlib.suppress(BadInput, OSError):  # another user's, or gone meanwhile
            if is_answering(path):
                found.append(path)
    return found


def _answer(ready: int) -> ForTheUser | None:
    """None once it serves, or why it does not."""
    with open(ready, "rb") as pipe:
        line = pipe.readline()
    answer = json.loads(line) if line else {}
    if answer.get("ready"):
        return None
    kind = BadInput if answer.get("status") == ExitStatus.USAGE else Failure
    return kind(str(answer.get("error", "the embedded proxyd ended while it started")))
