"""What to tell of a choice of the tuner: the options of proxyd that carry it out, in words and for programs.

Pure.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict, dataclass
from typing import Any

from understudy.recovery.snapshots.persistence import WRITER_THREADS
from understudy.recovery.snapshots.tuning.probe import Timings
from understudy.recovery.snapshots.tuning.tuner import (
    CannotTune,
    Choice,
    Limits,
    Measured,
    expected_overhead,
    explain,
    size,
    tune,
)
from understudy.recovery.snapshots.writing.writer import SLACK

LONGEST_S = 1_000_000
"""Of proxyd --persist-every."""


@dataclass(frozen=True)
class Known:
    """What is known of the training, and from where; a sentence each."""

    state_bytes: int
    state_from: str
    step_s: float
    step_from: str


@dataclass(frozen=True)
class Slowdown:
    """Time of a step while snapshots are written, over that before; 1 or more."""

    factor: float
    told: str
    """How it is known, or why not."""


@dataclass(frozen=True)
class Advice:
    """A choice, and all that it rests on."""

    directory: str
    known: Known
    timings: Timings
    slowdown: Slowdown
    measured: Measured
    limits: Limits
    choice: Choice
    notes: tuple[str, ...]

    @property
    def options(self) -> tuple[str, ...]:
        """The options for proxyd."""
        return (
            "--persist", self.directory, "--persist-slots", str(self.choice.in_flight + 1),
            "--persist-every", str(every_s(self.choice, self.measured)),
        )  # fmt: skip

    def text(self) -> str:
        """For a person."""
        times = ", ".join(f"{n}: {taken:.3g} s" for n, taken in self.measured.write_time_s.items())
        threads = ", ".join(f"{p}: {taken:.3g} s" for p, taken in self.measured.thread_time_s.items())
        lines = [
            "measured",
            f"  m = {size(self.known.state_bytes)} of state: {self.known.state_from}",
            f"  t = {self.known.step_s:.4g} s per step: {self.known.step_from}",
            f"  T_w by snapshots under way: {times}",
            f"  one snapshot by writers: {threads}",
            f"  T_S = {size(self.timings.storage_bytes_s)}/s onto the storage, engine {self.timings.engine}",
            f"  T_G = {size(self.timings.copy_bytes_s)}/s from device to host",
            f"  slowdown while a snapshot is written: x {self.slowdown.factor:.4g}; {self.slowdown.told}",
            *(f"  {note}" for note in self.notes),
            "",
            explain(self.choice, self.measured, self.limits),
            "",
            f"every {self.choice.interval} x {self.known.step_s:.4g} s, rounded up to whole seconds:",
            f"  proxyd … {shlex.join(self.options)}",
        ]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """For programs; seconds and bytes, overheads as factors."""
        measured = asdict(self.measured) | {
            "state_from": self.known.state_from,
            "step_from": self.known.step_from,
            "slowdown_from": self.slowdown.told,
        }
        probe = {
            "bytes": self.timings.bytes,
            "rounds": self.timings.rounds,
            "engine": self.timings.engine,
            "engine_notes": self.timings.notes,
        }
        return {
            "directory": self.directory,
            "measured": measured,
            "probe": probe,
            "limits": asdict(self.limits),
            "choice": asdict(self.choice),
            "expected_overhead": expected_overhead(
                self.measured, self.choice.in_flight, self.choice.interval
            ),
            "notes": list(self.notes),
            "options": list(self.options),
        }


def usable(storage_bytes: int) -> int:
    """How much storage counts: proxyd makes slots larger than the first snapshot, as the next may grow."""
    return int(storage_bytes / SLACK)


def room_for(slots: int, state_bytes: int) -> int:
    """The other way round."""
    return math.ceil(slots * state_bytes * SLACK)


def every_s(choice: Choice, measured: Measured) -> int:
    """f* steps in whole seconds, which --persist-every counts; at least 1.  Raises CannotTune."""
    seconds = max(1, math.ceil(choice.interval * measured.step_s))
    if seconds > LONGEST_S:
        raise CannotTune(
            f"a snapshot every {seconds} s would be rarer than proxyd can count: allow a larger --overhead"
        )
    return seconds


def advise(
    directory: str, known: Known, timings: Timings, slowdown: Slowdown, dram_bytes: int, storage_bytes: int,
    overhead: float, driver: str = "cpu",
) -> Advice:  # fmt: skip
    """The tuner's choice for all that.  `overhead` is a share.  Raises CannotTune."""
    measured = Measured(
        step_s=known.step_s,
        state_bytes=known.state_bytes,
        device_to_host_bytes_s=timings.copy_bytes_s,
        write_time_s=timings.write_time_s(known.state_bytes),
        storage_bytes_s=timings.storage_bytes_s,
        slowdown_while_persisting=slowdown.factor,
        thread_time_s=timings.thread_time_s(known.state_bytes),
    )
    limits = Limits(dram_bytes, usable(storage_bytes), 1 + overhead)
    choice = tune(measured, limits)
    every_s(choice, measured)
    notes = _notes(timings, known, storage_bytes, limits, driver)
    return Advice(directory, known, timings, slowdown, measured, limits, choice, notes)


def _notes(
    timings: Timings, known: Known, storage_bytes: int, limits: Limits, driver: str
) -> tuple[str, ...]:
    """What a reader of the numbers must know of them."""
    notes = [timings.notes] if timings.notes else []
    if timings.bytes < known.state_bytes:
        notes.append(
            f"Times of writing were measured with {size(timings.bytes)} and are scaled to "
            f"{size(known.state_bytes)} in proportion (--probe-limit)."
        )
    if driver == "cuda":
        notes.append("T_G is that of copying in host memory: on cuda it is not measured yet.")
    else:
        notes.append("T_G is that of copying in host memory, where a device of the cpu driver has its own.")
    notes.append(
        f"Of {size(storage_bytes)} of storage, {size(limits.storage_bytes)} count below: "
        f"proxyd makes slots {100 * (SLACK - 1):.0f} % larger than the first snapshot."
    )
    notes.append(
        f"N and f become options of proxyd below; it writes with {WRITER_THREADS} writers per snapshot, "
        "unless --persist-threads, --persist-chunk and --persist-memory say p, b and c * b otherwise."
    )
    return tuple(notes)
