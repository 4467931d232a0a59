"""Unix sockets that only their owner may connect to, from the first moment on; and who listens at one.

The umask belongs to the whole process: whoever changes it for a socket changes it for the directories that
other threads and tasks make meanwhile, and two who do so at once may leave it changed.

Imports nothing of ours: the short-lived process that speaks for a worker looks here, too.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from pathlib import Path

CONNECT_S = 5.0
_PEER = struct.Struct("3i")
"""struct ucred: pid, uid, gid of who called listen()."""


class NotOurs(ValueError):
    """Another user could be behind a socket; its text is the sentence for ours."""


def bound_to(path: Path) -> socket.socket:
    """A stream socket with mode 0600; nobody can connect until it listens.  Raises OSError."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        made.bind(str(path))
        os.chmod(path, 0o600)
    except BaseException:
        made.close()
        raise
    return made


def check_directory(directory: Path) -> None:
    """Checks that a socket's directory is ours, so that only we put one there.  Raises NotOurs, OSError."""
    state = os.lstat(directory)
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid():
        raise NotOurs(
            f"{directory} must be a directory of yours (uid {os.geteuid()}); choose another --socket"
        )
    mode = stat.S_IMODE(state.st_mode)
    if mode & 0o077:
        raise NotOurs(
            f"{directory} is open to other users (mode {mode:04o}), so they could control your jobs: "
            f"chmod 700 {directory}, or choose another --socket"
        )


def check_peer(connection: socket.socket, path: Path) -> None:
    """That it was this user who began to listen there.  Raises NotOurs, OSError."""
    _, uid, _ = peer_of(connection)
    if uid != os.geteuid():
        raise NotOurs(
            f"a process of another user (uid {uid}) listens at {path}, and would get all that your "
            f"jobs compute (yours is uid {os.geteuid()}); choose another --socket"
        )


def peer_of(connection: socket.socket) -> tuple[int, int, int]:
    """Pid, uid and gid of who listens, or listened, at the other end.  Raises OSError."""
    pid, uid, gid = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid, gid


def is_answering(path: Path) -> bool:
    """Whether a process of ours listens at `path`.

    Raises NotOurs if another user does, or could.  gRPC does not tell whom it has reached: ask here first.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(CONNECT_S)
        try:
            os.lstat(path)  # where nothing is, nobody needs to be kept out
            check_directory(path.parent)
            probe.connect(os.fspath(path))
            check_peer(probe, path)
        except OSError as problem:
            if problem.errno in (errno.EACCES, errno.EPERM):
                raise NotOurs(f"the socket {path} belongs to another user") from problem
            # EAGAIN: its backlog is full, so somebody is there; nobody but us can be, in that directory.
            return problem.errno == errno.EAGAIN or isinstance(problem, TimeoutError)
        return True
