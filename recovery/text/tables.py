"""What `recoveryctl` prints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from understudy.recovery.drills.fault_table import FAULTS
from understudy.recovery.history.report import recovery_entry

LONGEST_TEXT = 400
"""Letters of one text that anybody may have written."""


def make_console() -> Console:
    """As wide as the terminal; where there is none (a pipe, a file) rows stay whole for grep."""
    made = Console()
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = 240
    return made


def binary_size(number: int) -> str:
    """Memory as a person reads it: 1.5 MiB; storage is told in decimal units (tuner.py: size)."""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{number} B" if unit == "B" else f"{value:.1f} {unit}"


def account_of_trouble(membership: Any) -> str:
    """Why a host is not registered, in one sentence."""
    since = moment(membership.trouble_since_ms)
    return f"not registered with the cluster {membership.cluster} since {since}: {membership.trouble}"


def moment(ms: int) -> str:
    """Milliseconds since 1970 as a person reads them."""
    return datetime.fromtimestamp(ms / 1000).astimezone().isoformat(" ", "seconds")


def duration(seconds: float) -> str:
    """As a person reads it: 0.77 s, 12.3 s, 4m 05s, 3h 12m, 2d 07h."""
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, of_hour = divmod(minutes, 60)
    days, of_day = divmod(hours, 24)
    if days:
        return f"{days}d {of_day:02d}h"
    return f"{hours}h {of_hour:02d}m" if hours else f"{minutes}m {rest:02d}s"


def readable(text: object) -> str:
    """In one line, and without what would control a terminal."""
    words = " ".join(text.split()) if isinstance(text, str) else ""
    return printable(words[:LONGEST_TEXT])


def printable(text: str) -> str:
    """Without what would control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def ranks_table(ranks: Sequence[Any]) -> Table:
    """Every number of every rank."""
    table = Table()
    headings = (
        "job", "rank", "state", "worker", "server", "step", "phase", "log", "lag", "commit", "floor", "gen.",
        "live", "undo", "shadow", "snapshot", "on disk", "its log", "mirrored", "recoveries",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading)
    for rank in ranks:
        table.add_row(
            rank.job[:8], str(rank.rank), f"{rank.state} at {rank.host}" if rank.host else rank.state,
            str(rank.worker_pid), str(rank.server_pid),
            str(rank.step), rank.phase, binary_size(rank.log_bytes) + (" full" if rank.backpressure else ""),
            str(rank.cursor_lag), str(rank.commit), str(rank.floor_commit), str(rank.generation),
            f"{binary_size(rank.live_bytes)} in {rank.live_buffers}",
            binary_size(rank.undo_bytes), binary_size(rank.shadow_bytes),
            f"{binary_size(rank.snapshot_bytes)} at {rank.snapshot_commit}" if rank.snapshot_bytes else "–",
            f"step {rank.persisted_step}" if rank.persisted_step else "–",
            f"step {rank.logged_step}" if rank.logged_step else "–",
            f"step {rank.mirrored_step}" if rank.mirrored_step else "–",
            str(rank.recoveries),
        )  # fmt: skip
    return table


def status_json(status: Any) -> dict[str, Any]:
    """The same for programs, with the names of protos/status.proto."""

    def plain(message: Any) -> dict[str, Any]:
        return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}

    node = plain(status.node)
    node["devices"] = [plain(device) for device in status.node.devices]
    node["capability"] = plain(status.node.capability)
    node["membership"] = plain(status.node.membership)
    return {
        "node": node,
        "ranks": [plain(rank) for rank in status.ranks],
        "jobs": [_of_job(job) for job in status.jobs],
        "adoptions": [plain(adoption) for adoption in status.adoptions],
    }


def _of_job(job: Any) -> dict[str, Any]:
    names = (
        "name",
        "faults",
        "given_up",
        "moves",
        "validations",
        "waits_for",
        "stage",
        "stage_s",
        "under_way_s",
    )
    told = {name: getattr(job, name) for name in names}
    return told | {"last": recovery_entry(job.last) if job.HasField("last") else None}


def fault_table() -> Table:
    """Every fault that can be injected."""
    table = Table(title="faults for --drill 'FAULT rank=R step=S call=C' and recoveryctl drill FAULT")
    for heading in ("no.", "fault", "what happens", "noticed by", "then"):
        table.add_column(heading)
    for fault in FAULTS:
        table.add_row(str(fault.number), fault.name, fault.does, fault.noticed_by, fault.then)
    return table
