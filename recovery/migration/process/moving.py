"""The steps of a move, in the worker's namespace: dump its processes with CRIU, check the images, restore."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.recovery.migration.preflight.obstacles import GHOST_LIMIT
from understudy.recovery.migration.preflight.process_tree import read_tree
from understudy.recovery.migration.process.images import Damaged, seal, verify

LOG_LEVEL = "-v3"
LIMIT_S = 600.0
END_S = 10.0
RESERVE = 1 << 20
"""Bytes kept for checksums and CRIU's log of the restore."""
LEAST_ROOM = 1 << 20
"""Bytes; a file system with less left is full."""
OPTIONS = (LOG_LEVEL, "--file-locks", "--ghost-limit", str(GHOST_LIMIT), "--manage-cgroups=ignore")


class NotMoved(Exception):
    """Its text is a sentence; `lost`: the worker does not run any more."""

    def __init__(self, sentence: str, lost: bool = False) -> None:
        super().__init__(sentence)
        self.lost = lost


@dataclass(frozen=True)
class Tool:
    """What to do it with."""

    criu: str
    images: str
    """A directory below which the images lie meanwhile."""

    @classmethod
    def of(cls, order: dict[str, Any]) -> Tool:
        """As an order names it; raises ValueError."""
        criu, images = order.get("criu"), order.get("images")
        if not isinstance(criu, str) or not os.path.isabs(criu) or not os.access(criu, os.X_OK):
            raise ValueError(f"{criu!r} is no CRIU")
        if not isinstance(images, str) or not os.path.isabs(images) or not os.path.isdir(images):
            raise ValueError(f"{images!r} is no directory for images")
        return cls(criu, images)


def move(worker: int, tool: Tool) -> dict[str, Any]:
    """Dump the tree of a child of ours and restore it, as our child with the same pids; raises NotMoved."""
    folder = images_folder(tool)
    try:
        began = time.monotonic()
        tree = [process.pid for process in read_tree(worker).processes]
        reserve = _reserve(folder, tool)
        dump(worker, tool, folder)
        dumped = time.monotonic()
        await_end(tree)
        try:
            reserve.unlink()
            sizes = seal(folder)
            verify(folder)
        except (Damaged, OSError) as problem:
            raise NotMoved(f"the images are of no use: {problem}", lost=True) from problem
        sealed = time.monotonic()
        restore(worker, tool.criu, folder)
        restored = time.monotonic()
        return {
            "dump_s": dumped - began,
            "check_s": sealed - dumped,
            "restore_s": restored - sealed,
            "bytes": sum(sizes.values()),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def images_folder(tool: Tool) -> Path:
    """A new one; raises NotMoved."""
    try:
        return Path(tempfile.mkdtemp(prefix="understudy-images-", dir=tool.images))
    except OSError as problem:
        raise NotMoved(f"no images can be written to {tool.images}: {problem.strerror}") from problem


def _reserve(folder: Path, tool: Tool) -> Path:
    """Room for what is written once the worker has ended; raises NotMoved."""
    file = folder / "reserve"
    try:
        with open(file, "wb") as reserved:
            os.posix_fallocate(reserved.fileno(), 0, RESERVE)
    except OSError as problem:
        raise NotMoved(f"there is no room for its images in {tool.images}: {problem.strerror}") from problem
    return file


def dump(worker: int, tool: Tool, folder: Path, *more: str) -> None:
    """The tree has ended then, unless `more` says otherwise; raises NotMoved."""
    command = [tool.criu, "dump", "-t", str(worker), "-D", str(folder), "-o", "dump.log", *OPTIONS, *more]
    status = _run(command)
    if status == 0:
        return
    reason = first_error(folder / "dump.log") or f"exit status {status}"
    # CRIU lets the tree go on where it was stopped; that is known only once it is looked at.
    lost = not os.path.exists(f"/proc/{worker}/stat")
    if _is_full(folder):  # CRIU's log ends where the disk was full, mostly before it says so
        raise NotMoved(f"there is no room for its images in {tool.images}", lost)
    raise NotMoved(f"CRIU could not dump process {worker}: {reason}", lost)


def _is_full(folder: Path) -> bool:
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize < LEAST_ROOM


def await_end(tree: Iterable[int]) -> None:
    """CRIU kills what it has dumped; pids are free once we have reaped them, descendants too."""
    tree = list(tree)
    deadline = time.monotonic() + END_S
    while any(os.path.exists(f"/proc/{pid}") for pid in tree) and time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)


def restore(worker: int, criu: str, folder: Path, *more: str) -> None:
    """As our child; raises NotMoved."""
    command = [criu, "restore", "-D", str(folder), "-o", "restore.log", *OPTIONS, *more]
    status = _run([*command, "--restore-detached", "--restore-sibling"])
    if status != 0:
        reason = first_error(folder / "restore.log") or f"exit status {status}"
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
        raise NotMoved(f"CRIU could not restore process {worker}: {reason}", lost=True)


def _run(command: list[str]) -> int:
    """Exit status; -1: it could not be started, or took too long."""
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            timeout=LIMIT_S, check=False,
        ).returncode  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return -1


def first_error(log: Path) -> str:
    """What CRIU's log complains about; a later line is mostly a consequence."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = [line.partition("Error")[2] for line in lines if "Error (" in line and "RLIMIT" not in line]
    return found[0].partition("): ")[2][:300] or found[0][:300] if found else ""
