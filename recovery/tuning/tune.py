"""`recoveryctl snapshots tune`, all but its command line: what to ask, in which order, and of whom."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.recovery.base.errors import BadInput
from understudy.recovery.snapshots.tuning import probe
from understudy.recovery.snapshots.tuning.advice import Advice, Known, Slowdown, advise, room_for, usable
from understudy.recovery.snapshots.tuning.tuner import size
from understudy.recovery.tuning.job_watch import JobWatch, Pace, name_of_job

SHARE_OF_FREE = 0.9
"""A file system that is full to the brim is slow, and others write there, too."""

Look = Callable[[], Any]


@dataclass(frozen=True)
class Order:
    """What the user asked for; None: not given."""

    directory: Path
    state_bytes: int | None = None
    step_s: float | None = None
    dram_bytes: int = 64 << 20
    storage_bytes: int | None = None
    overhead: float = 0.03
    probe_limit: int = 512 << 20
    watch_s: float = 5.0
    load: bool = True
    """Whether a running job may be slowed down to learn by how much."""
    job: str = ""

    @property
    def needs_job(self) -> bool:
        """Whether anything is left to ask a running job."""
        return self.state_bytes is None or self.step_s is None


@dataclass(frozen=True)
class Running:
    """A job, and what was seen of it before anything was written."""

    watch: JobWatch
    job: str
    driver: str
    before: Pace
    persists: bool
    """Already, so that its step time includes what that costs."""


def storage_of(order: Order) -> int:
    """S in bytes; raises BadInput."""
    if not order.directory.is_dir():
        raise BadInput(f"{order.directory} is no directory: make it, or name the one for proxyd --persist")
    try:
        state = os.statvfs(order.directory)
    except OSError as problem:
        raise BadInput(f"{order.directory} cannot be probed: {problem.strerror}") from problem
    return order.storage_bytes or int(state.f_bavail * state.f_frsize * SHARE_OF_FREE)


def running(
    order: Order, look: Look | None, make_watch: Callable[[Look, str], JobWatch] = JobWatch
) -> Running | None:
    """The job to ask, watched for a while; None if none runs.

    Raises BadInput if that leaves nothing to go by.
    """
    status = look() if look and order.needs_job else None
    job = name_of_job(status, order.job) if status is not None else ""
    if look is None or status is None or not job:
        missing = " and ".join(
            option
            for option, given in (("--state SIZE", order.state_bytes), ("--step SECONDS", order.step_s))
            if given is None
        )
        if missing:
            nobody = "no proxyd answers" if look is None else "no job runs"
            raise BadInput(
                f"{nobody}, so the training is not known: give {missing}, or start it and ask again"
            )
        return None
    watch = make_watch(look, job)
    driver = next((device.driver for device in status.node.devices), "cpu")
    persists = any(rank.persisted_step for rank in status.ranks if rank.job == job)
    return Running(watch, job, driver, watch.watch(order.watch_s), persists)


def known_of(order: Order, found: Running | None) -> Known:
    """m and t, what the user says first; raises BadInput."""
    state, state_from = order.state_bytes, "--state"
    step, step_from = order.step_s, "--step"
    if found is not None:
        ranks = found.before.world
        told = f"job {found.job}, {ranks} rank{'s' if ranks != 1 else ''} on this node"
        if state is None:
            state = found.before.state_bytes
            together = "the sum of all, although what several hold alike is written once; " * (ranks > 1)
            state_from = f"{told}; {together}the most seen, which amid a step is more than a snapshot takes"
        if step is None:
            step, step_from = found.before.step_s, f"{told}; median over ranks, on the wall clock"
            step_from += "; it persists already, and that is in it" * found.persists
    if not state:
        raise BadInput(
            "the job holds nothing on its devices yet: ask again after a step, or give --state SIZE"
        )
    if step is None:
        raise BadInput(
            "not every rank finished steps while it was watched: give --step SECONDS, or a longer --watch"
        )
    return Known(state, state_from, step, step_from)


def slowdown_of(order: Order, found: Running | None, probing: probe.Probe) -> Slowdown:
    """What writing costs the running job, if there is one."""
    if found is None:
        why = "no job is running" if order.needs_job else "with --state and --step no job is asked"
        return Slowdown(1.0, f"not measured, as {why}: writing may cost more than is promised below")
    before = found.before.step_s
    if not order.load:
        return Slowdown(
            1.0, "not measured because of --no-load: writing may cost more than is promised below"
        )
    during = before and probing.while_writing(lambda: found.watch.watch(order.watch_s)).step_s
    if not before or not during:
        return Slowdown(1.0, "not measured, as the job ended or finished no step meanwhile: ask again")
    ratio = during / before
    told = f"measured, {during:.4g} s per step while one after another was written, {before:.4g} s before"
    return Slowdown(max(1.0, ratio), told)


def at_once(storage_bytes: int, state_bytes: int) -> int:
    """How many snapshots under way to try; `storage_bytes` is what slots may take.  Raises BadInput."""
    if storage_bytes < 2 * state_bytes:
        raise BadInput(
            f"snapshots of {size(state_bytes)} need {size(room_for(2, state_bytes))} of storage, "
            "one complete and one being written: free some, or allow more with --storage"
        )
    return min(probe.MOST_AT_ONCE, storage_bytes // state_bytes - 1)


def measure(order: Order, look: Look | None, told: Callable[[str], None] = lambda _: None) -> Advice:
    """Everything, in the order in which it disturbs least.  `told` hears what goes on.

    Raises BadInput, or what `look` raises.
    """
    storage = storage_of(order)
    told("watching the job" if look and order.needs_job else "")
    found = running(order, look)
    known = known_of(order, found)
    most = at_once(usable(storage), known.state_bytes)
    count = min(known.state_bytes, order.probe_limit)
    told(f"writing snapshots of {size(count)} to {order.directory}, up to {most} at once")
    with probe.opened(order.directory, count, most) as probing:
        timings = probing.measure()
        told("writing one after another while the job trains" if found and order.load else "")
        slowdown = slowdown_of(order, found, probing)
    return advise(
        str(order.directory), known, timings, slowdown, order.dram_bytes, storage, order.overhead,
        found.driver if found else "cpu",
    )  # fmt: skip
