"""What persist_time.py shows of its rows: tables, aims and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from persist_measure import OURS, OURS_COPY, RAW, RAW_COMMITTED, Row, ratio
from rich.table import Table

AIM_OF_RAW, AIM_OF_BASELINE, AIM_OF_READ = 0.9, 1.5, 0.8


def megabytes(row: Row) -> int:
    return round(row["bytes"] / 1e6)


def sizes_of(rows: Sequence[Row]) -> list[int]:
    return sorted({row["bytes"] for row in rows})


def named(rows: Sequence[Row], name: str, count: int) -> Row:
    return next(row for row in rows if row["way"] == name and row["bytes"] == count)


def times_table(rows: Sequence[Row], title: str, blocked: bool) -> Table:
    """A way per line, a size per column."""
    counts = sizes_of(rows)
    shown = Table(title=title)
    shown.add_column("way")
    for count in counts:
        shown.add_column(f"{count / 1e6:.0f} MB\nms", justify="right")
    shown.add_column("GB/s", justify="right")
    shown.add_column(f"x {RAW}", justify="right")
    if blocked:
        shown.add_column("blocked\nms", justify="right")
    for name in dict.fromkeys(row["way"] for row in rows):
        found = {row["bytes"]: row for row in rows if row["way"] == name}
        last = found[max(found)]
        cells = [f"{1000 * found[count]['durable_s']:.1f}" if count in found else "" for count in counts]
        cells += [f"{last['gb_per_s']:.2f}", f"{ratio(rows, name, RAW, max(found)):.2f}"]
        if blocked:
            cells.append(f"{1000 * last['blocked_s']:.0f}")
        shown.add_row(name, *cells)
    shown.caption = "medians; the columns on the right are those of the largest size"
    return shown


def sensitivity_table(rows: Sequence[Row]) -> Table:
    chunks = sorted({row["chunk_mib"] for row in rows})
    shown = Table(
        title=f"{megabytes(rows[0])} MB: GB/s, and % of the raw loop with the same block and threads"
    )
    shown.add_column("threads", justify="right")
    for chunk in chunks:
        shown.add_column(f"{chunk} MiB", justify="right")
    for threads in sorted({row["threads"] for row in rows}):
        cells = []
        for chunk in chunks:
            here = [row for row in rows if (row["chunk_mib"], row["threads"]) == (chunk, threads)]
            share = 1 / ratio(here, OURS, RAW, here[0]["bytes"])
            cells.append(f"{named(here, OURS, here[0]['bytes'])['gb_per_s']:.2f} {100 * share:3.0f}%")
        shown.add_row(str(threads), *cells)
    return shown


def several_table(rows: Sequence[Row]) -> Table:
    shown = Table(title="N snapshots at a time")
    for name in ("N", "all durable, ms", "GB/s", "% of raw, as many bytes"):
        shown.add_column(name, justify="right")
    for row in sorted((row for row in rows if row["way"] == OURS), key=lambda row: row["at_a_time"]):
        share = 1 / ratio(rows, OURS, RAW, row["bytes"])
        shown.add_row(
            str(row["at_a_time"]),
            f"{1000 * row['durable_s']:.1f}",
            f"{row['gb_per_s']:.2f}",
            f"{100 * share:.0f}",
        )
    return shown


def footprint_table(rows: Sequence[Row]) -> Table:
    shown = Table(title=f"memory and storage, in states of {rows[0]['state'] / 1e6:.0f} MB")
    for name in ("way", "host memory", "storage", "Table 1: memory", "storage"):
        shown.add_column(name)
    for row in rows:
        own = [f"{row[what] / row['state']:.2f} m" for what in ("dram", "storage")]
        own[0] += " (measured)" if row["measured"] else ""
        shown.add_row(row["way"], *own, *(row["paper"] or ("", "")))
    return shown


def verdicts(saved: Sequence[Row], restored: Sequence[Row]) -> list[Row]:
    """Each aim at the largest size, and the first also at the others."""
    found = []
    counts = sizes_of(saved)
    for count in counts:
        found.append(_verdict("write, share of raw", count, 1 / ratio(saved, OURS, RAW, count), AIM_OF_RAW))
    largest = counts[-1]
    others = [
        row
        for row in saved
        if row["bytes"] == largest and row["durable"] and not row["way"].startswith((RAW, OURS))
    ]
    fastest = min(others, key=lambda row: row["durable_s"])["way"]
    for count in counts:
        share = 1 / ratio(saved, OURS, RAW_COMMITTED, count)
        found.append(_verdict("write, share of raw with as many syncs", count, share, AIM_OF_RAW))
    for ours in (OURS_COPY, OURS):
        times = ratio(saved, fastest, ours, largest)
        found.append(_verdict(f"{ours}: times as fast as {fastest}", largest, times, AIM_OF_BASELINE))
    for count in counts:
        share = 1 / ratio(restored, OURS, RAW, count)
        found.append(_verdict("read and checked, share of raw", count, share, AIM_OF_READ))
    return found


def _verdict(what: str, count: int, value: float, aim: float) -> Row:
    return {"what": what, "bytes": count, "value": value, "aim": aim, "met": value >= aim}


def verdict_table(rows: Sequence[Row]) -> Table:
    shown = Table(title="aims")
    for name in ("what", "MB", "measured", "aim", ""):
        shown.add_column(name)
    for row in rows:
        met = "met" if row["met"] else "[bold red]missed[/]"
        shown.add_row(
            row["what"], str(megabytes(row)), f"{row['value']:.2f}", f"at least {row['aim']:.2f}", met
        )
    return shown


def draw(results: Row, folder: Path, stem: str) -> list[Path]:
    """Time to persist and to restore over size, and the sweep, as PNG."""
    import matplotlib  # only here: the tables need none of it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    for what, label in (("saved", "until durable"), ("restored", "until read back")):
        figure, axis = pyplot.subplots(figsize=(8, 5))
        rows = results[what]
        for name in dict.fromkeys(row["way"] for row in rows):
            points = sorted((row["bytes"] / 1e6, row["durable_s"]) for row in rows if row["way"] == name)
            line = "-" if name in (OURS, RAW) else "--" if name.startswith(OURS) else ":"
            axis.plot(*zip(*points, strict=True), line, marker=".", label=name)
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="MB of state",
            ylabel=f"seconds {label}",
            title=results["title"],
        )
        axis.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.02, 0.5))
        written.append(_save(figure, folder / f"{stem}_{what}.png"))
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for threads in sorted({row["threads"] for row in results["sensitivity"]}):
        for way, line in ((OURS, "-"), (RAW, ":")):
            points = sorted(
                (row["chunk_mib"], row["gb_per_s"])
                for row in results["sensitivity"] if (row["way"], row["threads"]) == (way, threads)
            )  # fmt: skip
            axes[0].plot(*zip(*points, strict=True), line, marker=".", label=f"{way}, {threads} threads")
    axes[0].set(xlabel="MiB per chunk", ylabel="GB/s", title="chunks and threads")
    axes[0].legend(fontsize="x-small")
    for way in (OURS, RAW):
        rows = [row for row in results["several"] if row["way"] == way]
        axes[1].plot(
            [row["at_a_time"] for row in rows], [row["gb_per_s"] for row in rows], marker="o", label=way
        )
    axes[1].set(xlabel="snapshots at a time", ylabel="GB/s", title="N at a time", ylim=(0, None))
    axes[1].legend(fontsize="x-small")
    written.append(_save(figure, folder / f"{stem}_sensitivity.png"))
    pyplot.close("all")
    return written


def _save(figure: object, path: Path) -> Path:
    figure.savefig(path, format="png", dpi=120, bbox_inches="tight", metadata={"Software": None})  # type: ignore[attr-defined]
    return path
