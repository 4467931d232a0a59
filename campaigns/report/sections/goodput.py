"""Goodput per suite and variant, and what each way gains: counterparts of Figures 2 to 4 of paper 002."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from understudy.campaigns.planning.variants import REFERENCE
from understudy.campaigns.report import figures, paper
from understudy.campaigns.report.blocks import NONE, Picture, Section, Table, counted, number
from understudy.campaigns.report.figures import Point
from understudy.campaigns.report.matrix import BASELINE, OVERLAPPED, Matrix
from understudy.campaigns.report.results import PlannedSuite
from understudy.campaigns.report.statistics import Estimate, estimate

CALM = f"{REFERENCE}, undisturbed"
STALLED = "stall, s"


def goodput(matrix: Matrix) -> Section:
    """Counterpart of Figure 2."""
    variants = matrix.results.variants
    rows, failed = [], set()
    for place, suite in enumerate(matrix.disturbed):
        calm = matrix.calm_values(suite.training)
        means = [matrix.mean(suite.name, variant) for variant in variants]
        known = [mean for mean in means if mean is not None]
        cells = [number(fmean(calm.values())) if calm else NONE]
        # The best is marked by a star, so that the table can be read without colours.
        cells += [
            number(mean) + (" *" if known and mean == max(known) and len(known) > 1 else "") for mean in means
        ]
        rows.append((suite.name, *cells))
        if not matrix.verdicts[suite.name].passed:
            failed.add(place)
    table = Table(
        "Goodput, steps per second", ("suite", CALM, *variants), tuple(rows), failed=frozenset(failed),
        note="Means over seeds; *: the most among the disturbed; a dash: no run was completed. What is shown of a failed suite was measured, "
        "and counts for nothing.",
    )  # fmt: skip
    names = [suite.name for suite in matrix.disturbed if any(_share(matrix, suite.name, v) for v in variants)]
    bars = {variant: [_share(matrix, name, variant) for name in names] for variant in variants}
    picture = Picture(
        "goodput", f"Goodput by suite and variant; 1 is {CALM} (counterpart of Figure 2 of paper 002)",
        "One group of bars for each suite, one bar for each variant; a dashed line at 1.",
        lambda: figures.grouped_bars([matrix.label(name) for name in names], bars, f"goodput over that of {CALM}", line=1.0),
    )  # fmt: skip
    said = (
        "Goodput is completed steps over the seconds from the first step's begin to the last one's end (paper 002, eq. 6): steps that are done "
        "again count once, and importing PyTorch before the first step does not count.",
    )
    return Section("goodput", "Goodput", said, (table,), (picture,) if names else ())


def gains(matrix: Matrix) -> Section:
    """Counterparts of Figures 3 and 4."""
    suites = [suite for suite in matrix.disturbed if _has_gains(matrix, suite)]
    variants = [
        v for v in matrix.results.variants if v != BASELINE and any(matrix.gain(s, v).n for s in suites)
    ]
    rows = [(suite.name, *(matrix.gain(suite, variant).text() for variant in variants)) for suite in suites]
    failed = frozenset(place for place, suite in enumerate(suites) if not matrix.verdicts[suite.name].passed)
    totals = {
        name: matrix.overall(lambda suite, name=name: matrix.gains(suite, name, BASELINE))  # type: ignore[misc]
        for name in variants
    }
    rows.append(("all suites that count", *(total.text() for total in totals.values())))
    table = Table(
        f"Gain in goodput over {BASELINE}, percent, with 95 % intervals",
        ("suite", *variants), tuple(rows), failed=failed,
        note=f"Of pairs with the same suite and seed; suites without {BASELINE} have no row. Below 0: slower than {BASELINE}. An interval that has "
        "zero in it shows no difference. The last row takes each suite once, with the mean of its seeds.",
    )  # fmt: skip
    return Section("gains", "What each way gains", _said(matrix), (table,), tuple(_pictures(matrix, totals)))


def _has_gains(matrix: Matrix, suite: PlannedSuite) -> bool:
    others = (name for name in matrix.variants(suite.name) if name != BASELINE)
    return any(matrix.gain(suite, name).n for name in others)


def _pictures(matrix: Matrix, totals: Mapping[str, Estimate]) -> Iterator[Picture]:
    struck = [suite for suite in matrix.disturbed if not suite.varies_a_knob]
    ours = [(suite, matrix.gain(suite, OVERLAPPED)) for suite in struck]
    points = [Point(matrix.label(suite.name), e.mean, 0, e.low, e.high) for suite, e in ours if e.n]
    if points:
        yield Picture(
            "gain", f"Gain of {OVERLAPPED} over {BASELINE} by suite (counterpart of Figure 3 of paper 002)",
            "A dot and its 95 % interval for each suite; grey: zero is inside.",
            lambda: figures.intervals(points, "gain in goodput, percent"),
        )  # fmt: skip
    stalls = _stalls(matrix, struck)
    if stalls:
        yield Picture(
            "stall", f"Stall that {OVERLAPPED} saves against its gain (counterpart of Figure 4 of paper 002)",
            "A dot for each suite: seconds of stall saved, and gain in goodput.",
            lambda: figures.scatter(stalls, f"stall saved against {BASELINE}, seconds a run", "gain in goodput, percent"),
        )  # fmt: skip
    overall = [Point(name, e.mean, 0, e.low, e.high) for name, e in totals.items() if e.n]
    if overall:
        yield Picture(
            "gain-of-each", f"Gain of each variant over {BASELINE}, all suites that count",
            "A dot and its 95 % interval for each variant; grey: zero is inside.",
            lambda: figures.intervals(overall, "gain in goodput, percent"),
        )  # fmt: skip


def _said(matrix: Matrix) -> tuple[str, ...]:
    gain = matrix.overall(lambda suite: matrix.gains(suite, OVERLAPPED, BASELINE))
    if not gain.n:
        return (f"No suite that counts has both {OVERLAPPED} and {BASELINE}.",)
    have = [matrix.gain(suite, OVERLAPPED) for suite in matrix.counted]
    more = sum(one.mean > 0 for one in have if one.n)
    return (
        f"{OVERLAPPED.capitalize()} against {BASELINE}: {gain.text()} over {counted(len(matrix.counted), 'suite')}; more in {more} of them, of which "
        f"{sum(one.shows_a_difference and one.mean > 0 for one in have)} with an interval above zero. "
        f"Paper 002 has {paper.GAIN:+.2f} %, and more in 8 of 8, on {paper.ELSEWHERE_002}.",
    )


def _share(matrix: Matrix, suite: str, variant: str) -> float | None:
    """Of the undisturbed reference's goodput; None without both."""
    planned = matrix.results.suites[suite]
    drops = matrix.drops(planned, variant)
    return 1 + estimate(drops).mean / 100 if drops else None


def _stalls(matrix: Matrix, suites: Sequence[PlannedSuite]) -> list[Point]:
    found = []
    for suite in suites:
        saved = matrix.changes(suite, BASELINE, OVERLAPPED, lambda run: run.checkpoints.stall)
        gain = matrix.gain(suite, OVERLAPPED)
        if saved and gain.n:
            found.append(Point(matrix.label(suite.name), fmean(saved), gain.mean))
    return found
