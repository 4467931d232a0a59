"""What `recoveryctl` prints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from understudy.recovery.faults import FAULTS
from understudy.recovery.report import account_of_adoption, account_of_different


def make_console() -> Console:
    """As wide as the terminal; where there is none (a pipe, a file) rows stay whole for grep."""
    made = Console()
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = 240
    return made


def binary_size(number: int) -> str:
    """Memory as a person reads it: 1.5 MiB; storage is told in decimal units (persistence/tuner.py: size)."""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{number} B" if unit == "B" else f"{value:.1f} {unit}"


def status_tables(status: Any) -> RenderableType:
    """Devices above, ranks below."""
    node = status.node
    devices = Table(title=f"proxyd {node.pid}, PyTorch {node.torch_version}, {node.spares} warm spare(s)")
    for heading in ("device", "cuda", "state", "server", "job", "rank"):
        devices.add_column(heading)
    for device in node.devices:
        devices.add_row(
            device.spec, str(device.index), device.state, str(device.server_pid or "–"),
            device.job[:8] or "–", "–" if device.rank < 0 else str(device.rank),
        )  # fmt: skip
    parts: list[RenderableType] = [devices, _ranks(status.ranks) if status.ranks else Text("no sessions")]
    parts += [Text(f"{device.spec}: {device.note}") for device in node.devices if device.note]
    parts += [Text(f"rank {rank.rank}: {rank.note}") for rank in status.ranks if rank.note]
    choices = {rank.job: rank.persist_choice for rank in status.ranks if rank.persist_choice}
    parts += [Text(f"job {job[:8]}: snapshots go to storage {choice}") for job, choice in choices.items()]
    parts += [
        Text(f"rank {rank.rank}: migratable: {rank.migratable}") for rank in status.ranks if rank.migratable
    ]
    different = {rank.job: rank.replies_different for rank in status.ranks if rank.replies_different}
    parts += [Text(f"job {job[:8]}: {account_of_different(count)}") for job, count in different.items()]
    parts += [
        Text(f"job {job[:8]}: {account}")
        for job, account in {rank.job: _account_of_replay(rank) for rank in status.ranks}.items()
        if account
    ]
    leaders = {rank.job: rank.leader for rank in status.ranks if rank.leader}
    parts += [Text(f"job {job[:8]}: host {host} leads it") for job, host in leaders.items()]
    heirs = {rank.job: rank.heir for rank in status.ranks if rank.heir}
    parts += [
        Text(f"job {job[:8]}: host {host} leads it on if this one is lost") for job, host in heirs.items()
    ]
    parts += [_adopted(adoption) for adoption in status.adoptions]
    if node.membership.trouble:
        parts.append(Text(account_of_trouble(node.membership)))
    if node.membership.note:
        parts.append(Text(node.membership.note))
    return Group(*parts)


def _account_of_replay(rank: Any) -> str:
    """Why its job's log may not be relied on."""
    if rank.not_replayable:
        return f"replay would give other numbers: {rank.not_replayable}"
    return f"not validated: {rank.not_validated}" if rank.not_validated else ""


def account_of_trouble(membership: Any) -> str:
    """Why a host is not registered, in one sentence."""
    since = moment(membership.trouble_since_ms)
    return f"not registered with the cluster {membership.cluster} since {since}: {membership.trouble}"


def moment(ms: int) -> str:
    """Milliseconds since 1970 as a person reads them."""
    return datetime.fromtimestamp(ms / 1000).astimezone().isoformat(" ", "seconds")


def _adopted(adoption: Any) -> Text:
    return Text(f"job {adoption.job[:8]}, {moment(adoption.at_ms)}: {account_of_adoption(adoption)}")


def _ranks(ranks: Sequence[Any]) -> Table:
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
    """The same for programs, with the names of control.proto."""

    def plain(message: Any) -> dict[str, Any]:
        return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}

    node = plain(status.node)
    node["devices"] = [plain(device) for device in status.node.devices]
    node["capability"] = plain(status.node.capability)
    node["membership"] = plain(status.node.membership)
    return {
        "node": node,
        "ranks": [plain(rank) for rank in status.ranks],
        "adoptions": [plain(adoption) for adoption in status.adoptions],
    }


def log_table(rows: Sequence[dict[str, Any]], rank: int, tail_index: int, cursor_index: int) -> Table:
    """Records of a log; those the device server has run carry a mark."""
    table = Table(title=f"rank {rank}: {tail_index} records appended, {cursor_index} run")
    for heading in ("record", "run", "kind", "call", "bytes", "names", "frees"):
        table.add_column(heading)
    for row in rows:
        table.add_row(
            str(row["index"]), "✓" if row["done"] else "", row["kind"], str(row.get("operator", "")),
            str(row["bytes"]), str(row["aux"]), " ".join(map(str, row["frees"])),
        )  # fmt: skip
    return table


def fault_table() -> Table:
    """Every fault that can be injected."""
    table = Table(title="faults for --drill 'FAULT rank=R step=S call=C' and recoveryctl drill FAULT")
    for heading in ("no.", "fault", "what happens", "noticed by", "then"):
        table.add_column(heading)
    for fault in FAULTS:
        table.add_row(str(fault.number), fault.name, fault.does, fault.noticed_by, fault.then)
    return table
