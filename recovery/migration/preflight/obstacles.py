"""What of a worker's processes CRIU could not dump, or would come back without a meaning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from understudy.recovery.migration.preflight.process_tree import Descriptor, Process, Tree
from understudy.recovery.migration.preflight.sockets import Kind, Socket

GHOST_LIMIT = 1 << 30
"""Bytes of a file without a name that a dump takes along."""
HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
DUMPABLE_ANONYMOUS = ("[eventfd]", "[eventpoll]", "[signalfd]", "[timerfd]", "[pidfd]")
ADVICE = "start the run with proxyrun --migratable"
TERMINAL = re.compile(r"/dev/(pts/\d+|tty\S*|console|ptmx)")


@dataclass(frozen=True)
class Obstacle:
    """One thing that stands in the way: `text` says what, without whose."""

    pid: int
    text: str


def obstacles(tree: Tree) -> list[Obstacle]:
    """All of them, the root's first; empty: the tree can be dumped."""
    found = [Obstacle(process.pid, text) for process in tree.processes for text in _of(tree, process)]
    if not tree.own_pids:
        found.append(
            Obstacle(
                tree.processes[0].pid,
                f"has no pid namespace of its own, so its pids may be taken then: {ADVICE}",
            )
        )
    return found


def obstacles_between_hosts(tree: Tree) -> list[Obstacle]:
    """What is none to a worker that stays on its host."""
    return [
        Obstacle(
            process.pid,
            f"descriptor {one.number} holds {one.target} locked for itself, which its copy cannot have, too",
        )
        for process in tree.processes
        for one in process.descriptors
        if one.locked
    ]


def _of(tree: Tree, process: Process) -> Iterator[str]:
    root = tree.processes[0]
    if process.tracer:
        yield f"is traced by process {process.tracer} (a debugger, strace)"
    if process.session not in {other.pid for other in tree.processes}:
        leader = (
            f"process {process.session}" if process.session else "a process that cannot be seen from here"
        )
        yield f"belongs to the session of {leader}, which is not moved with it: {ADVICE}"
    if process is not root:
        ours = dict(root.namespaces)
        for name, inode in process.namespaces:
            if inode and ours.get(name) and inode != ours[name]:
                yield f"is in a {name} namespace of its own"
    for descriptor in process.descriptors:
        if what := _of_descriptor(tree, descriptor):
            yield f"descriptor {descriptor.number} is {what}"
    yield from _of_memory(process)


def _of_descriptor(tree: Tree, one: Descriptor) -> str:
    if one.target.startswith("socket:"):
        return _of_socket(tree, one.inode)
    if one.target.startswith("pipe:"):
        holder = tree.outside.get(one.inode)
        return f"a pipe that {holder} holds, too" if holder else ""
    if one.target.startswith("anon_inode:"):
        kind = one.target.removeprefix("anon_inode:")
        return "" if kind in DUMPABLE_ANONYMOUS else f"{kind.strip('[]')}, which cannot be moved"
    if TERMINAL.fullmatch(one.target):
        return f"the terminal {one.target}"
    if one.is_device and one.target not in HARMLESS_DEVICES:
        return f"the device {one.target}"
    if one.deleted and one.size > GHOST_LIMIT:
        return f"{one.target}, whose {one.size} bytes only this descriptor keeps: more than {GHOST_LIMIT}"
    return ""


def _of_socket(tree: Tree, inode: int) -> str:
    found = tree.sockets.get(inode)
    if found is None:
        return "a socket that is neither a Unix nor a TCP nor a UDP socket"
    if found.kind is Kind.UNIX:
        return _of_unix_socket(tree, found)
    if found.listens:
        return f"a TCP socket that listens at {found.local}, where its clients would not find it any more"
    if found.peer:
        return f"a {found.kind} connection to {found.peer}"
    return ""


def _of_unix_socket(tree: Tree, found: Socket) -> str:
    if holder := tree.outside.get(found.inode):
        return f"a Unix socket that {holder} holds, too"
    if holder := tree.outside.get(found.peer_inode):
        return f"a Unix socket connected to {holder}"
    return ""


def _of_memory(process: Process) -> Iterator[str]:
    told = set()
    for one in process.mapped:
        path = one.path.removesuffix(" (deleted)")
        if path in told:
            continue
        if path.startswith("/SYSV"):
            told.add(path)
            yield f"has System V shared memory mapped ({path[1:]})"
        elif path.startswith("/dev/") and not path.startswith(("/dev/shm/", "/dev/zero")):
            told.add(path)
            yield f"has the device {path} mapped"


def sentence(rank: int, root: int, tree: Tree, obstacle: Obstacle) -> str:
    """`rank 1 (pid 123): descriptor 7 is a TCP connection to 10.0.0.1:443`."""
    name = next((one.name for one in tree.processes if one.pid == obstacle.pid), "")
    whose = f"pid {obstacle.pid}" if obstacle.pid == root else f"pid {obstacle.pid}, its child {name}"
    return f"rank {rank} ({whose}): {obstacle.text}"
