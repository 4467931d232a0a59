"""A log's records and their buffers as a person reads them: whose they are, who made them, what is gone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from understudy.recovery.snapshots.writing.description import (
    Description,
    TensorPlace,
    Undescribed,
    read_description,
)
from understudy.recovery.snapshots.writing.writer import read_description as read_content
from understudy.recovery.text.tables import binary_size, readable

LONGEST_NAME = 120
MOST_HANDLES = 24
"""In one cell."""


@dataclass(frozen=True)
class Buffer:
    """What the records say of one; the worker that wrote them may be hostile."""

    handle: int
    type: str = ""
    """As torch.NAME; empty: no record names it as a tensor."""
    size: tuple[int, ...] | None = None
    bytes: int | None = None
    """Where no record names it as a tensor: so many were allocated or copied."""
    made_by: int | None = None
    made_by_call: str = ""
    freed_by: int | None = None


@dataclass(frozen=True)
class Origin:
    """Where a log begins, and whether all that it made since then is known."""

    first_index: int
    knows_all: bool


@dataclass
class Buffers:
    """The buffers of the rows that are shown, in the order in which they name them."""

    found: dict[int, Buffer] = field(default_factory=dict)

    def note(self, row: Mapping[str, Any]) -> None:
        """A row's frees come before what it names."""
        for handle in row["frees"]:
            if handle in self.found:
                self.found[handle] = replace(self.found[handle], freed_by=row["index"])
        for use in row["buffers"]:
            known = self.found.get(use["handle"])
            if known is None or (not known.type and "type" in use):
                self.found[use["handle"]] = _buffer_of(use)

    def note_freed(self, freed: Mapping[int, int]) -> None:
        """By records behind those that are shown."""
        for handle, record in freed.items():
            self.found[handle] = replace(self.found[handle], freed_by=record)

    def alive(self) -> list[int]:
        """Behind the last of them."""
        return [buffer.handle for buffer in self.found.values() if buffer.freed_by is None]


def _buffer_of(use: Mapping[str, Any]) -> Buffer:
    return Buffer(
        use["handle"], use.get("type", ""),
        tuple(use["size"]) if "size" in use and "dimensions" not in use else None,
        use.get("bytes"), use.get("made_by"), readable(use.get("made_by_call", "")),
    )  # fmt: skip


def sentence(buffer: Buffer, origin: Origin, state: Mapping[int, str]) -> str:
    """`buffer 17 (float32 [4, 8], made by record 211 aten::addmm, gone since record 230)`."""
    parts = [state[buffer.handle]] if buffer.handle in state else []
    if buffer.type:
        parts.append(buffer.type if buffer.size is None else f"{buffer.type} {list(buffer.size)}")
    elif buffer.bytes is not None:
        parts.append(binary_size(buffer.bytes))
    if buffer.made_by is not None:
        parts.append(f"made by record {buffer.made_by} {buffer.made_by_call}".rstrip())
    elif origin.knows_all:
        parts.append(f"older than record {origin.first_index}, where this log begins")
    if buffer.freed_by is not None:
        parts.append(f"gone since record {buffer.freed_by}")
    return f"buffer {buffer.handle} ({', '.join(parts)})"


def state_names(directory: Path) -> dict[int, str]:
    """Buffers of parameters, optimizer state and the like by handle, as the worker last named them.

    It does so with `proxyd --persist`.  Empty if it never has, or if what it says makes no sense.
    """
    for path in _newest_first(directory):
        try:
            return dict(_names(read_description(read_content(path))))
        except Undescribed:
            continue  # it was removed meanwhile, say; the one before is nearly as good
    return {}


def _newest_first(directory: Path) -> list[Path]:
    found = []
    for path in directory.glob("client-*"):
        serial = path.name.removeprefix("client-")
        if serial.isascii() and serial.isdigit() and len(serial) < 20:
            found.append((int(serial), path))
    return [path for _, path in sorted(found, reverse=True)]


def _names(described: Description) -> Iterator[tuple[int, str]]:
    """A buffer with two names (tied weights) has both."""
    names: dict[int, list[str]] = {}
    for handle, name in _each(described):
        if handle:
            names.setdefault(handle, []).append(name)
    for handle, all_names in names.items():
        yield handle, readable(" = ".join(all_names[:3]))[:LONGEST_NAME]


def _each(described: Description) -> Iterator[tuple[int, str]]:
    for module in described.modules:
        for name, value in module.state.items():
            if isinstance(value, TensorPlace):
                yield value.handle, f"{module.class_name} {name}"
    for optimizer in described.optimizers:
        for number, values in optimizer.state.items():
            parameter = _parameter(optimizer.names, number)
            for key, value in values.items():
                if isinstance(value, TensorPlace):
                    yield value.handle, f"{optimizer.class_name} {key} of {parameter}"


def _parameter(names: Sequence[tuple[int, str] | None], number: int) -> str:
    known = names[number] if 0 <= number < len(names) else None
    return known[1] if known is not None else f"parameter {number}"


def log_table(rows: Sequence[Mapping[str, Any]], rank: int, tail_index: int, cursor_index: int) -> Table:
    """Records of a log; those the device server has run carry a mark.

    `names` are the buffers that a record names and, behind an arrow, those that it makes; of a record without
    buffers what else it is about.
    """
    table = Table(title=f"rank {rank}: {tail_index} records appended, {cursor_index} run")
    for heading in ("record", "run", "kind", "call", "bytes", "names", "frees"):
        table.add_column(heading)
    for row in rows:
        table.add_row(
            str(row["index"]), "✓" if row["done"] else "", row["kind"],
            Text(readable(row.get("operator", ""))), str(row["bytes"]), _subject(row), _some(row["frees"]),
        )  # fmt: skip
    return table


def _subject(row: Mapping[str, Any]) -> str:
    named = [use["handle"] for use in row["buffers"] if use.get("made_by") != row["index"]]
    made = [use["handle"] for use in row["buffers"] if use.get("made_by") == row["index"]]
    words = [_some(named, row.get("buffers_left_out", 0))] if named else []
    if made:
        words.append(f"→ {_some(made)}")
    if row.get("unreadable"):
        words.append("?")
    if not words and row["kind"] not in ("operator", "operator-sync", "free"):
        words.append(str(row["aux"]))
    return " ".join(words)


def _some(handles: Sequence[int], left_out: int = 0) -> str:
    left_out += max(0, len(handles) - MOST_HANDLES)
    words = [str(handle) for handle in handles[:MOST_HANDLES]]
    return " ".join([*words, f"and {left_out} more"] if left_out else words)


def lines(buffers: Iterable[Buffer], origin: Origin, state: Mapping[int, str], most: int) -> list[str]:
    """One sentence each, of the first `most`."""
    every = list(buffers)
    told = [sentence(buffer, origin, state) for buffer in every[:most]]
    if len(every) > most:
        told.append(f"and {len(every) - most} more buffers: --json names them with each record")
    return told
