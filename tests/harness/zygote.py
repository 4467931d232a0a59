"""A process that has imported what others need, and that they are forks of.

    python zygote.py KIND DIRECTORY PARENT LISTENER

| kind | what it has imported | what is forked of it |
|---|---|---|
| `worker` | the client, activated, and PyTorch; no session is open | scripts under proxyrun |
| `native` | PyTorch | the same scripts without us |
| `server` | PyTorch, the device server's modules | spawners |
| `control` | proxyd, proxyrun and recoveryctl; no PyTorch | those, and the helper of a worker's session |

It imports when the first one asks, runs nothing of what it imported, and has one thread. A fork looks (in
/proc, in `sys`, by its files and signals) as if it had been started by the command line that was asked for. A
zygote ends with its parent, and its forks with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import importlib.util
import io
import marshal
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import ending
import launcher

KINDS = ("worker", "native", "server", "control")
IMPORTS = {
    "worker": ("torch", "torch.distributed", "torch._dynamo"),  # the last by the first step of any optimizer
    "native": ("torch", "torch.distributed", "torch._dynamo"),
    "server": (
        "torch", "torch.distributed", "understudy.proxy_server._server", "understudy.proxy_server.capability",
        "understudy.proxy_server.device_server", "understudy.proxy_server.guardian",
        "understudy.proxy_server.shared_files",
    ),
    "control": (
        "understudy.recovery.proxyd", "understudy.recovery.proxyrun", "understudy.recovery.recoveryctl",
        "understudy.recovery.daemon.daemon", "understudy.recovery.machine.allocation",
    ),
}  # fmt: skip
FOR_SPEED = {"control": ("typer._adapters", "coolname", "grpc._channel")}
"""What each command line imports by and by; modules of libraries' own, which other versions need not have."""
RUN_AS_MAIN = IMPORTS["control"][:3]
"""What they import is wanted; they themselves are to be run."""
BOOT = ("proxy_client", "boot", "sitecustomize.py")
JOB = "zygote"
"""Of the variables under which a worker's client is activated; a fork's own come later."""
ROOM = 100_000
"""Bytes of command line and variables that a fork may have."""
_PR_SET_PDEATHSIG, _PR_SET_MM, _ARG_END, _ENV_END = 1, 35, 9, 11
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Fork:
    """A process that was asked for, and who stands for it."""

    pid: int
    connection: socket.socket
    orders: socket.socket
    """On which the fork may say whose end is to be its own."""
    watched: int = -1


@dataclass
class Zygote:
    """Serves until its parent ends; `main` returns in a fork, with what that is to do."""

    kind: str
    listener: socket.socket
    selector: selectors.DefaultSelector = field(default_factory=selectors.DefaultSelector)
    forks: dict[int, Fork] = field(default_factory=dict)
    ready: bool = False

    def serve(self) -> dict[str, Any]:
        """Returns in forks only: the request of each."""
        reaped, wake = socket.socketpair()
        reaped.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self.listener, selectors.EVENT_READ, "asked")
        self.selector.register(reaped, selectors.EVENT_READ, "reap")
        while True:
            for key, _ in self.selector.select():
                match key.data:
                    case "asked":
                        if (request := self._asked()) is not None:
                            self._forget()
                            return request
                    case "reap":
                        with contextlib.suppress(BlockingIOError):
                            reaped.recv(4096)
                        self._reap()
                    case ("left", pid):
                        self._end(pid)
                    case ("ordered", pid):
                        self._follow(pid)
                    case ("watched", pid):
                        self._end(pid)

    def _forget(self) -> None:
        """In a fork: what is closed later may have the number of another file by then."""
        signal.set_wakeup_fd(-1)
        self.selector.close()
        self.listener.close()
        for fork in self.forks.values():
            fork.connection.close()
            fork.orders.close()
        self.forks.clear()

    def _asked(self) -> dict[str, Any] | None:
        connection, _ = self.listener.accept()
        files: list[int] = []
        try:
            length, files, *_ = socket.recv_fds(connection, 4, launcher.MOST_FILES)
            line = b""
            while not length or len(line) < int.from_bytes(length, "little"):
                part = connection.recv(1 << 20)
                if not part:
                    raise OSError(errno.ECONNRESET, "gone")
                line += part
        except OSError:  # it was killed
            connection.close()
            for number in files:
                os.close(number)
            return None
        request: dict[str, Any] = marshal.loads(line)
        if not self.ready:
            prepare(self.kind)
            self.ready = True
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            request["given"], request["orders"] = files, theirs.detach()
            return request
        theirs.close()
        for number in files:
            os.close(number)
        self.forks[pid] = Fork(pid, connection, ours)
        self.selector.register(connection, selectors.EVENT_READ, ("left", pid))
        self.selector.register(ours, selectors.EVENT_READ, ("ordered", pid))
        self._tell(connection, pid)
        return None

    @staticmethod
    def _tell(connection: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError):  # who stood for the fork has been killed: the next event says so
            connection.sendall(b"%d\n" % number)

    def _reap(self) -> None:
        while self.forks and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            if (
                self.kind == "native"
            ):  # of ours nothing stays by itself, but a rank that PyTorch lets hang does
                os.killpg(ended.si_pid, signal.SIGKILL)
            pid, status = os.waitpid(ended.si_pid, 0)
            fork = self.forks.pop(pid)
            self._tell(fork.connection, status)
            for one in (fork.connection, fork.orders):
                if one in self.selector.get_map():
                    self.selector.unregister(one)
                one.close()
            if fork.watched >= 0:
                self.selector.unregister(fork.watched)
                os.close(fork.watched)

    def _end(self, pid: int) -> None:
        """Who stood for the fork has been killed, or whose end was to be its own has ended."""
        fork = self.forks.get(pid)
        if fork is None:
            return
        if fork.connection in self.selector.get_map():
            self.selector.unregister(fork.connection)
        # Who kills a launcher finds its ranks below it, natively; here, only those that stand for them.
        for one in reversed([pid, *(descendants(pid) if self.kind == "native" else ())]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)  # before it is reaped: the number is still its own

    def _follow(self, pid: int) -> None:
        fork = self.forks.get(pid)
        if fork is None:
            return
        said = fork.orders.recv(64)
        if not said:
            self.selector.unregister(fork.orders)
            return
        try:
            fork.watched = os.pidfd_open(int(said))
        except ProcessLookupError:
            os.kill(pid, signal.SIGKILL)
            return
        self.selector.register(fork.watched, selectors.EVENT_READ, ("watched", pid))


def descendants(pid: int) -> list[int]:
    """Parents first."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has just ended
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def prepare(kind: str) -> None:
    """Import what its forks need."""
    if kind == "worker":
        os.environ["UNDERSTUDY_JOB"] = JOB
        package = Path(str(importlib.util.find_spec("understudy").origin)).parent  # type: ignore[union-attr]
        runpy.run_path(str(package.joinpath(*BOOT)))
        del os.environ["UNDERSTUDY_JOB"]
    if kind == "server":
        os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # as the spawner does, before it imports gRPC
    for name in IMPORTS[kind]:
        importlib.import_module(name)
    for name in FOR_SPEED.get(kind, ()):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    if kind == "server":
        os.environ.pop("GRPC_ENABLE_FORK_SUPPORT")
    for name in RUN_AS_MAIN:
        sys.modules.pop(name, None)
    gc.collect()
    gc.freeze()


def become(request: dict[str, Any]) -> None:
    """In a fork: what a process has from its start that was asked for."""
    os.setsid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    enter(request)
    take_files(request)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    for number, limit in request["limits"].items():
        if resource.getrlimit(number) != limit:
            resource.setrlimit(number, limit)
    for number in set(range(1, signal.NSIG)) - {signal.SIGKILL, signal.SIGSTOP, 32, 33}:
        ignored = number in request["ignored"] or number in (signal.SIGPIPE, signal.SIGXFSZ)
        signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["variables"])
    words = request["words"]
    show([request["python"], *words[1:]], request["variables"])
    sys.orig_argv = list(words)
    unbuffered = "-u" in words[1:3] or bool(os.environ.get("PYTHONUNBUFFERED"))
    for name, number, mode in (("stdin", 0, "rb"), ("stdout", 1, "wb"), ("stderr", 2, "wb")):
        make_stream(name, number, mode, unbuffered)
    gc.enable()


def enter(request: dict[str, Any]) -> None:
    """The namespaces of who asked; raises OSError where only root may."""
    count = request["entered"]
    for name, number in zip(launcher.ENTERED, request["given"][:count], strict=True):
        same = os.fstat(number).st_ino == os.stat(f"/proc/self/ns/{name}").st_ino
        if not same and _libc.setns(number, 0) != 0:
            raise OSError(ctypes.get_errno(), f"a fork cannot enter the {name} namespace of who asked for it")
        os.close(number)
    del request["given"][:count]


def take_files(request: dict[str, Any]) -> None:
    """The files that came, by the numbers that they have where they came from; no others."""
    high = 1000
    orders = os.dup2(request["orders"], high, inheritable=False)
    staged = {
        number: os.dup2(given, high + 1 + place, inheritable=False)
        for place, (number, given) in enumerate(zip(request["files"], request["given"], strict=True))
    }
    os.closerange(0, high)
    for number, copy in staged.items():
        os.dup2(copy, number)
        os.close(copy)
    request["orders"] = orders


def make_stream(name: str, number: int, mode: str, unbuffered: bool) -> None:
    """As Python makes it when it starts."""
    try:
        writes = mode == "wb"
        raw = open(number, mode, 0 if writes and unbuffered else -1, closefd=False)  # noqa: SIM115 - it stays
        getattr(raw, "raw", raw).name = f"<{name}>"  # type: ignore[misc]
        stream = io.TextIOWrapper(
            raw, encoding="utf-8", errors="backslashreplace" if name == "stderr" else "strict",
            line_buffering=writes and not unbuffered and (name == "stderr" or os.isatty(number)),
            write_through=writes and unbuffered,
        )  # fmt: skip
        stream.mode = mode[0]  # type: ignore[misc]
    except OSError:  # closed where it came from
        stream = None  # type: ignore[assignment]
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def show(words: list[str], variables: dict[str, str]) -> None:
    """To whoever reads /proc: the kernel shows what lies where it put them when this process started."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    arguments, arguments_end, environment, environment_end = (int(word) for word in fields[45:49])
    memory = os.open("/proc/self/mem", os.O_RDWR)
    line = b"".join(os.fsencode(word) + b"\0" for word in words)
    block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables.items())
    for begin, end, data, option in (
        (arguments, arguments_end, line, _ARG_END),
        (environment, environment_end, block, _ENV_END),
    ):
        room = end - begin - 1
        os.pwrite(memory, data[:room].ljust(room + 1, b"\0"), begin)
        _libc.prctl(_PR_SET_MM, option, ctypes.c_ulong(begin + min(len(data), room)), 0, 0)  # root may
    os.close(memory)


def die_with(orders: int) -> None:
    """`replay.die_with_parent` for forks: their parent is the zygote, and another one is meant."""
    replay = sys.modules.get("understudy.replay")
    if replay is not None:
        replay.die_with_parent = lambda parent: os.write(orders, str(parent).encode())  # type: ignore[attr-defined]


def refresh_client() -> None:
    """What the client took from its variables as it was activated."""
    variables, capability = (
        sys.modules[f"understudy.proxy_client.{name}"] for name in ("variables", "capability")
    )
    if sentence := variables.complaint(os.environ):
        raise ValueError(sentence)
    capability._current = None  # type: ignore[attr-defined]
    sys.modules["understudy.proxy_client.session"].tell_of_driver()
    sys.modules["understudy.proxy_client.samples.hooks"].arrange()


def run(request: dict[str, Any], kind: str) -> None:
    """What the command line says, as `python` would; raises what it raises."""
    words = request["words"][1:]
    safe = False
    while words[0] in ("-u", "-P"):
        safe = safe or words[0] == "-P"
        words.pop(0)
    elsewhere = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[0:0] = elsewhere
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        if not safe:
            sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    script = words[0]
    sys.argv = list(words)
    if not safe:
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    with io.open_code(os.path.abspath(script)) as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=script, __spec__=None, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def main() -> None:
    kind, directory, parent = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    sys.path.remove(str(Path(__file__).parent))  # forks find no modules of the harness
    listener = socket.socket(fileno=int(sys.argv[4]))
    description = directory / f"{kind}.surroundings"
    description.with_suffix(".new").write_bytes(marshal.dumps(launcher.surroundings(kind)))
    description.with_suffix(".new").rename(description)
    os.write(1, b"listens\n")
    os.dup2(2, 1)
    zygote = Zygote(kind, listener)
    request = zygote.serve()
    become(request)
    if kind in ("server", "control"):
        die_with(request["orders"])
    else:
        os.close(request["orders"])
    if kind == "worker":
        refresh_client()
    ending.run(lambda: run(request, kind), str(Path(__file__).parent))


if __name__ == "__main__":
    main()
