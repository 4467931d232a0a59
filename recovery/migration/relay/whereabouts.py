"""Where a worker is, as its init sees it: here, stopped here for a move, or on another host.

    HERE ──dump──▶ HELD ──yield──▶ BOUND ──gone──▶ AWAY ──restore──▶ GUEST ──resume──▶ HERE
      ◀───────────resume────────────┘

Between two hosts the worker runs on one at most: it is started on the other only after this side is BOUND.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any

from understudy.recovery.migration.preflight.process_tree import read_tree
from understudy.recovery.migration.process.moving import (
    NotMoved,
    Tool,
    await_end,
    dump,
    images_folder,
    restore,
)

PATIENCE_S = 120.0
"""How long a stopped worker waits for the next order."""
LONGEST_PATIENCE_S = 3600.0
MOST_PROCESSES = 4096
LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
PID_MARGIN = 64
"""CRIU and its helpers get pids above the tree's."""


class Place(StrEnum):
    """Where the worker is."""

    HERE = "here"
    HELD = "held"
    """Stopped and dumped; goes on by itself if nobody says what becomes of it."""
    BOUND = "bound"
    """Stopped, and it may run elsewhere: only an order changes that."""
    GUEST = "guest"
    """Restored and stopped; ends by itself if nobody lets it run."""
    AWAY = "away"


class Whereabouts:
    """The state of one worker.  Orders raise NotMoved or ValueError, and then nothing has changed."""

    def __init__(self, worker: int, place: Place) -> None:
        self.worker = worker
        self.place = place
        self._pids: list[int] = []
        self._stopped: list[int] = []
        """Of them, those that had been stopped by others before."""
        self._images: Path | None = None
        self._deadline = 0.0

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry it out; answers what is to be told."""
        known: dict[str, tuple[tuple[Place, ...], Callable[[dict[str, Any]], dict[str, Any]]]] = {
            "dump": ((Place.HERE,), self._dump),
            "yield": ((Place.HELD,), self._yield),
            "resume": ((Place.HELD, Place.BOUND, Place.GUEST), self._resume),
            "gone": ((Place.HELD, Place.BOUND, Place.GUEST), self._gone),
            "restore": ((Place.AWAY,), self._restore),
            "where": (tuple(Place), lambda _: {}),
        }
        what = order.get("do")
        if not isinstance(what, str) or what not in known:
            raise ValueError(f"{what!r} is no order")
        allowed, act = known[what]
        if self.place not in allowed:
            raise ValueError(f"the worker is {self.place}, so {what!r} makes no sense")
        return act(order) | {"place": self.place.value, "pid": self.worker}

    # ------------------------------------------------------------------ time
    def patience(self) -> float | None:
        """Seconds until `time_out`; None: there is no end."""
        if self.place not in (Place.HELD, Place.GUEST):
            return None
        return max(0.0, self._deadline - time.monotonic())

    def time_out(self) -> None:
        """Whoever gave the last order does not come back."""
        if self.place is Place.HELD:
            self._resume({})
        elif self.place is Place.GUEST:
            self._gone({})

    def end(self) -> None:
        """The worker has ended."""
        self._pids, self.place = [], Place.AWAY
        self._forget_images()

    def ended_remotely(self) -> bool:
        """We are told so; answers whether it can be."""
        if self.place not in (Place.AWAY, Place.BOUND, Place.GUEST):
            return False
        if self.place is Place.GUEST:  # who was to let it run here has died
            self._gone({})
        self.end()
        return True

    # ------------------------------------------------------------------ orders
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
        self._images, self.place = folder, Place.HELD
        self._deadline = time.monotonic() + patience
        return {
            "images": str(folder), "pids": self._pids, "stopped": stopped, "dump_s": time.monotonic() - began,
        }  # fmt: skip

    def _yield(self, _: dict[str, Any]) -> dict[str, Any]:
        self.place = Place.BOUND
        return {}

    def _resume(self, _: dict[str, Any]) -> dict[str, Any]:
        _send(set(self._pids) - set(self._stopped), signal.SIGCONT)
        self._forget_images()
        self.place = Place.HERE
        return {}

    def _gone(self, _: dict[str, Any]) -> dict[str, Any]:
        _send(self._pids, signal.SIGKILL)
        await_end(self._pids)
        self.end()
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
        self.place, self._deadline = Place.GUEST, time.monotonic() + patience
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


__all__ = ["NotMoved", "Place", "Whereabouts"]
