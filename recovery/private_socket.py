"""Unix sockets that only their owner may connect to, from the first moment on.

The umask belongs to the whole process: whoever changes it for a socket changes it for the directories that
other threads and tasks make meanwhile, and two who do so at once may leave it changed.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path


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
