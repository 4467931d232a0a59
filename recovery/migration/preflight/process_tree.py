"""A worker and its descendants as /proc shows them: what they hold open and have mapped."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from understudy.recovery.migration.preflight.sockets import Kind, Socket, parse_internet, unix_sockets

PROC = Path("/proc")
NAMESPACES = ("pid", "mnt", "net", "ipc", "user", "uts")
_LOCK = re.compile(r"^lock:.*\bWRITE\b", re.MULTILINE)
_INODE = re.compile(r"(pipe|socket):\[(\d+)\]")


@dataclass(frozen=True)
class Descriptor:
    """An open file."""

    number: int
    target: str
    """As readlink shows it: a path, pipe:[N], socket:[N], anon_inode:[eventfd]."""
    inode: int = 0
    """Of a pipe or a socket."""
    reads: bool = False
    writes: bool = False
    is_device: bool = False
    size: int = 0
    deleted: bool = False
    """No name leads to it any more."""
    locked: bool = False
    """For itself alone."""


@dataclass(frozen=True)
class MappedFile:
    """A file in memory."""

    path: str
    shared: bool
    bytes: int


@dataclass(frozen=True)
class Process:
    """A process of the tree."""

    pid: int
    name: str
    parent: int = 0
    session: int = 0
    """Session leader's pid."""
    tracer: int = 0
    descriptors: tuple[Descriptor, ...] = ()
    mapped: tuple[MappedFile, ...] = ()
    namespaces: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Holder:
    """A process outside that holds an end of a pipe or a socket."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


@dataclass(frozen=True)
class Tree:
    """A moment of it; the root comes first."""

    processes: tuple[Process, ...]
    sockets: Mapping[int, Socket] = field(default_factory=dict)
    outside: Mapping[int, Holder] = field(default_factory=dict)
    """Inode -> somebody else who holds it."""
    own_pids: bool = True
    """Whether the root lives in a pid namespace below that of the looker."""


def read_tree(root: int, proc: Path = PROC) -> Tree:
    """Raises ProcessLookupError if the root is gone; what ends meanwhile is left out."""
    parents = _parents(proc)
    if root not in parents:
        raise ProcessLookupError(f"there is no process {root}")
    pids = [root, *_descendants(root, parents)]
    processes = tuple(found for pid in pids if (found := _read_process(proc, pid)) is not None)
    if not processes or processes[0].pid != root:
        raise ProcessLookupError(f"process {root} has ended, or belongs to another user")
    sockets = unix_sockets()
    for kind, names in ((Kind.TCP, ("tcp", "tcp6")), (Kind.UDP, ("udp", "udp6"))):
        for name in names:
            sockets |= parse_internet(_text(proc / str(root) / "net" / name), kind)
    inner = {one.inode for process in processes for one in process.descriptors if one.inode}
    wanted = inner | {sockets[inode].peer_inode for inode in inner if inode in sockets} - {0}
    own = dict(processes[0].namespaces).get("pid", 0) != _namespace(proc / "self", "pid")
    return Tree(processes, sockets, _outside(proc, set(pids), parents, wanted), own)


def _parents(proc: Path) -> dict[int, int]:
    parents = {}
    for name in os.listdir(proc):
        if name.isascii() and name.isdigit():
            fields = _text(proc / name / "stat").rpartition(")")[2].split()
            if len(fields) > 1 and fields[0] not in "ZX":
                parents[int(name)] = int(fields[1])
    return parents


def _descendants(root: int, parents: Mapping[int, int]) -> list[int]:
    found: list[int] = []
    generation = {root}
    while generation := {pid for pid, parent in parents.items() if parent in generation} - {root, *found}:
        found += sorted(generation)
    return found


def _read_process(proc: Path, pid: int) -> Process | None:
    folder = proc / str(pid)
    fields = (text := _text(folder / "stat")).rpartition(")")[2].split()
    try:
        descriptors = tuple(_descriptors(folder))
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return None
    if len(fields) < 4:
        return None
    status = _text(folder / "status")
    tracer = re.search(r"^TracerPid:\s*(\d+)", status, re.MULTILINE)
    return Process(
        pid=pid, name=text.partition("(")[2].rpartition(")")[0], parent=int(fields[1]),
        session=int(fields[3]), tracer=int(tracer[1]) if tracer else 0, descriptors=descriptors,
        mapped=tuple(parse_maps(_text(folder / "maps"))),
        namespaces=tuple((name, _namespace(folder, name)) for name in NAMESPACES),
    )  # fmt: skip


def _descriptors(folder: Path) -> Iterator[Descriptor]:
    for name in sorted(os.listdir(folder / "fd"), key=int):
        with contextlib.suppress(OSError, ValueError, IndexError):  # closed meanwhile
            target, state = os.readlink(folder / "fd" / name), os.stat(folder / "fd" / name)
            about = _text(folder / "fdinfo" / name)
            mode = int(re.findall(r"^flags:\s*(\d+)", about, re.MULTILINE)[0], 8)
            inode = _INODE.fullmatch(target)
            yield Descriptor(
                number=int(name), target=target, inode=int(inode[2]) if inode else 0,
                reads=mode & os.O_ACCMODE in (os.O_RDONLY, os.O_RDWR),
                writes=mode & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR),
                is_device=stat.S_ISCHR(state.st_mode) or stat.S_ISBLK(state.st_mode),
                size=state.st_size, deleted=stat.S_ISREG(state.st_mode) and state.st_nlink == 0,
                locked=bool(_LOCK.search(about)),
            )  # fmt: skip


def parse_maps(text: str) -> Iterator[MappedFile]:
    """/proc/PID/maps: what has a name."""
    for line in text.splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].startswith("/"):
            first, _, end = words[0].partition("-")
            yield MappedFile(words[5], words[1].endswith("s"), int(end, 16) - int(first, 16))


def _outside(proc: Path, inside: set[int], others: Iterable[int], wanted: set[int]) -> dict[int, Holder]:
    found: dict[int, Holder] = {}
    for pid in sorted(set(others) - inside) if wanted else ():
        with contextlib.suppress(OSError):
            for name in os.listdir(proc / str(pid) / "fd"):
                with contextlib.suppress(OSError):
                    inode = _INODE.fullmatch(os.readlink(proc / str(pid) / "fd" / name))
                    if inode and int(inode[2]) in wanted:
                        found[int(inode[2])] = Holder(pid, _text(proc / str(pid) / "comm").strip())
    return found


def _namespace(folder: Path, name: str) -> int:
    try:
        return os.stat(folder / "ns" / name).st_ino
    except OSError:
        return 0


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
