"""Where the seconds went: wall time by part (paper 002, eq. 7), and what happened around each fault."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from understudy.campaigns.planning.variants import REFERENCE
from understudy.campaigns.report import figures
from understudy.campaigns.report.blocks import Picture, Section, Table, number
from understudy.campaigns.report.figures import Strip
from understudy.campaigns.report.matrix import BASELINE, Matrix
from understudy.campaigns.report.results import PlannedSuite
from understudy.campaigns.results.records import PARTS, Run

REST = "unaccounted"
OF_A_FAULT = frozenset(PARTS[PARTS.index("detect") :])
BEFORE_S, BEHIND_S, LONGEST_S = 0.5, 0.5, 120.0
"""Of a timeline, around its fault."""
MOST_FAULTS = 4
"""Columns of a picture."""
SMALLEST = 1 / 2000
"""Of a window: shorter gaps between parts of the same name are not to be seen."""


def split(matrix: Matrix) -> Section:
    """Means of the suites that count."""
    rows = {name: parts for name in _names(matrix) if (parts := _mean_parts(matrix, name))}
    shown = [part for part in (*PARTS, REST) if any(parts.get(part) for parts in rows.values())]
    cells = []
    for name, parts in rows.items():
        whole = sum(parts.values())
        cells.append(
            (
                name, number(whole), *(number(parts.get(part, 0.0), 2) for part in shown),
                number(100 * parts.get(REST, 0.0) / whole if whole else None, 1),
            )
        )  # fmt: skip
    table = Table(
        "Seconds of a run by part", ("variant", "all", *shown, "unaccounted, %"), tuple(cells),
        note="From the first step's begin to the last one's end; means over seeds, then over the suites that count and that the variant has. "
        "A suite fails if more than 5 % of a run, from its start to its end, is unaccounted.",
    )  # fmt: skip
    long = []
    for suite in matrix.disturbed:
        for variant in matrix.variants(suite.name):
            if parts := _parts(matrix.done(suite.name, variant).values()):
                long.append(
                    (
                        suite.name,
                        variant,
                        number(sum(parts.values())),
                        *(number(parts.get(p, 0.0)) for p in shown),
                    )
                )
    each = Table(
        "Seconds by part, each suite", ("suite", "variant", "all", *shown), tuple(long), 2, long=True
    )
    picture = Picture(
        "split", "Wall time by part", "A bar for each variant, made of its parts.",
        lambda: figures.stacked(rows, "seconds a run"),
    )  # fmt: skip
    said = (
        "Every second is one of: compute, snapshot, write, sync (waiting for other ranks), detect, restart, copy, communicators, replay, redone "
        "(steps done again); what is left over is unaccounted.",
    )
    return Section("split", "Where the time went", said, (table, each), (picture,) if rows else ())


def timelines(matrix: Matrix) -> Section:
    """A picture for each suite with faults."""
    pictures: list[Picture] = []
    for suite in matrix.disturbed:
        found = columns(matrix, suite)
        if found is not None:
            seed, drawn = found
            pictures.append(
                Picture(
                    f"timeline-{len(pictures) + 1}", f"{suite.name}, seed {seed}: around its faults",
                    "A column for each fault, a strip for each variant: what it did, by part; a black mark is a fault.",
                    lambda drawn=drawn: figures.timelines(drawn, "seconds since the fault"),  # type: ignore[misc]
                )
            )  # fmt: skip
    said = (
        f"One seed of each suite; at most {MOST_FAULTS} faults. Zero is when the fault fired; each strip ends where the longest way back has ended.",
    )
    return Section("timelines", "Around each fault", said, pictures=tuple(pictures))


Column = tuple[str, float, float, Sequence[Strip]]


def columns(matrix: Matrix, suite: PlannedSuite) -> tuple[int, list[Column]] | None:
    """For each step with faults: title, window, strips. Of the seed that most variants have; None without faults."""
    variants = matrix.variants(suite.name)
    done = {variant: matrix.done(suite.name, variant) for variant in variants}
    seeds = [seed for runs in done.values() for seed, run in runs.items() if _steps(run)]
    if not seeds:
        return None
    seed = max(sorted(set(seeds)), key=seeds.count)
    runs = {variant: runs[seed] for variant, runs in done.items() if seed in runs}
    steps = sorted({step for run in runs.values() for step in _steps(run)})[:MOST_FAULTS]
    found: list[Column] = []
    for step in steps:
        here = {variant: run for variant, run in runs.items() if step in _steps(run)}
        kinds = dict.fromkeys(
            f"{fault.kind} of rank {fault.rank}"
            for run in here.values()
            for fault in run.faults
            if fault.step == step
        )
        longest = max((_back(run, step) for run in here.values()), default=0.0)
        since, until = -BEFORE_S, min(LONGEST_S, longest + BEHIND_S)
        strips = [
            strip(variant, here[variant], step, since, until) if variant in here else Strip(variant, ())
            for variant in runs
        ]
        found.append((f"step {step}: {', '.join(kinds)}", since, until, strips))
    return seed, found


def strip(label: str, run: Run, step: int, since: float, until: float) -> Strip:
    """A run's parts inside a window around its fault, shifted; neighbours of one name are one."""
    zero = _steps(run)[step]
    joined: list[tuple[str, float, float]] = []
    least = (until - since) * SMALLEST
    for span in sorted(run.timeline, key=lambda one: one.since):
        begin, end = max(span.since - zero, since), min(span.until - zero, until)
        if begin < end:
            what = span.what if span.what in PARTS else figures.OTHER
            if joined and joined[-1][0] == what and begin - joined[-1][2] < least:
                joined[-1] = (what, joined[-1][1], max(end, joined[-1][2]))
            else:
                joined.append((what, begin, end))
    marks = [fault.at - zero for fault in run.faults if fault.fired and fault.at is not None]
    return Strip(label, joined, [mark for mark in marks if since <= mark <= until])


def _steps(run: Run) -> dict[int, float]:
    """Steps with a fault that fired, and when the first of them came.

    Where nobody wrote down when, as under the proxy, it is when its recovery began, if there are as many.
    """
    found: dict[int, float] = {}
    for fault in run.faults:
        if fault.fired and fault.at is not None and math.isfinite(fault.at):
            found[fault.step] = min(fault.at, found.get(fault.step, fault.at))
    fired = sorted({fault.step for fault in run.faults if fault.fired})
    if found or not fired:
        return found
    began: list[tuple[float, float]] = []
    plans = (one for one in run.timeline if one.what not in PARTS and 0 <= one.since <= run.wall)
    for span in sorted(plans, key=lambda one: one.since):
        if began and span.since <= began[-1][1]:  # ranks that were recovered together
            began[-1] = (began[-1][0], max(began[-1][1], span.until))
        else:
            began.append((span.since, span.until))
    return dict(zip(fired, (since for since, _ in began), strict=True)) if len(began) == len(fired) else {}


def _back(run: Run, step: int) -> float:
    """Seconds from the fault until the last of its parts that ends before the next fault."""
    steps = _steps(run)
    zero = steps[step]
    later = min((at for at in steps.values() if at > zero), default=math.inf)
    ends = [
        min(span.until, later) - zero
        for span in run.timeline
        if (span.what in OF_A_FAULT or span.what not in PARTS) and zero <= span.until and span.since < later
    ]
    return max(ends, default=0.0)


def _names(matrix: Matrix) -> list[str]:
    calm = [f"{name}, undisturbed" for name in (REFERENCE, BASELINE)]
    return [*calm, *matrix.results.variants]


def _mean_parts(matrix: Matrix, name: str) -> dict[str, float]:
    """Over the suites that count; of a name of _names()."""
    variant, _, calm = name.partition(", ")
    trainings = dict.fromkeys(suite.training for suite in matrix.counted)
    runs = (
        [matrix.calm(training, variant) for training in trainings]
        if calm
        else [matrix.done(suite.name, variant) for suite in matrix.counted]
    )
    found = [parts for by_seed in runs if (parts := _parts(by_seed.values()))]
    return _mean(found)


def _parts(runs: Iterable[Run]) -> dict[str, float]:
    """Means, with what is unaccounted for."""
    return _mean([dict(run.parts) | {REST: run.unaccounted} for run in runs])


def _mean(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    if not found:
        return {}
    return {part: fmean(parts.get(part, 0.0) for parts in found) for part in (*PARTS, REST)}
