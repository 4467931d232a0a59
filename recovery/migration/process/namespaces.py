"""Namespaces of processes: making them, and finding a process by the pid that it has in one of them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

CLONE_NEWNS, CLONE_NEWPID = 0x00020000, 0x20000000
_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Raises OSError."""
    if _libc.unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def trouble_making() -> str:
    """Why this process may not make a pid and a mount namespace; empty: it may.  Tried in another one.

    That is started afresh: a mere fork of a proxyd whose threads are in the midst of gRPC's calls aborts in
    one of gRPC's handlers, or waits for ever.
    """
    code = (
        "import ctypes, sys\n"
        f"failed = ctypes.CDLL(None, use_errno=True).unshare({CLONE_NEWPID | CLONE_NEWNS}) != 0\n"
        "sys.exit(ctypes.get_errno() if failed else 0)"
    )
    status = subprocess.run([sys.executable, "-I", "-S", "-c", code], check=False).returncode
    if status < 0:
        return f"trying it died of {signal.Signals(-status).name}"
    return os.strerror(status) if status else ""


def pid_namespace(pid: int | str = "self") -> int:
    """Its inode; 0 if it cannot be read."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return 0


def pids_of(status: str) -> list[int]:
    """A process's pids in each namespace it is in, outermost first: NSpid of /proc/PID/status."""
    for line in status.splitlines():
        if line.startswith("NSpid:"):
            return [int(word) for word in line.split()[1:] if word.isascii() and word.isdigit()]
    return []


def innermost_pid(pid: int) -> int:
    """The pid of a process in its own namespace; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return (pids_of(file.read()) or [0])[-1]
    except OSError:
        return 0


def pid_here(pid: int, namespace: int) -> int:
    """Our pid of the process that has `pid` in a pid namespace below ours; 0 if there is none."""
    if namespace in (0, pid_namespace()):
        return pid
    for candidate in _processes():
        try:
            with open(f"/proc/{candidate}/status", encoding="utf-8", errors="replace") as file:
                inner = pids_of(file.read())
        except OSError:
            continue
        if len(inner) > 1 and inner[-1] == pid and pid_namespace(candidate) == namespace:
            return candidate
    return 0


def _processes() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isascii() and name.isdigit():
            yield int(name)
