"""What training_slowdown.py shows of its rows: tables, aims and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from slowdown_measure import OURS, OURS_NATIVE
from slowdown_plan import Row, by_way

AIMS = {10: 1.03, 1: 1.10}
"""Interval -> slowdown of ours, at most."""


def slowdown_table(rows: Sequence[Row]) -> Table:
    """A way per line, an interval per column."""
    ways = by_way(rows)
    intervals = sorted({row["interval"] for row in rows})
    shown = Table(title="a step with over a step without snapshots, stalls included")
    shown.add_column("way")
    for interval in intervals:
        shown.add_column(f"every\n{interval}", justify="right")
    for name in ("CPU\nat 10", "durable\nat 1", "ms until\ndurable"):
        shown.add_column(name, justify="right")
    for way, found in ways.items():
        cells = [
            f"{'~' if found[interval]['from_interval'] else ''}{found[interval]['slowdown']:.3f}"
            if interval in found
            else ""
            for interval in intervals
        ]
        first, ten = found[min(found)], found.get(10, found[max(found)])
        durable = f"{1000 * ten['durable_s']:.0f}" if ten["durable_s"] else "-"
        cells += [f"{ten['processor']:.2f}", f"{first['durable']}/{first['due']}", durable]
        shown.add_row(way, *cells)
    shown.caption = (
        "medians; ~: not measured at this interval, follows from the longest that was; CPU: processors' "
        "time, with over without, at 10; durable: how many of those that were due, at 1; ms: at 10"
    )
    return shown


def sweep_table(rows: Sequence[Row]) -> Table:
    """What was varied, and the slowdown."""
    shown = Table(title="understudy, one thing varied at a time")
    for name in ("varied", "", "every", "slowdown", "durable of due", "durable after, ms"):
        shown.add_column(name, justify="right")
    for row in rows:
        durable = f"{1000 * row['durable_s']:.0f}" if row["durable_s"] else "-"
        shown.add_row(
            row["varied"], str(row["value"]), str(row["interval"]), f"{row['slowdown']:.3f}",
            f"{row['durable']} of {row['due']}", durable,
        )  # fmt: skip
    return shown


def footprint_table(footprint: Row, state_bytes: int) -> Table:
    """Against PCcheck's Table 1: host memory m to 2 m, storage (N + 1) m."""
    slots = footprint["in_flight"] + 1
    shown = Table(
        title=f"understudy at every step, N = {slots - 1}: peaks, in states of {state_bytes / 1e6:.0f} MB"
    )
    for name in ("what", "MB", "m", "Table 1"):
        shown.add_column(name, justify="right")
    paper = {"snapshot_bytes": "m to 2 m, all", "stored_bytes": f"{slots} m"}
    names = {
        "snapshot_bytes": "snapshots in host memory",
        "writer_bytes": "the writer's own memory",
        "shared_bytes": "all shared memory (logs, too)",
        "stored_bytes": "stores",
        "written_bytes": "one snapshot",
    }
    for field, name in names.items():
        count = footprint[field]
        shown.add_row(name, f"{count / 1e6:.1f}", f"{count / state_bytes:.2f}", paper.get(field, ""))
    return shown


def verdicts(rows: Sequence[Row]) -> list[Row]:
    """Ours against its aims, where it was measured."""
    found = by_way(rows).get(OURS, {})
    return [
        {
            "what": f"{OURS}, every {interval}", "value": found[interval]["slowdown"], "aim": aim,
            "met": found[interval]["slowdown"] <= aim,
        }
        for interval, aim in AIMS.items() if interval in found
    ]  # fmt: skip


def verdict_table(rows: Sequence[Row]) -> Table:
    """Aims, and whether they are met."""
    shown = Table(title="aims")
    for name in ("what", "slowdown", "aim", ""):
        shown.add_column(name)
    for row in rows:
        met = "met" if row["met"] else "[bold red]missed[/]"
        shown.add_row(row["what"], f"{row['value']:.3f}", f"at most {row['aim']:.2f}", met)
    return shown


def draw(results: Row, folder: Path, stem: str) -> list[Path]:
    """Slowdown over the interval (Figure 8), and over what was varied (Figures 12 to 14), as PNG."""
    import matplotlib  # only here: the tables need none of it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5))
    for way, found in by_way(results["rows"]).items():
        points = [(interval, found[interval]["slowdown"]) for interval in sorted(found)]
        line = "-" if way == OURS else "--" if way == OURS_NATIVE else ":"
        axis.plot(*zip(*points, strict=True), line, marker=".", label=way)
    axis.axhline(1, color="black", linewidth=0.5)
    axis.set(
        xscale="log", yscale="log", xlabel="steps from one snapshot to the next",
        ylabel="a step, over one without snapshots", title=results["title"],
    )  # fmt: skip
    axis.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.02, 0.5))
    written = [_save(figure, folder / f"{stem}.png")]
    names = list(dict.fromkeys(row["varied"] for row in results["sweep"]))
    if names:
        figure, axes = pyplot.subplots(1, len(names), figsize=(3 * len(names), 3.5), sharey=True)
        for name, axis in zip(names, [axes] if len(names) == 1 else axes, strict=True):
            points = [(row["value"], row["slowdown"]) for row in results["sweep"] if row["varied"] == name]
            axis.plot(*zip(*sorted(points), strict=True), marker="o")
            axis.set(xlabel=name)
        figure.suptitle("understudy: a step, over one without snapshots")
        written.append(_save(figure, folder / f"{stem}_sensitivity.png"))
    pyplot.close("all")
    return written


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, format="png", dpi=120, bbox_inches="tight", metadata={"Software": None})
    return path
