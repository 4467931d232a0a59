"""A thread that sees when this rank no longer moves (paper 001 §3.1, §3.2).

PyTorch counts the works that each process group has enqueued and completed. A rank whose group has works that
neither end nor move, while its training thread stays at one place, waits for a rank that does not come. How
long is too long follows from how long this rank has waited before; `judge` decides, and is pure.

Point-to-point operations are not counted: there, that the training thread stays inside `torch.distributed`
stands for it. NCCL's collectives are counted by the events of their streams: cuda_watch.py.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .at_work import AtWork
from .cuda_watch import CudaWatch

try:
    from . import _gil
except ImportError:  # a checkout that was not built
    _gil = None  # type: ignore[assignment]

LONGER_THAN_EVER = 10.0
"""A stall so many times as long as the longest before is a hang."""
OF_TIMEOUT = 0.8
"""Of the group's time-out: the save must begin before the group gives up."""
STEPS_OF_HISTORY = 3
"""Before so many steps ranks compile and load, and nothing is known of how long they wait ..."""
LONGER_AT_FIRST = 10.0
"""... so that they may wait for so many times as long as at least."""
DEFAULT_TIMEOUT = 1800.0
"""Seconds; PyTorch's own for Gloo."""
Count = tuple[str, int, int]
"""Of a group: its name, works enqueued, works completed."""


@dataclass(frozen=True)
class Observation:
    """What is seen at one moment."""

    time: float
    """Seconds of a monotonic clock."""
    step: int
    counts: tuple[Count, ...]
    place: int = 0
    """Where the training thread is; two equal ones mean that it was not seen to move."""
    inside: bool = False
    """Whether that is inside `torch.distributed`."""
    late: bool = False
    """Whether another rank was heard to be at work: what this one waits for may still come."""

    @property
    def waits(self) -> bool:
        return self.inside or any(enqueued > completed for _, enqueued, completed in self.counts)

    def differs(self, other: Observation) -> bool:
        """Whether something has moved from one to the other."""
        return replace(self, time=0.0, late=False) != replace(other, time=0.0, late=False)


@dataclass(frozen=True)
class Limits:
    """All in seconds. `gap`: between two observations; a longer one means that this process was stopped."""

    minimum: float
    timeout: float = DEFAULT_TIMEOUT
    gap: float = 3.0

    def of(self, longest: float, steps: int) -> float:
        """How long is too long, for what took `longest` at most in so many steps."""
        least = self.minimum if steps >= STEPS_OF_HISTORY else LONGER_AT_FIRST * self.minimum
        return min(max(least, LONGER_THAN_EVER * longest), OF_TIMEOUT * self.timeout)


@dataclass(frozen=True)
class History:
    """What `judge` remembers."""

    last: Observation | None = None
    first_step: int = 0
    """At which steps began to be counted: the first look may come behind many that are fast."""
    since: float | None = None
    """When the present stall began."""
    longest: float = 0.0
    """Stall that has ended by itself."""

    def limit(self, limits: Limits) -> float:
        """Seconds from which on a stall is a hang."""
        return limits.of(self.longest, self.last.step - self.first_step if self.last is not None else 0)

    @property
    def stall(self) -> float:
        """Seconds that the present one has lasted."""
        return self.last.time - self.since if self.last is not None and self.since is not None else 0.0


def judge(history: History, seen: Observation, limits: Limits) -> tuple[History, bool]:
    """What is known with this observation, and whether it is a hang."""
    last = history.last
    if last is None:
        return replace(history, last=seen, since=seen.time if seen.waits else None), False
    if seen.time - last.time > limits.gap:  # it was not there to see anything
        return replace(history, last=seen, since=seen.time if seen.waits else None), False
    if seen.differs(last) or not seen.waits:
        ended = seen.time - history.since if history.since is not None else 0.0
        begun = seen.time if seen.waits else None
        return replace(history, last=seen, since=begun, longest=max(history.longest, ended)), False
    if seen.late:  # from here on it counts
        return replace(history, last=seen, since=seen.time), False
    now = replace(history, last=seen)
    return now, now.stall >= now.limit(limits)


class Watchdog:
    """The thread. It calls `on_hang(reason, for_ever)` once per stall, and ends with `stop`."""

    def __init__(
        self,
        minimum_stall: float,
        training_thread: Callable[[], int],
        step: Callable[[], int],
        on_hang: Callable[[str, bool], None],
        at_work: AtWork,
        say: Callable[[str], None],
        cuda: CudaWatch | None = None,
    ) -> None:
        self._cuda = cuda if cuda is not None else CudaWatch(say)
        self._minimum, self._thread_id, self._step = minimum_stall, training_thread, step
        self._on_hang, self._at_work, self._say = on_hang, at_work, say
        self._interval = min(1.0, max(0.02, minimum_stall / 10))
        self._alone = Alone(minimum_stall / 4)
        self._counts: tuple[Count, ...] = ()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="understudy-watchdog", daemon=True)

    def start(self) -> None:
        if counts() is None:
            self._say(
                "this PyTorch does not tell how its collectives progress, so that a hang is seen only inside "
                "calls of torch.distributed, and in a backward pass when the group's time-out is over."
            )
        try:
            if _gil is None:
                raise RuntimeError("its C++ part was not built")
            _gil.start()
        except RuntimeError as error:
            self._say(f"a thread that hangs in C with the GIL keeps it, and saves nothing: {error}.")
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self.let_go()
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join()

    def let_go(self) -> None:
        """From here on nobody is made to give up the GIL: a save may have it for as long as it takes."""
        if _gil is not None:
            _gil.stop()

    def forget_in_child(self) -> None:
        """Behind a fork neither thread is there."""
        if _gil is not None:
            _gil.forget()

    def _run(self) -> None:
        history, told, held, before = History(), False, 0.0, time.monotonic()
        while not self._end.wait(self._interval):
            limits = Limits(self._minimum, shortest_timeout(), 2 * self._interval + 2.0)
            held = max(held, time.monotonic() - before - self._interval)
            self._cuda.remark(self._step() - history.first_step)
            if _gil is not None and (thread := _gil.freed()):
                self._on_hang(f"thread {thread} hangs in C, and was made to give up the GIL", True)
                return
            history, hangs = judge(history, self._observe(history.stall), limits)
            if hangs and not told:
                stall, limit = history.stall, history.limit(limits)
                self._on_hang(
                    f"a collective has not moved for {stall:.1f} s, the limit is {limit:.1f} s", False
                )
            told, before = hangs, time.monotonic()
            if _gil is not None:
                _gil.beat(self._interval + limits.of(held, self._step() - history.first_step))

    def _observe(self, stall: float) -> Observation:
        frame = sys._current_frames().get(self._thread_id())
        place = hash((id(frame), frame.f_lasti)) if frame is not None else 0
        inside = frame is not None and "/torch/distributed/" in frame.f_code.co_filename
        now = time.monotonic()
        seen = Observation(now, self._step(), self._works(inside), place, inside)
        if self._alone.works(seen):
            self._at_work.tell(now)
        return replace(seen, late=seen.waits and stall > 0 and self._at_work.heard(now))

    def _works(self, inside: bool) -> tuple[Count, ...]:
        """As `counts`, and those of NCCL's streams, but for works that only seem to be under way: the last
        two may have ended in another order than they began, and then the older one stands for both until the
        next one ends."""
        last, self._counts = self._counts, counts() or ()
        pending = enqueued(self._counts) > completed(self._counts)
        if pending and not inside and self._counts == last and outstanding() is False:
            return (*((name, one, one) for name, one, _ in self._counts), *self._cuda.counts())
        return (*self._counts, *self._cuda.counts())


class Alone:
    """Whether this rank has been at work for a while, so that others may wait for it."""

    def __init__(self, while_: float) -> None:
        self._while = while_
        self._since: float | None = None
        self._last: tuple[int, tuple[Count, ...]] | None = None

    def works(self, seen: Observation) -> bool:
        now = (seen.step, seen.counts)
        if seen.waits or now != self._last or self._since is None:
            self._since, self._last = seen.time, now
        return seen.time - self._since >= self._while


def counts() -> tuple[Count, ...] | None:
    """Of all process groups of this process; None where PyTorch does not tell."""
    try:
        from torch._C._distributed_c10d import _dump_fr_trace_json
    except ImportError:
        return None
    try:
        groups = json.loads(_dump_fr_trace_json(False))["pg_status"]
        return tuple(
            (name, int(one["last_enqueued_collective"]), int(one["last_completed_collective"]))
            for name, one in sorted(groups.items())
        )
    except (RuntimeError, KeyError, TypeError, ValueError):
        return None


def outstanding() -> bool | None:
    """Whether any work is under way, by PyTorch's record of works; None where it keeps none.

    Exact, and takes some 20 ms, where `counts` takes microseconds.
    """
    try:
        from torch._C._distributed_c10d import _dump_fr_trace_json

        works = json.loads(_dump_fr_trace_json(True, True)).get("entries")
        return any(not work["retired"] for work in works) if works else None
    except (ImportError, AttributeError, RuntimeError, KeyError, TypeError, ValueError):
        return None


def enqueued(of: Sequence[Count] | None) -> int:
    """Works in all groups together."""
    return sum(one for _, one, _ in of or ())


def completed(of: Sequence[Count] | None) -> int:
    """Works in all groups together."""
    return sum(one for _, _, one in of or ())


def shortest_timeout() -> float:
    """Of the process groups that are up, in seconds."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return DEFAULT_TIMEOUT
    found = [DEFAULT_TIMEOUT]
    for group in list(dist.distributed_c10d._world.pg_map):
        for device in getattr(group, "_device_types", ()):
            try:
                found.append(group._get_backend(device).options._timeout.total_seconds())
            except (RuntimeError, AttributeError):
                continue
    return min(found)


def collective_of(thread: int) -> str | None:
    """The collective that a thread is in, and the line that calls it: `all_reduce (train.py:12)`; or None."""
    frame, name = sys._current_frames().get(thread), None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith(("/torch/distributed/distributed_c10d.py", "_functional_collectives.py")):
            name = frame.f_code.co_name
        elif name is not None and "/torch/" not in file:
            return f"{name} ({file}:{frame.f_lineno})"
        frame = frame.f_back
    return name
