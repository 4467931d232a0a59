"""Faults that a process brings upon itself: each once, whichever attempt it is."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from understudy.campaigns.programs.plan import Plan, PlannedFault
from understudy.campaigns.results.stamps import Recorder
from understudy.durable import sync_folder

WHAT_CUDA_SAYS = "CUDA error: device-side assert triggered (a campaign's fault)"
_fsync = os.fsync


def fired_marker(folder: Path, number: int) -> Path:
    """Says, over all attempts, that fault `number` of the plan has happened."""
    return folder / f"fired-{number}"


class OwnFaults:
    """Those of this rank that have not happened yet."""

    def __init__(self, plan: Plan, rank: int, recorder: Recorder, late: float = 2.0) -> None:
        """`late`: how many seconds storage takes longer, once."""
        self._folder, self._recorder = Path(plan.folder), recorder
        self._store, self._late = Path(plan.store).resolve(), late
        self._waiting = {
            number: fault
            for number, fault in enumerate(plan.faults)
            if fault.rank == rank and not fired_marker(self._folder, number).exists()
        }
        self._step_s = 0.0
        self._began = 0.0
        self._error: tuple[int, PlannedFault] | None = None

    def begin(self, step: int) -> None:
        """In front of the first call of a step, counted from 1."""
        now = time.monotonic()
        if self._began:
            self._step_s = now - self._began
        self._began = now
        for number, fault in list(self._waiting.items()):
            if fault.step == step:
                del self._waiting[number]
                self._bring(number, fault)

    def midway(self, share: float) -> None:
        """Where an error may be raised: `share` of the step is behind it."""
        if self._error is not None and share >= self._error[1].place:
            number, fault = self._error
            self._error = None
            self._happens(number, fault)
            raise RuntimeError(WHAT_CUDA_SAYS)

    def _bring(self, number: int, fault: PlannedFault) -> None:
        if fault.native == "ERROR":
            self._error = (number, fault)
        elif fault.native in ("STORAGE_ERROR", "STORAGE_LATE"):
            self._spoil_storage(number, fault)
        elif fault.place:  # the other ranks, too, are somewhere inside the step then
            timer = threading.Timer(fault.place * self._step_s, self._strike, (number, fault))
            timer.daemon = True
            timer.start()
        else:
            self._strike(number, fault)

    def _strike(self, number: int, fault: PlannedFault) -> None:
        self._happens(number, fault)
        os.kill(os.getpid(), signal.SIGSTOP if fault.native == "STOP" else signal.SIGKILL)

    def _spoil_storage(self, number: int, fault: PlannedFault) -> None:
        """The next fsync of a checkpoint in this process fails, or is late: no disk here can be told to."""

        def fsync(file: Any) -> None:
            number_of_file = file if isinstance(file, int) else file.fileno()
            if not Path(os.readlink(f"/proc/self/fd/{number_of_file}")).is_relative_to(self._store):
                return _fsync(file)
            os.fsync = _fsync
            self._happens(number, fault)
            if fault.native == "STORAGE_ERROR":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            time.sleep(self._late)
            return _fsync(file)

        os.fsync = fsync  # type: ignore[assignment]

    def _happens(self, number: int, fault: PlannedFault) -> None:
        """Durable before it strikes: an attempt behind it must not have it once more."""
        marker = fired_marker(self._folder, number)
        marker.write_text(f"{time.monotonic()!r}\n")
        sync_folder(self._folder)
        self._recorder.moment("fault", fault.step, fault.native)
