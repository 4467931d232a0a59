"""A proxyd for one run, where none is answering."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from recovery.settings import BadInput


class EmbeddedDaemon:
    """A child process with a socket of its own; it stops when we end, however that happens."""

    def __init__(self, devices: str, spares: int) -> None:
        """Start it and wait until it serves; raises BadInput with its sentence."""
        self._directory = Path(tempfile.mkdtemp(prefix="understudy-"))
        self.socket = self._directory / "proxyd.sock"
        ours, theirs = os.pipe()
        command = [
            sys.executable, "-P", "-m", "recovery.proxyd", "--devices", devices, "--socket", str(self.socket),
            "--spares", str(spares), "--log-level", os.environ.get("UNDERSTUDY_LOG_LEVEL", "error"),
            "--ready-fd", str(theirs), "--parent-pid", str(os.getpid()),
        ]  # fmt: skip
        # A session of its own: Ctrl-C is for the command, whose end then is ours.
        self._process = subprocess.Popen(
            command, pass_fds=[theirs], start_new_session=True, stdin=subprocess.DEVNULL
        )
        os.close(theirs)
        with open(ours, "rb") as pipe:
            line = pipe.readline()
        answer = json.loads(line) if line else {}
        if not answer.get("ready"):
            self.stop()
            raise BadInput(str(answer.get("error", "the embedded proxyd ended while it started")))

    def stop(self) -> None:
        """End it; it leaves nothing behind."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)
