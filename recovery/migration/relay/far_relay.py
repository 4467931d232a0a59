"""Below it lives a worker that came from another host, where its relay stays with the launcher.

    python -m understudy.recovery.migration.relay.far_relay DIRECTORY ALIVE

DIRECTORY is the relay's, at the same path as there; of ALIVE a lock is held, so that nobody takes its
directory for abandoned.  Stdin: "stay" once the worker runs here for good; if it closes before, so does
proxyd's interest.  SIGTERM ends all.  Leaves the worker's account in DIRECTORY/ended.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
from pathlib import Path

from understudy.recovery.base.whole_file import write_whole
from understudy.recovery.migration.process import namespaces, worker_init
from understudy.recovery.migration.relay.forwarding import FORWARDED

ENDED = "ended"
LONGEST_ACCOUNT = 1 << 14


def main(directory: Path, alive: Path) -> int:
    """Until the worker has ended, or is to."""
    lock = os.open(alive, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)
    ours, theirs = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    namespaces.unshare(namespaces.CLONE_NEWPID)
    child = os.fork()
    if child == 0:
        worker_init.main((), directory, None, theirs, inherited=(ours, lock, 0))
    os.close(theirs)
    signal.signal(signal.SIGTERM, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    try:
        account = _watch(ours)
    except _NotWanted:
        account = None
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    if account is None:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if account is not None:
        write_whole(directory / ENDED, account)
    return 0


class _NotWanted(BaseException):
    """Any more."""


def _end(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _NotWanted


def _watch(ended: int) -> bytes | None:
    """The account of its end; None: nobody wants it."""
    stays, heard, text = False, b"", b""
    listening = [0]
    while True:
        readable, _, _ = select.select([*listening, ended], [], [])
        if ended in readable:
            data = os.read(ended, LONGEST_ACCOUNT)
            text += data
            if not data:
                return text
        if 0 in readable:
            data = os.read(0, 4096)
            heard += data
            stays = stays or b"stay\n" in heard
            if not data and not stays:
                return None
            if not data:
                listening = []


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), Path(sys.argv[2])))
