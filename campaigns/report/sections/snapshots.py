"""Counterparts of Figures 8 to 14 of paper 004 (PCcheck), from what `bench/snapshots` has written, where it has.

Nothing is measured here. What a file lacks is a sentence of what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from understudy.campaigns.files import content, short
from understudy.campaigns.report import figures
from understudy.campaigns.report.blocks import NONE, Picture, Section, Table, number

OURS = "understudy"
LARGEST = 64 << 20
"""Bytes of one of its files."""
SLOWDOWN, GOODPUT, SAVING = "slowdown.json", "goodput.json", "snapshots.json"
MADE_BY = {
    SLOWDOWN: "bench/snapshots/training_slowdown.py",
    GOODPUT: "bench/snapshots/goodput.py --output",
    SAVING: "bench/snapshots/persist_time.py",
}
NO_PMEM = "Figure 10 (Intel Optane memory) has no counterpart: there is no such memory here."


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class SlowdownRow(_Read):
    """Of training_slowdown.py: a step with snapshots over one without."""

    way: str
    interval: int
    slowdown: float
    from_interval: int | None = None


class SweepRow(_Read):
    """One thing varied at a time."""

    varied: str
    value: float
    interval: int
    slowdown: float


class Slowdown(_Read):
    title: str
    state_bytes: float
    rows: tuple[SlowdownRow, ...]
    sweep: tuple[SweepRow, ...] = ()


class Formula(_Read):
    goodput: float


class GoodputRow(_Read):
    policy: str
    interval: int
    formula: Formula
    goodput: float


class Goodput(_Read):
    """Steps per second."""

    measured: bool
    origin: str
    ideal: float
    rows: tuple[GoodputRow, ...]


class SavedRow(_Read):
    """Seconds until durable."""

    way: str
    bytes: float
    durable_s: float


class SensitivityRow(_Read):
    way: str
    threads: int
    chunk_mib: float
    gb_per_s: float


class SeveralRow(_Read):
    way: str
    at_a_time: int
    gb_per_s: float


class Saving(_Read):
    title: str
    saved: tuple[SavedRow, ...]
    sensitivity: tuple[SensitivityRow, ...] = ()
    several: tuple[SeveralRow, ...] = ()


@dataclass(frozen=True)
class Parts:
    """What a file gives."""

    tables: Sequence[Table]
    pictures: Sequence[Picture]
    origin: str


def snapshots(folder: Path | None) -> Section:
    """`folder`: with the files of MADE_BY; None where none was given."""
    said = [
        "From what bench/snapshots measures, on one device of a CPU; PCcheck measured A100 GPUs, an SSD, and Optane memory. Its numbers stand beside "
        "ours as shares, and are of other machines and models."
    ]
    missing = []
    tables: list[Table] = []
    pictures: list[Picture] = []
    for name, read in ((SLOWDOWN, _slowdown), (GOODPUT, _goodput), (SAVING, _saving)):
        path = folder / name if folder is not None else None
        try:
            if path is None:
                raise FileNotFoundError
            found = read(content(path, LARGEST))
        except FileNotFoundError:
            missing.append(f"{FIGURES_OF[name]} missing: there is no {name}, which {MADE_BY[name]} writes.")
        except (OSError, ValueError) as problem:
            missing.append(f"{FIGURES_OF[name]} missing: {name} cannot be read: {short(problem)}.")
        else:
            said.append(f"{name}: {found.origin}.")
            tables += found.tables
            pictures += found.pictures
    title = "Snapshots: beside Figures 8 to 14 of paper 004"
    return Section("snapshots", title, tuple(said), tuple(tables), tuple(pictures), (*missing, NO_PMEM))


FIGURES_OF = {
    SLOWDOWN: "Counterparts of Figures 8, 12, 13 and 14 are",
    GOODPUT: "The counterpart of Figure 9 is",
    SAVING: "The counterpart of Figure 11 is",
}


def _slowdown(content: bytes) -> Parts:
    read = Slowdown.model_validate_json(content)
    intervals = sorted({row.interval for row in read.rows})
    by_way: dict[str, dict[int, SlowdownRow]] = {}
    for row in read.rows:
        by_way.setdefault(row.way, {})[row.interval] = row
    rows = tuple(
        (way, *(("~" if r.from_interval else "") + number(r.slowdown, 3) if (r := found.get(i)) else NONE for i in intervals))
        for way, found in by_way.items()
    )  # fmt: skip
    tables = [
        Table(
            "A step with snapshots over one without, by interval (counterpart of Figure 8)",
            ("way", *(f"every {interval}" for interval in intervals)), rows,
            note="~: not measured there, follows from the longest interval that was. PCcheck prints, for OPT-1.3B every 50 steps: itself 1.02, "
            "GPM 1.9, CheckFreq 1.17; for VGG-16, CheckFreq: 57 at every step, 5.74 to 1.19 every 10 to 100; for OPT-2.7B and BLOOM-7B every 10 to "
            "100: Gemini 1.62 to 1.06 and 1.65 to 1.08, itself below 1.05 and 1.02.",
        )
    ]  # fmt: skip
    pictures = [
        Picture(
            "snapshots-slowdown", "Slowdown over the interval (counterpart of Figure 8)", "A line for each way.",
            lambda: figures.lines(
                [("", "steps from one snapshot to the next",
                  {way: sorted((r.interval, r.slowdown) for r in found.values()) for way, found in by_way.items()})],
                "a step, over one without", True,
            ),
        )
    ]  # fmt: skip
    if read.sweep:
        swept = tuple((r.varied, f"{r.value:g}", str(r.interval), number(r.slowdown, 3)) for r in read.sweep)
        tables.append(
            Table(
                f"{OURS}: one thing varied at a time (counterparts of Figures 12, 13 and 14)",
                ("varied", "value", "every", "slowdown"), swept,
                note="PCcheck: more than one snapshot at a time is better for VGG-16, more than 4 are not needed (Figure 12); 3 threads instead of 1 are "
                "1.36, 1.16 and 1.13 times as fast with 1, 2 and 3 snapshots at a time (Figure 13); memory for one state instead of two costs up "
                "to 7 % (Figure 14).",
            )
        )  # fmt: skip
    return Parts(tables, pictures, f"{read.title}; state of {read.state_bytes / 1e6:.0f} MB")


def _goodput(content: bytes) -> Parts:
    read = Goodput.model_validate_json(content)
    policies = tuple(dict.fromkeys(row.policy for row in read.rows))
    best = {
        policy: max((r for r in read.rows if r.policy == policy), key=lambda r: r.formula.goodput)
        for policy in policies
    }
    rows = tuple(
        (policy, str(one.interval), number(one.formula.goodput, 4), number(one.formula.goodput / read.ideal, 3), number(one.goodput, 4))
        for policy, one in best.items()
    )  # fmt: skip
    label = "" if read.measured else "NOT MEASURED: "
    table = Table(
        f"{label}Goodput under preemptions, each at its best interval (counterpart of Figure 9)",
        ("way", "every", "by the paper's formula, steps/s", "of the ideal", "through the events, steps/s"), rows,
        note="PCcheck prints: its best over the others' best up to 1.27 (GPM), 1.25 (CheckFreq), 1.44 (Gemini); at the same interval up to 1.75, 2.86, 2.75.",
    )  # fmt: skip
    series = {
        p: sorted((r.interval, r.formula.goodput) for r in read.rows if r.policy == p) for p in policies
    }
    picture = Picture(
        "snapshots-goodput", f"{label}Goodput over the interval (counterpart of Figure 9)", "A line for each way.",
        lambda: figures.lines([("", "steps from one snapshot to the next", series)], "useful steps per second", True),
    )  # fmt: skip
    return Parts([table], [picture], f"{label}{read.origin}")


def _saving(content: bytes) -> Parts:
    read = Saving.model_validate_json(content)
    sizes = sorted({row.bytes for row in read.saved})
    by_way: dict[str, dict[float, float]] = {}
    for row in read.saved:
        by_way.setdefault(row.way, {})[row.bytes] = row.durable_s
    rows = tuple(
        (way, *(number(1000 * found[s] if s in found else None, 1) for s in sizes))
        for way, found in by_way.items()
    )
    tables = [
        Table(
            "Milliseconds until a state is durable (counterpart of Figure 11)", ("way", *(f"{s / 1e6:.0f} MB" for s in sizes)), rows,
            note="PCcheck is up to 1.9 times as fast as CheckFreq and GPM.",
        )
    ]  # fmt: skip
    series = {
        way: sorted((size / 1e6, seconds) for size, seconds in found.items()) for way, found in by_way.items()
    }
    pictures = [
        Picture(
            "snapshots-saving", "Time until a state is durable (counterpart of Figure 11)", "A line for each way.",
            lambda: figures.lines([("", "MB of state", series)], "seconds until durable", True),
        )
    ]  # fmt: skip
    more = [
        (r.way, "threads, chunk", f"{r.threads}, {r.chunk_mib:g} MiB", number(r.gb_per_s))
        for r in read.sensitivity
    ]
    more += [(r.way, "at a time", str(r.at_a_time), number(r.gb_per_s)) for r in read.several]
    if more:
        title = "Writing alone: threads, chunks, several at a time (beside Figures 12 to 14)"
        tables.append(Table(title, ("way", "varied", "value", "GB/s"), tuple(more), 3, long=True))
    return Parts(tables, pictures, read.title)
