"""The worker as its init sees it: what each order of `worker_state.py` does to its processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from understudy.recovery.migration.preflight.process_tree import read_tree
from understudy.recovery.migration.process.moving import (
    NotMoved,
    Tool,
    await_end,
    dump,
    images_folder,
    move,
    restore,
)
from understudy.recovery.migration.worker_state import WITHOUT_ORDERS, Event, WorkerState, after

PATIENCE_S = 120.0
"""How long a stopped worker waits for the next order."""
LONGEST_PATIENCE_S = 3600.0
MOST_PROCESSES = 4096
LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
PID_MARGIN = 64
"""CRIU and its helpers get pids above the tree's."""


class Whereabouts:
    """The worker of one init.  Orders raise NotMoved or ValueError, and then nothing has changed."""

    def __init__(self, worker: int, state: WorkerState) -> None:
        self.worker = worker
        self.state = state
        self._pids: list[int] = []
        self._stopped: list[int] = []
        """Of them, those that had been stopped by others before."""
        self._images: Path | None = None
        self._deadline = 0.0
        self._orders: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            Event.MOVE: self._move, Event.DUMP: self._dump, Event.RELEASE: lambda _: {},
            Event.RESUME: self._resume, Event.REMOVE: self._remove, Event.RESTORE: self._restore,
        }  # fmt: skip

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry it out; answers what is to be told."""
        what, told = order.get("do"), {}
        if what != "where":
            if not isinstance(what, str) or what not in self._orders:
                raise ValueError(f"{what!r} is no order")
            state = after(self.state, Event(what))
            told = self._orders[what](order)
            self.state = state
        return told | {"state": self.state.value, "pid": self.worker}

    # ------------------------------------------------------------------ time
    def patience(self) -> float | None:
        """Seconds until `time_out`; None: there is no end."""
        if self.state not in WITHOUT_ORDERS:
            return None
        return max(0.0, self._deadline - time.monotonic())

    def time_out(self) -> None:
        """Whoever gave the last order does not come back."""
        if self.state in WITHOUT_ORDERS:
            self.obey({"do": WITHOUT_ORDERS[self.state].value})

    def end(self) -> None:
        """The worker has ended here."""
        self._pids, self.state = [], after(self.state, Event.END)
        self._forget_images()

    def ended_remotely(self) -> bool:
        """We are told so; answers whether it can be."""
        if self.state is WorkerState.RESTORED:  # who was to let it run here has died
            self.obey({"do": Event.REMOVE.value})
        if self.state not in (WorkerState.REMOTE, WorkerState.RELEASED):
            return False
        self.end()
        return True

    # ------------------------------------------------------------------ orders
    def _move(self, order: dict[str, Any]) -> dict[str, Any]:
        if order.get("pid") != self.worker:
            raise ValueError(f"the relay's worker is process {self.worker}, and no other")
        return move(self.worker, Tool.of(order))

    def _dump(self, order: dict[str, Any]) -> dict[str, Any]:
        tool, patience = Tool.of(order), _patience(order)
        began = time.monotonic()
        tree = read_tree(self.worker).processes
        stopped = [process.pid for process in tree if _is_stopped(process.pid)]
        folder = images_folder(tool)
        try:
            dump(self.worker, tool, folder, "--leave-stopped")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._pids, self._stopped = [process.pid for process in tree], stopped
        self._images, self._deadline = folder, time.monotonic() + patience
        return {
            "images": str(folder), "pids": self._pids, "stopped": stopped, "dump_s": time.monotonic() - began,
        }  # fmt: skip

    def _resume(self, _: dict[str, Any]) -> dict[str, Any]:
        _send(set(self._pids) - set(self._stopped), signal.SIGCONT)
        self._pids = []
        self._forget_images()
        return {}

    def _remove(self, _: dict[str, Any]) -> dict[str, Any]:
        _send(self._pids, signal.SIGKILL)
        await_end(self._pids)
        self._pids = []
        self._forget_images()
        return {}

    def _restore(self, order: dict[str, Any]) -> dict[str, Any]:
        tool, patience = Tool.of(order), _patience(order)
        worker, pids, stopped = _pids(order, "worker"), _pids(order, "pids"), _pids(order, "stopped")
        if len(worker) != 1 or not {*worker, *stopped} <= set(pids):
            raise ValueError("the tree's processes are not named as they should be")
        if taken := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
            raise ValueError(f"process {taken[0]} exists already")
        began = time.monotonic()
        LAST_PID.write_text(str(max(pids) + PID_MARGIN))
        try:
            restore(worker[0], tool.criu, Path(tool.images), "--leave-stopped")
        except NotMoved:
            _send(pids, signal.SIGKILL)
            await_end(pids)
            raise
        self.worker, self._pids, self._stopped = worker[0], pids, stopped
        self._deadline = time.monotonic() + patience
        return {"restore_s": time.monotonic() - began}

    def _forget_images(self) -> None:
        if self._images is not None:
            shutil.rmtree(self._images, ignore_errors=True)
            self._images = None


def _patience(order: dict[str, Any]) -> float:
    value = order.get("patience_s", PATIENCE_S)
    if not isinstance(value, int | float) or not 0 < value <= LONGEST_PATIENCE_S:
        raise ValueError(f"{value!r} s is no time to wait")
    return float(value)


def _pids(order: dict[str, Any], name: str) -> list[int]:
    value = order.get(name, [])
    found = [value] if isinstance(value, int) else value
    if (
        not isinstance(found, list) or len(found) > MOST_PROCESSES
        or not all(type(pid) is int and 1 < pid < 1 << 22 for pid in found)
    ):  # fmt: skip
        raise ValueError(f"{name}: these are no pids")
    return found


def _is_stopped(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


__all__ = ["NotMoved", "Whereabouts"]
