"""The zygotes of one test process, and the Python that asks them (launcher.py, zygote.py)."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import zygote

HERE = Path(__file__).parent
DIRECTORY, COLD = "UNDERSTUDY_TEST_ZYGOTES", "UNDERSTUDY_TEST_COLD"
NAME = "understudy-test-python"
STANDS_FOR_A_FORK = " -IS "
"""In the command line of a launcher."""


def obstacle() -> str:
    """Why everything is started anew here; empty: it need not be."""
    if os.environ.get("UNDERSTUDY_TEST_DRIVER", "cpu") != "cpu":
        return "a driver of GPUs does not outlive a fork"
    if sys.prefix == sys.base_prefix:
        return "the launcher is put into virtual environments only"
    if not os.access(Path(sys.executable).parent, os.W_OK):
        return f"the launcher cannot be put into {Path(sys.executable).parent}"
    return ""


class Zygotes:
    """Bare processes that import when first asked; they end with this one."""

    def __init__(self) -> None:
        """Sets what the launcher looks at, and `sys.executable` to it."""
        self._before = sys.executable
        python = Path(sys.executable).with_name("python")
        sys.executable = str(install(python))
        self.directory = Path(tempfile.mkdtemp(prefix="understudy-test-", dir="/tmp"))
        self._processes = [self._start(kind) for kind in zygote.KINDS]
        for process in self._processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError("a zygote of the tests did not start; what it said is above")
            process.stdout.close()
        os.environ[DIRECTORY] = str(self.directory)

    def _start(self, kind: str) -> subprocess.Popen[bytes]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self.directory / kind))
            listener.listen(64)
            room = "x" * zygote.ROOM
            command = [
                sys.executable, "--cold", "-P", str(HERE / "zygote.py"), kind, str(self.directory),
                str(os.getpid()), str(listener.fileno()), "pytest", room,
            ]  # fmt: skip
            ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), "PYTHONUNBUFFERED": "", "ROOM": room}
            variables = os.environ | ours
            return subprocess.Popen(
                command, env=variables, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
            )  # fmt: skip

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def stop(self) -> None:
        """End them, and forget."""
        for process in self._processes:
            process.kill()
            process.wait()
        for path in self.directory.iterdir():
            path.unlink()
        self.directory.rmdir()
        os.environ.pop(DIRECTORY, None)
        sys.executable = self._before


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """As `children(recursive=True)`, where a fork counts as the child of the launcher that stands for it."""
    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        below = process.children()
        if (match := re.fullmatch(r"fork-(\d+)", process.name())) is not None:
            below.append(psutil.Process(int(match[1])))
        for child in below:
            found += [child, *descendants(child)]
    return found


def install(python: Path) -> Path:
    """The launcher, beside the interpreter whose name it takes; raises OSError if it cannot be put there."""
    launcher = python.with_name(NAME)
    text = (
        f"#!{python}{STANDS_FOR_A_FORK.rstrip()}\n"
        f"import sys\nsys.path.insert(0, {str(HERE)!r})\nimport launcher\nlauncher.main()\n"
    )
    if not launcher.exists() or launcher.read_text() != text:
        new = python.with_name(f"{NAME}.{os.getpid()}")
        new.write_text(text)
        new.chmod(new.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        new.replace(launcher)
    return launcher
