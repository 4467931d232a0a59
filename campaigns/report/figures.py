"""Pictures of a report, as PNG: from plain numbers alone.

Names come from files that anybody may have written: matplotlib would take dollar signs in them for formulas.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DPI = 130
WIDTH = 10.5
"""Inches: with DPI, what 1200 pixels have room for."""
OTHER = "recovered by the proxy"
"""Of a timeline, what is no part: a plan of the proxy, with all of its parts in it."""
COLOURS = {
    "compute": "#9fb8ad", "snapshot": "#f2c14e", "write": "#e08e45", "sync": "#8e9aaf", "detect": "#c8553d",
    "restart": "#7b2d26", "copy": "#4f6d7a", "communicators": "#56a3a6", "replay": "#3d5a98", "redone": "#b8336a",
    OTHER: "#a14a3b", "unaccounted": "#d9d9d9",
}  # fmt: skip
"""Of the parts of time."""
PALETTE = (
    "#4c6a92", "#d08c60", "#6a994e", "#9d4edd", "#bc4749", "#5fa8d3", "#8d6b94", "#b5a642", "#777777", "#2f6f6f",
)  # fmt: skip
LABEL_APART = 12.0
"""Pixels from one name of a point to the next, at matplotlib's own resolution."""
INK, GRID = "#333333", "#dddddd"


@dataclass(frozen=True)
class Point:
    """Of a scatter plot or a row of intervals."""

    label: str
    x: float
    y: float = 0.0
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Strip:
    """A row of a timeline: parts as (name, since, until), seconds."""

    label: str
    parts: Sequence[tuple[str, float, float]]
    faults: Sequence[float] = ()


def plain(text: str, most: int = 60) -> str:
    """As matplotlib prints it unchanged, and not without end."""
    short = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(sign if sign.isprintable() else "�" for sign in short).replace("$", "\\$")


def grouped_bars(
    groups: Sequence[str], bars: Mapping[str, Sequence[float | None]], label: str, line: float | None = None
) -> bytes:
    """A group for each suite, in it a bar for each variant that it has; groups go from top to bottom."""
    pyplot = _pyplot()
    have = [sum(values[at] is not None for values in bars.values()) for at in range(len(groups))]
    height = 0.125 * (sum(have) + 1.1 * len(groups)) + 0.9
    figure, axis = pyplot.subplots(figsize=(WIDTH, max(2.0, height)))
    top, middles = 0.0, []
    handles: dict[str, Any] = {}
    for at, count in enumerate(have):
        middles.append(top + (max(1, count) - 1) / 2)
        for place, (name, values) in enumerate(bars.items()):
            if (value := values[at]) is not None:
                colour = PALETTE[place % len(PALETTE)]
                handles[name] = axis.barh([top], [value], 0.88, color=colour)
                top += 1
        top += 1.1 if count else 2.1
    if line is not None:
        axis.axvline(line, color=INK, linewidth=0.8, linestyle="--")
    axis.set_yticks(middles, [plain(name) for name in groups])
    axis.set_ylim(top - 1.0, -0.8)
    axis.set_xlabel(label)
    axis.grid(axis="x", color=GRID, linewidth=0.6)
    shown = [name for name in bars if name in handles]
    if shown:
        _legend(figure, [handles[name] for name in shown], shown)
    return _png(figure)


def intervals(rows: Sequence[Point], label: str) -> bytes:
    """A dot and its interval for each row, zero marked: grey where zero is inside."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(WIDTH, max(1.6, 0.27 * len(rows) + 0.9)))
    for place, row in enumerate(rows):
        shown = row.low is not None and row.high is not None and not row.low <= 0 <= row.high
        colour = ("#3f7d58" if row.x > 0 else "#b23a48") if shown else "#9a9a9a"
        if row.low is not None and row.high is not None:
            axis.plot(
                [row.low, row.high], [place, place], color=colour, linewidth=2.2, solid_capstyle="round"
            )
        axis.plot([row.x], [place], "o", color=colour, markersize=5)
    axis.axvline(0, color=INK, linewidth=0.8)
    axis.set_yticks(range(len(rows)), [plain(row.label) for row in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlabel(label)
    axis.grid(axis="x", color=GRID, linewidth=0.6)
    return _png(figure)


def scatter(points: Sequence[Point], x: str, y: str) -> bytes:
    """Each point with its name; names that would lie on each other keep apart."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(WIDTH, 4.6))
    axis.plot([p.x for p in points], [p.y for p in points], "o", color=PALETTE[0], markersize=6)
    axis.axhline(0, color=INK, linewidth=0.8)
    axis.axvline(0, color=INK, linewidth=0.8)
    axis.margins(x=0.3, y=0.15)
    axis.set(xlabel=x, ylabel=y)
    axis.grid(color=GRID, linewidth=0.6)
    figure.canvas.draw()  # so that data can be turned into pixels
    lowest = -1e9
    for point in sorted(points, key=lambda one: one.y):
        at = axis.transData.transform((point.x, point.y))[1]
        lowest = max(at, lowest + LABEL_APART)
        axis.annotate(
            plain(point.label, 40),
            (point.x, point.y),
            xytext=(14, (lowest - at) * 72 / figure.dpi - 2.5),
            textcoords="offset points",
            fontsize=7,
            color=INK,
            arrowprops={"arrowstyle": "-", "color": "#bbbbbb", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3},
        )
    return _png(figure)


def stacked(rows: Mapping[str, Mapping[str, float]], label: str) -> bytes:
    """A bar for each row, made of parts."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(WIDTH, max(1.8, 0.36 * len(rows) + 1.2)))
    for name, colour in COLOURS.items():
        values = [max(0.0, parts.get(name, 0.0)) for parts in rows.values()]
        if any(values):
            before = [
                sum(max(0.0, parts.get(one, 0.0)) for one in list(COLOURS)[: list(COLOURS).index(name)])
                for parts in rows.values()
            ]
            axis.barh(range(len(rows)), values, 0.7, left=before, color=colour, label=name)
    axis.set_yticks(range(len(rows)), [plain(name) for name in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlabel(label)
    axis.grid(axis="x", color=GRID, linewidth=0.6)
    handles, names = axis.get_legend_handles_labels()
    if handles:
        _legend(figure, handles, names)
    return _png(figure)


def timelines(columns: Sequence[tuple[str, float, float, Sequence[Strip]]], label: str) -> bytes:
    """A column for each fault, with a title, a window, and a strip for each variant."""
    pyplot = _pyplot()
    rows = max(len(strips) for _, _, _, strips in columns)
    figure, axes = pyplot.subplots(
        1, len(columns), figsize=(WIDTH, 0.34 * rows + 1.5), squeeze=False, layout="constrained"
    )
    used: dict[str, Any] = {}
    for axis, (title, since, until, strips) in zip(axes[0], columns, strict=True):
        for place, strip in enumerate(strips):
            for name in dict.fromkeys(name for name, _, _ in strip.parts):
                ranges = [(a, b - a) for what, a, b in strip.parts if what == name]
                bar = axis.broken_barh(ranges, (place - 0.36, 0.72), color=COLOURS[name], linewidth=0)
                used.setdefault(name, bar)
            for at in strip.faults:
                axis.plot([at, at], [place - 0.48, place + 0.48], color="black", linewidth=1.6)
        first = axis is axes[0][0]
        axis.set_yticks(range(len(strips)), [plain(s.label, 24) if first else "" for s in strips])
        axis.set(xlim=(since, until), ylim=(rows - 0.5, -0.5))
        axis.set_title(plain(title, 44), fontsize=9)
        axis.set_xlabel(label)
    order = [name for name in COLOURS if name in used]
    figure.legend(
        [used[name] for name in order],
        order,
        loc="outside lower center",
        ncols=len(COLOURS),
        frameon=False,
        fontsize=7.5,
        columnspacing=1.2,
        handlelength=1.2,
    )
    return _png(figure)


def lines(
    panels: Sequence[tuple[str, str, Mapping[str, Sequence[tuple[float, float]]]]], y: str, logarithmic: bool
) -> bytes:
    """Beside each other: panels of a title, a label for x, and lines by name."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, len(panels), figsize=(WIDTH, 3.6), squeeze=False, layout="constrained")
    for axis, (title, x, series) in zip(axes[0], panels, strict=True):
        for place, (name, points) in enumerate(series.items()):
            xs, ys = [p[0] for p in points], [p[1] for p in points]
            axis.plot(
                xs, ys, marker="o", markersize=3.5, color=PALETTE[place % len(PALETTE)], label=plain(name)
            )
        axis.set_title(plain(title), fontsize=9)
        axis.set(xlabel=x)
        axis.grid(color=GRID, linewidth=0.6)
        if logarithmic:
            axis.set(xscale="log", yscale="log")
        if len(series) > 1:
            axis.legend(frameon=False, fontsize=7)
    axes[0][0].set_ylabel(y)
    return _png(figure)


def _legend(figure: Any, handles: Sequence[Any], names: Sequence[str]) -> None:
    figure.legend(
        handles,
        [plain(name) for name in names],
        loc="outside lower center",
        ncols=min(6, len(names)),
        frameon=False,
        fontsize=8,
    )


def _pyplot() -> Any:
    import matplotlib  # only here: tables and gates need none of it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {
            "font.size": 8.5,
            "axes.edgecolor": "#999999",
            "axes.labelcolor": INK,
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "figure.constrained_layout.use": True,
        }
    )
    return pyplot


def _png(figure: Any) -> bytes:
    from matplotlib import pyplot

    made = io.BytesIO()
    # The date and version that matplotlib would add make equal results differ.
    figure.savefig(made, format="png", dpi=DPI, metadata={"Software": None})
    pyplot.close(figure)
    return made.getvalue()
