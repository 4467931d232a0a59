"""Where proxyd listens, and who may: a socket of mode 0600 in a directory of mode 0700 that is ours."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from understudy.recovery.base.errors import BadInput
from understudy.recovery.machine import private_socket

_LONGEST = 107
"""Bytes of a Unix socket's path that the kernel takes."""


def default_socket() -> Path:
    """$UNDERSTUDY_SOCKET, else below $XDG_RUNTIME_DIR, else below /tmp."""
    named = os.environ.get("UNDERSTUDY_SOCKET")
    if named:
        return Path(named)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "understudy" / "proxyd.sock"
    return Path(f"/tmp/understudy-{os.getuid()}/proxyd.sock")


@contextlib.contextmanager
def claim(path: Path) -> Iterator[None]:
    """Hold while binding `path`: its directory is private, nobody listens there, a dead one's socket is gone.

    Raises BadInput with the sentence for the user.
    """
    if len(os.fsencode(path)) > _LONGEST:
        raise BadInput(f"the socket path {path} is longer than {_LONGEST} bytes, which the kernel refuses")
    directory = path.parent
    _make_private(directory)
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(
            handle, fcntl.LOCK_EX
        )  # two proxyd starting at once look at the socket one after the other
        if is_answering(path):
            raise BadInput(f"another proxyd already listens at {path}: stop it, or choose another --socket")
        if path.is_symlink() or path.exists():
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise BadInput(f"{path} exists and is not a socket: choose another --socket")
            path.unlink()
        yield
    finally:
        os.close(handle)


def is_answering(path: Path) -> bool:
    """Whether a process of ours listens at `path`; raises BadInput if another user does, or could."""
    try:
        return private_socket.is_answering(path)
    except private_socket.NotOurs as problem:
        raise BadInput(str(problem)) from problem


def listening_pid(path: Path) -> int:
    """The process that listens at `path`, as the kernel knows it; 0 if none does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(5)
        try:
            probe.connect(os.fspath(path))
            return private_socket.peer_of(probe)[0]
        except OSError:
            return 0


def _make_private(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, exist_ok=True)  # not its parents: a path that is mistyped has none
        private_socket.check_directory(directory)
    except private_socket.NotOurs as problem:
        raise BadInput(str(problem)) from problem
    except OSError as problem:
        raise BadInput(f"cannot make the socket directory {directory}: {problem.strerror}") from problem
