"""What there is to know of a proxyd, as a person asks for it: jobs, groups of ranks, devices, what is wrong.

Pure: made of what proxyd answers, drawn by status_text.py.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from understudy.recovery.history.report import account_of_adoption, account_of_different
from understudy.recovery.text.tables import account_of_trouble

MOST_ROWS = 16
"""Ranks of a job that have a row each; of more, those of a host share one, but for who is not like them."""
SLOW_STEPS, SLOW_S = 20.0, 10.0
"""A minibatch that takes so many times the usual, and so long, is told of."""
RUNNING = "running"


@dataclass(frozen=True)
class Recovery:
    """The newest of a job, whatever came of it."""

    id: str
    fault: str
    rank: int
    plan: str
    recovered: bool
    total_s: float
    age_s: float


@dataclass(frozen=True)
class Row:
    """Ranks that are alike; `odd`: somebody should look at them."""

    ranks: tuple[int, ...]
    state: str
    devices: tuple[str, ...]
    host: str
    steps: tuple[int, int]
    step_s: float
    log_bytes: int
    saved: str
    odd: bool


@dataclass(frozen=True)
class Note:
    """`bad`: trouble, rather than something to know."""

    text: str
    bad: bool = False


@dataclass(frozen=True)
class JobView:
    """`faults`: that were noticed and recovered from; `given_up`: and those that were not."""

    name: str
    ranks: int
    rows: tuple[Row, ...]
    step: int
    step_s: float
    faults: int
    given_up: int
    moves: int
    validations: int
    last: Recovery | None
    notes: tuple[Note, ...]


@dataclass(frozen=True)
class DeviceView:
    """One that a rank runs on is part of that rank's row."""

    spec: str
    state: str
    server: int
    note: str


@dataclass(frozen=True)
class View:
    """`devices`: those that no rank runs on, or of which there is something to say."""

    pid: int
    torch_version: str
    device_count: int
    leased: int
    spares: int
    jobs: tuple[JobView, ...]
    devices: tuple[DeviceView, ...]
    notes: tuple[Note, ...]


def view_of(status: Any, now_ms: int) -> View:
    """`status`: that of protos/status.proto; `now_ms`: this host's clock, since 1970."""
    node = status.node
    ranks = defaultdict(list)
    for rank in status.ranks:
        ranks[rank.job].append(rank)
    told = {job.name: job for job in status.jobs}
    jobs = [_job(name, ranks[name], told.get(name), now_ms) for name in dict.fromkeys([*ranks, *told])]
    busy = ("leased", "recovering")
    devices = [
        DeviceView(device.spec, device.state, device.server_pid, device.note)
        for device in node.devices
        if device.note or device.state not in busy
    ]
    return View(
        node.pid, node.torch_version, len(node.devices),
        sum(device.state in busy for device in node.devices), node.spares,
        tuple(jobs), tuple(devices), tuple(_of_node(status)),
    )  # fmt: skip


def _of_node(status: Any) -> Iterator[Note]:
    for adoption in status.adoptions:
        yield Note(f"job {adoption.job}: {account_of_adoption(adoption)}")
    membership = status.node.membership
    if membership.trouble:
        yield Note(account_of_trouble(membership), bad=True)
    if membership.note:
        yield Note(membership.note)


# ------------------------------------------------------------------ a job
def _job(name: str, ranks: Sequence[Any], told: Any, now_ms: int) -> JobView:
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    last = None
    if told is not None and told.HasField("last"):
        one = told.last
        age_s = max(0, now_ms - one.at_ms) / 1000
        last = Recovery(one.id, one.fault, one.rank, one.plan, one.recovered, one.total_s, age_s)
    paces = [rank.step_s for rank in ranks if rank.step_s]
    return JobView(
        name, len(ranks), tuple(_rows(ranks)),
        max((rank.step for rank in ranks), default=0), statistics.median(paces) if paces else 0.0,
        told.faults if told is not None else 0, told.given_up if told is not None else 0,
        told.moves if told is not None else 0, told.validations if told is not None else 0,
        last, tuple([*_under_way(told), *notes_of(ranks)]),
    )  # fmt: skip


def _under_way(told: Any) -> Iterator[Note]:
    """A recovery or a validation, which may take long if something is wrong with it."""
    if told is None:
        return
    if told.stage:
        stage = f"{told.stage} for {told.stage_s:.1f} s, {told.under_way_s:.1f} s in all"
        yield Note(f"its ranks go back to a commit: {stage}")
    if told.waits_for:
        yield Note(f"a recovery waits: {told.waits_for}", bad=True)


def _rows(ranks: Sequence[Any]) -> Iterator[Row]:
    if len(ranks) <= MOST_ROWS:
        yield from (_row([rank]) for rank in ranks)
        return
    usual = statistics.median_low(rank.step for rank in ranks)
    alike: dict[str, list[Any]] = defaultdict(list)
    alone = []
    for rank in ranks:
        if _is_odd(rank) or abs(rank.step - usual) > 1:
            alone.append(rank)
        else:
            alike[rank.host].append(rank)
    rows = [_row(group) for group in alike.values()] + [_row([rank]) for rank in alone]
    yield from sorted(rows, key=lambda row: row.ranks)


def _row(ranks: Sequence[Any]) -> Row:
    steps = [rank.step for rank in ranks]
    paces = [rank.step_s for rank in ranks if rank.step_s]
    states = sorted({rank.state for rank in ranks})
    full = ", log full" if any(rank.backpressure for rank in ranks) else ""
    return Row(
        tuple(rank.rank for rank in ranks), "/".join(states) + full,
        tuple(rank.device for rank in ranks), ranks[0].host, (min(steps), max(steps)),
        statistics.median(paces) if paces else 0.0, sum(rank.log_bytes for rank in ranks),
        _saved(ranks), any(_is_odd(rank) for rank in ranks),
    )  # fmt: skip


def _is_odd(rank: Any) -> bool:
    return bool(rank.state != RUNNING or rank.backpressure or rank.note or _is_slow(rank))


def _is_slow(rank: Any) -> bool:
    return bool(rank.step_s and rank.step_age_s > max(SLOW_S, SLOW_STEPS * rank.step_s))


def _saved(ranks: Sequence[Any]) -> str:
    """Where the newest snapshot of all of them is, by what it outlives."""
    for place, steps in (
        ("mirror", [rank.mirrored_step for rank in ranks]),
        ("disk", [rank.persisted_step for rank in ranks]),
    ):
        if all(steps):
            return f"{place} {min(steps):,}"
    return "memory" if all(rank.snapshot_bytes for rank in ranks) else ""


def notes_of(ranks: Sequence[Any]) -> Iterator[Note]:
    """Each once, with the ranks that it is of."""
    who: dict[tuple[str, bool], list[int]] = defaultdict(list)
    of_job: dict[str, bool] = {}
    for rank in ranks:
        if rank.note:
            who[rank.note, True].append(rank.rank)
        if _is_slow(rank):
            # Rounded, or each look would tell it anew of ranks that wait for each other.
            who[f"in its minibatch for {rank.step_age_s:.0f} s, usually {rank.step_s:.2g} s", True].append(
                rank.rank
            )
        if rank.migratable:
            who[f"migratable: {rank.migratable}", False].append(rank.rank)
        for text, bad in _of_job(rank):
            of_job[text] = bad
    yield from (Note(text, bad) for text, bad in of_job.items())
    for (text, bad), those in who.items():
        yield Note(f"rank{'s' if len(those) > 1 else ''} {numbers(those)}: {text}", bad)


def _of_job(rank: Any) -> Iterator[tuple[str, bool]]:
    if rank.replies_different:
        yield account_of_different(rank.replies_different), True
    if rank.not_replayable:
        yield f"replay would give other numbers: {rank.not_replayable}", True
    elif rank.not_validated:
        yield f"not validated: {rank.not_validated}", False
    if rank.persist_choice:
        yield f"snapshots go to storage {rank.persist_choice}", False
    if rank.leader:
        yield f"host {rank.leader} leads it", False
    if rank.heir:
        yield f"host {rank.heir.replace(', ', ' or ')} leads it on if this one is lost", False


def numbers(ranks: Sequence[int]) -> str:
    """0-7, 9."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
