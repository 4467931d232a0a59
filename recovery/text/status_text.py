"""A View in words: lines that fit a terminal, and whether somebody should look at them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from understudy.recovery.text.tables import binary_size, duration, printable
from understudy.recovery.text.view import RUNNING, JobView, Recovery, Row, View, notes_of, numbers

COLUMNS = ("ranks", "state", "device", "step", "a step", "log", "saved")
AT_RIGHT = (3, 4, 5)
LAST_TO_GO = (0, 1, 3, 2, 4, 6, 5)
"""Columns, those first that stay in a terminal that is too narrow for all."""
LONGEST_CELL = 24
Line = tuple[str, bool]


def status_lines(view: View, width: int) -> Iterator[Line]:
    """All of it."""
    yield from _wrapped(_heading(view), width)
    for job in view.jobs:
        yield "", False
        yield from job_lines(job, width)
    if not view.jobs:
        yield from _wrapped("no job runs", width)
    if view.devices:
        yield "", False
        for device in view.devices:
            server = f", server {device.server}" if device.server else ""
            why = f": {device.note}" if device.note else ""
            yield from _wrapped(f"{device.spec} {device.state}{server}{why}", width, bad=bool(why))
    for note in view.notes:
        yield from _wrapped(note.text, width, note.bad)


def _heading(view: View) -> str:
    devices = f"{view.leased} of {_count(view.device_count, 'device')} in use"
    return f"proxyd {view.pid}, PyTorch {view.torch_version}: {devices}, {_count(view.spares, 'warm spare')}"


def job_lines(job: JobView, width: int) -> Iterator[Line]:
    """One job."""
    yield from _wrapped(job_heading(job), width)
    yield from _wrapped(_past(job), width, bad=bool(job.given_up or (job.last and not job.last.recovered)))
    yield from _table(job.rows, width)
    for note in job.notes:
        yield from _wrapped(note.text, width, note.bad)


def job_heading(job: JobView) -> str:
    """In one line, as `--watch` without a terminal repeats it."""
    pace = f", {pace_of(job.step_s)} a step" if job.step_s else ""
    return f"job {job.name}: {_count(job.ranks, 'rank')}, step {job.step:,}{pace}"


def _past(job: JobView) -> str:
    parts = [f"{_count(job.faults, 'fault')} recovered from" if job.faults else "no fault so far"]
    if job.given_up:
        parts.append(f"{job.given_up} NOT")
    if job.moves:
        parts.append(_count(job.moves, "move"))
    parts.append(_count(job.validations, "validation"))
    last = f"; last: {_account_of(job.last)}" if job.last is not None else ""
    return f"  {', '.join(parts)}{last}"


def _account_of(last: Recovery) -> str:
    how = f"recovered in {duration(last.total_s)}" if last.recovered else "given up"
    return f"{last.fault} on rank {last.rank}, {how}, {duration(last.age_s)} ago ({last.id})"


def pace_of(seconds: float) -> str:
    """12.3 ms, 1.25 s."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


# ------------------------------------------------------------------ one rank
def rank_lines(rank: Any) -> Iterator[Line]:
    """All that is known of one; `rank`: RankStatus of protos/status.proto."""
    where = f"{rank.device} at {rank.host}" if rank.host else rank.device
    yield f"rank {rank.rank} of job {rank.job}: {rank.state} on {where}", rank.state != RUNNING
    for name, text in _facts(rank):
        if text:
            yield f"  {name:<16}{text}", False
    for note in notes_of([rank]):
        yield f"  {note.text}", note.bad


def _facts(rank: Any) -> Iterator[tuple[str, str]]:
    yield "worker", f"process {rank.worker_pid}"
    yield "device server", f"process {rank.server_pid}, generation {rank.generation}"
    pace = f", usually {pace_of(rank.step_s)}" if rank.step_s else ""
    yield "minibatch", f"{rank.step:,} ({rank.phase}), for {duration(rank.step_age_s)}{pace}"
    full = ", full" if rank.backpressure else ""
    yield (
        "log",
        f"{binary_size(rank.log_bytes)}{full}, {rank.cursor_lag:,} records wait; {rank.log_directory}",
    )
    yield "commits", f"{rank.commit:,}, replay begins at {rank.floor_commit:,} at the earliest"
    yield "live state", f"{binary_size(rank.live_bytes)} in {rank.live_buffers:,} buffers"
    yield (
        "to go back",
        f"{binary_size(rank.undo_bytes)} pre-images, {binary_size(rank.shadow_bytes)} shadows",
    )
    if rank.snapshot_bytes:
        yield "in memory", f"{binary_size(rank.snapshot_bytes)} at commit {rank.snapshot_commit:,}"
    if rank.snapshots:
        yield "snapshots", f"{rank.snapshots:,} taken, {duration(rank.snapshot_s)} of the server's time"
    yield "on disk", f"step {rank.persisted_step:,}" if rank.persisted_step else ""
    yield (
        "its log",
        f"step {rank.logged_step:,}, {binary_size(rank.log_lag_bytes)} to follow" if rank.logged_step else "",
    )
    yield "mirrored", f"step {rank.mirrored_step:,}" if rank.mirrored_step else ""
    yield "CPU image", f"step {rank.cpu_image_step:,}" if rank.cpu_image_step else ""
    yield "recoveries", str(rank.recoveries)


# ------------------------------------------------------------------ the table
def _table(rows: Sequence[Row], width: int) -> Iterator[Line]:
    cells = [_cells(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *cells, strict=True)]
    stay = _that_fit(widths, width)
    yield _line(COLUMNS, widths, stay), False
    for row, words in zip(rows, cells, strict=True):
        yield _line(words, widths, stay), row.odd


def _that_fit(widths: Sequence[int], width: int) -> list[int]:
    stay: list[int] = []
    room = width
    for column in LAST_TO_GO:
        room -= widths[column] + 2
        if room < -2 and stay:
            break
        stay.append(column)
    return sorted(stay)


def _line(words: Sequence[str], widths: Sequence[int], stay: Sequence[int]) -> str:
    cells = (words[i].rjust(widths[i]) if i in AT_RIGHT else words[i].ljust(widths[i]) for i in stay)
    return "  ".join(cells).rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    low, high = row.steps
    device = row.devices[0] if len(row.devices) == 1 else f"{len(row.devices)} devices"
    return (
        _short(numbers(row.ranks)),
        row.state,
        _short(f"{row.host} {device}" if row.host else device),
        f"{low:,}" if low == high else f"{low:,}-{high:,}",
        pace_of(row.step_s) if row.step_s else "-",
        binary_size(row.log_bytes),
        row.saved or "-",
    )


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_CELL else f"{text[: LONGEST_CELL - 3]}..."


def _wrapped(text: str, width: int, bad: bool = False) -> Iterator[Line]:
    text = printable(text)
    deeper = "    " if width > 20 else ""
    lines = textwrap.wrap(text, max(width, 10), subsequent_indent=deeper, break_on_hyphens=False)
    yield from ((line, bad) for line in lines)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
