"""Process 1 of a worker's pid namespace: starts the worker, reaps, and lets CRIU dump and restore it.

It stays while the worker is away, so the namespace does, and with it the worker's pids.  Orders come from
proxyd over a Unix socket, one line of JSON each (worker_state.py); one connection stays while the worker is
on another host, and tells of signals and of the worker's end.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from understudy.recovery.machine.private_socket import bound_to
from understudy.recovery.migration.process import namespaces
from understudy.recovery.migration.process.moving import NotMoved
from understudy.recovery.migration.relay.forwarding import FORWARDED, Signals
from understudy.recovery.migration.relay.whereabouts import Whereabouts
from understudy.recovery.migration.worker_state import WorkerState

SOCKET = "s"
"""Short: a Unix socket's path has at most 107 bytes."""
NEW_SOCKET = "n"
LONGEST_ORDER = 1 << 16
ORDER_S = 5.0
_MS_REC, _MS_SLAVE, _PR_SET_PDEATHSIG = 0x4000, 1 << 19, 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Files:
    """What the worker gets as stdin, stdout and stderr.

    By path: CRIU finds a descriptor's mount only if that is of the worker's own mount namespace.
    """

    stdin: str
    stdin_at: int
    stdout: str
    stderr: str

    def open(self) -> tuple[int, int, int]:
        """Raises OSError."""
        stdin = os.open(self.stdin, os.O_RDONLY | os.O_CLOEXEC)
        if self.stdin_at:
            os.lseek(stdin, self.stdin_at, os.SEEK_SET)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        return stdin, os.open(self.stdout, flags), os.open(self.stderr, flags)


def main(
    command: Sequence[str], directory: Path, files: Files | None, ended: int, inherited: Sequence[int] = ()
) -> NoReturn:
    """`ended`: a pipe that gets {"status": …} when the worker has ended.

    Without `files` there is no worker yet: one that comes from another host is to be restored.
    """
    try:
        for file in inherited:
            os.close(file)
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getpid() != 1:
            raise OSError(0, "there is no pid namespace")
        _own_proc()
        init = Init(command, directory, files)
        account: dict[str, Any] = {"status": init.run()}
        if init.problem:
            account["problem"] = init.problem
    except BaseException as problem:  # noqa: BLE001 - the namespace must end, and somebody must be told why
        account = {"status": int(signal.SIGKILL), "problem": f"the worker's init failed: {problem!r}"}
    os.write(ended, json.dumps(account).encode()[:4000])
    os._exit(0)


def _own_proc() -> None:
    """/proc must show this namespace's pids.  Later mounts outside are seen here, but not the other way."""
    namespaces.unshare(namespaces.CLONE_NEWNS)
    for arguments in (
        (b"none", b"/", None, _MS_REC | _MS_SLAVE, None),
        (b"proc", b"/proc", b"proc", 0, None),
    ):
        if _libc.mount(*arguments[:3], ctypes.c_ulong(arguments[3]), arguments[4]) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot mount /proc in a namespace of its own: {os.strerror(number)}")


class Init:
    """The init process of one worker."""

    def __init__(self, command: Sequence[str], directory: Path, given: Files | None) -> None:
        self.problem = ""
        path = directory / SOCKET
        files = given.open() if given is not None else ()
        new = directory / NEW_SOCKET
        self._listener = bound_to(new)
        self._listener.listen(4)
        new.rename(path)  # who sees it can connect
        self._wakeup, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(theirs, False)
        signal.set_wakeup_fd(theirs)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._signals = Signals()
        self._home: socket.socket | None = None
        """Where signals are told while the worker is away, and from where its end is told."""
        self._heard = b""
        worker = _start(command, os.environ | {"UNDERSTUDY_RELAY": str(path)}, files) if files else 0
        self.where = Whereabouts(worker, WorkerState.RUNNING if files else WorkerState.REMOTE)
        for number in FORWARDED:
            signal.signal(number, self._forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        for file in files:
            os.close(file)

    def _forward(self, number: int, frame: object) -> None:
        if self.where.state is WorkerState.RUNNING:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.where.worker, number)
        else:
            self._signals.note(number)

    def run(self) -> int:
        """Until the worker has ended; answers its wait status."""
        while True:
            status = self._reap()
            if status is not None:
                return status
            if self.where.state is WorkerState.RUNNING:
                self._signals.deliver(self.where.worker)
            elif self._home is not None:
                self._tell_signals(self._home)
            waiting: list[Any] = [self._listener, self._wakeup, *([self._home] if self._home else [])]
            readable, _, _ = select.select(waiting, [], [], self.where.patience())
            if not readable:
                self.where.time_out()
            if self._wakeup in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 4096)
            if self._home is not None and self._home in readable:
                ended = self._hear(self._home)
                if ended is not None:
                    return ended
            if self._listener in readable:
                lost = self._serve()
                if lost is not None:
                    return lost

    def _reap(self) -> int | None:
        """The wait status of a worker that has ended here."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return int(signal.SIGKILL) if self.where.state is WorkerState.RUNNING else None
            if pid == 0:
                return None
            if pid == self.where.worker:
                self.where.end()
                if self.where.state is WorkerState.ENDED:  # else it may run elsewhere, or was never let run
                    return status

    def _tell_signals(self, home: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for number, kind in self._signals.untold():
                home.sendall(json.dumps({"number": number, "signal": kind}).encode() + b"\n")

    def _hear(self, home: socket.socket) -> int | None:
        """Which signals have arrived, or how the worker ended elsewhere."""
        try:
            data = home.recv(LONGEST_ORDER)
            self._heard += data
            if not data or len(self._heard) > LONGEST_ORDER:
                raise ValueError("nobody is there any more")
            *lines, self._heard = self._heard.split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "ended" in message and self.where.ended_remotely():
                    self.problem = str(message.get("problem") or "")
                    return int(message["ended"])
                self._signals.forget(int(message.get("signals_done", 0)))
        except (OSError, ValueError, TypeError):  # a proxyd that died has a successor
            home.close()
            self._home = None
        return None

    def _serve(self) -> int | None:
        """One order.  Answers a wait status if the worker is lost by it."""
        connection, _ = self._listener.accept()
        stays = False
        try:
            connection.settimeout(ORDER_S)
            try:
                _check_peer(connection)
                order = read_line(connection)
                if order.get("do") == "stay":
                    stays = True
                    self._keep(connection)
                    return None
            except (OSError, ValueError) as problem:
                _answer(connection, {"error": str(problem)})
                return None
            signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # they wait until the worker is back
            try:
                done = self.where.obey(order)
            except NotMoved as problem:
                _answer(connection, {"error": str(problem), "lost": problem.lost})
                if problem.lost and self.where.state is not WorkerState.REMOTE:
                    self.problem = str(problem)
                    return int(signal.SIGKILL)
            except Exception as problem:  # noqa: BLE001 - the worker would end with us
                _answer(connection, {"error": str(problem) or type(problem).__name__})
            else:
                if order.get("do") == "restore":
                    self._signals.forget(int(order.get("signals_done", 0)))
                told = {"pid": self.where.worker, "namespace": namespaces.pid_namespace()}
                _answer(connection, done | told)
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        finally:
            if not stays:
                connection.close()
        return None

    def _keep(self, connection: socket.socket) -> None:
        """As the one that hears of signals."""
        if self._home is not None:
            self._home.close()
        self._home, self._heard = connection, b""
        self._signals.tell_again()
        _answer(connection, {"state": self.where.state.value, "pid": self.where.worker})


def _start(command: Sequence[str], variables: dict[str, str], files: tuple[int, int, int]) -> int:
    worker = os.fork()
    if worker:
        return worker
    try:
        signal.set_wakeup_fd(-1)
        for kind in (*FORWARDED, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(kind, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.setsid()  # CRIU wants the leader of its session
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.execve(command[0], list(command), variables)
    except OSError as problem:
        os.write(2, f"proxyrun: cannot start {command[0]}: {problem.strerror}\n".encode())
    os._exit(127)


def _check_peer(connection: socket.socket) -> None:
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        raise ValueError("orders come from the owner alone")


def read_line(connection: socket.socket) -> dict[str, Any]:
    """One JSON object; raises OSError or ValueError."""
    data = b""
    while not data.endswith(b"\n"):
        more = connection.recv(LONGEST_ORDER)
        data += more
        if not more or len(data) > LONGEST_ORDER:
            raise ValueError("that is no line of JSON")
    message = json.loads(data)
    if not isinstance(message, dict):
        raise ValueError("that is no JSON object")
    return message


def _answer(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")
