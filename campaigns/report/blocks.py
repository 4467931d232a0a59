"""What a report is made of, whatever it is printed as: sections of sentences, tables and pictures. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

NONE = "–"


@dataclass(frozen=True)
class Table:
    """Cells as people read them. `words`: the leading columns that are no numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    note: str = ""
    failed: frozenset[int] = frozenset()
    """Rows that belong to a failed suite."""
    long: bool = False
    """Whether it is folded away where that can be had."""


@dataclass(frozen=True)
class Picture:
    """`draw` gives a PNG. `says`: what is to be seen, for those who do not see it."""

    name: str
    title: str
    says: str
    draw: Callable[[], bytes] = field(repr=False)


@dataclass(frozen=True)
class Section:
    """`anchor`: its name in links."""

    anchor: str
    title: str
    sentences: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    lists: tuple[str, ...] = ()
    """Sentences of equal standing."""


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A dash where there is none."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:.{digits}f}{' ' + unit if unit else ''}"


def signed(value: float | None, digits: int = 2, unit: str = "") -> str:
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:+.{digits}f}{' ' + unit if unit else ''}"


def counted(count: int, what: str, many: str = "") -> str:
    return f"{count} {what if count == 1 else many or what + 's'}"


def as_markdown(sections: Sequence[Section]) -> str:
    """Without pictures. What stands in cells and sentences is text: no markup of it counts."""
    lines: list[str] = []
    for section in sections:
        lines += [f"## {_text(section.title)}", ""]
        for sentence in section.sentences:
            lines += [_text(sentence), ""]
        if section.lists:
            lines += [*(f"- {_text(sentence)}" for sentence in section.lists), ""]
        for table in section.tables:
            lines += [*_table(table), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(table: Table) -> list[str]:
    lines = [f"### {_text(table.title)}", ""] if table.title else []
    if not table.rows:
        return [*lines, "Nothing: no suite that it could be made of counts."]
    rules = ["---"] * table.words + ["---:"] * (len(table.columns) - table.words)
    lines += [_row(table.columns), "| " + " | ".join(rules) + " |"]
    for place, row in enumerate(table.rows):
        cells = tuple(
            f"{cell} (failed)" if place in table.failed and not at else cell for at, cell in enumerate(row)
        )
        lines.append(_row(cells))
    if table.note:
        lines += ["", _text(table.note)]
    return lines


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_text(cell).replace("|", "\\|") for cell in cells) + " |"


def _text(words: str) -> str:
    """On one line, with nothing in it that Markdown or HTML would take for markup."""
    one_line = html.escape(" ".join(words.split()), quote=False)
    return "".join(f"\\{sign}" if sign in "\\`*_[]" else sign for sign in one_line)
