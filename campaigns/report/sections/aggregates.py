"""Counterparts of Tables 5 to 8 of paper 002, and its §9: interval, snapshots in flight, storage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from understudy.campaigns.planning.variants import REFERENCE
from understudy.campaigns.report import paper
from understudy.campaigns.report.blocks import NONE, Section, Table, number, signed
from understudy.campaigns.report.matrix import BASELINE, OVERLAPPED, Matrix, Value, goodput
from understudy.campaigns.report.results import PlannedSuite
from understudy.campaigns.report.statistics import Estimate, differences, over_suites
from understudy.campaigns.results.records import Run

ROWS: Sequence[tuple[str, str, Callable[[Run], float], int]] = (
    ("goodput", "goodput, steps/s", goodput, 3),
    ("restarts", "restarts", lambda run: run.restarts, 2),
    ("wall", "wall time, s", lambda run: run.training_seconds, 2),
    ("stall", "stall, s", lambda run: run.checkpoints.stall, 3),
    ("write", "write, s", lambda run: run.checkpoints.write, 3),
    ("snapshot", "snapshot, s", lambda run: run.checkpoints.snapshot, 3),
)
"""Of Table 5: its name there, ours, what of a run, digits."""


def aggregates(matrix: Matrix) -> Section:
    """Tables 5 to 8."""
    said = (
        f"Of the suites that passed their gates ({len(matrix.counted)} of "
        f"{len(matrix.of_the_matrix)} that have faults and the same variants). What paper 002 prints stands beside it for "
        f"orientation alone: it is of {paper.ELSEWHERE_002}. Its reference writes checkpoints and has no faults: ours of that kind is "
        f"{BASELINE}, undisturbed; the {REFERENCE} one writes none.",
    )
    tables = (table_5(matrix), table_6(matrix), table_7(matrix), table_8(matrix), _paper_8())
    return Section("aggregates", "All suites together", said, tables)


def table_5(matrix: Matrix) -> Table:
    """Means over suites, a row for each variant; the paper's columns are rows here."""
    names = [name for name in matrix.results.variants if matrix.counted_mean(name, goodput) is not None]
    rows = []
    for name in (REFERENCE, BASELINE):
        if _calm(matrix, name, goodput) is not None:
            means = [number(_calm(matrix, name, of), digits) for _, _, of, digits in ROWS]
            rows.append((f"{name}, undisturbed", NONE, means[0], NONE, *means[1:]))
    for name in names:
        drop = matrix.overall(lambda suite, name=name: matrix.drops(suite, name))  # type: ignore[misc]
        means = [number(matrix.counted_mean(name, of), digits) for _, _, of, digits in ROWS]
        rows.append((name, _exact(matrix, name), means[0], drop.text(), *means[1:]))
    if names:
        gain = matrix.overall(lambda suite: matrix.gains(suite, OVERLAPPED, BASELINE))
        changes = [_change(matrix, of).text("", digits) for _, _, of, digits in ROWS]
        rows.append((f"{OVERLAPPED} - {BASELINE}", NONE, changes[0], gain.text(), *changes[1:]))
    for place, name in enumerate(("reference", "blocking", "overlapped")):
        printed = {
            one: (row.reference, row.blocking, row.overlapped)[place] for one, row in paper.TABLE_5.items()
        }
        means = [number(printed[one], 2) for one, _, _, _ in ROWS]
        rows.append(
            (
                f"paper: {name}",
                number(printed["passed"], 3),
                means[0],
                signed(printed["drop"], 1, "%"),
                *means[1:],
            )
        )
    columns = (
        "",
        "exact samples",
        ROWS[0][1],
        f"against {REFERENCE}, undisturbed",
        *(title for _, title, _, _ in ROWS[1:]),
    )
    note = (
        "Means over suites of the means over seeds; differences and percent: of pairs with the same suite and seed, 95 % intervals; of the row "
        f"{OVERLAPPED} - {BASELINE} the percent are against {BASELINE} (the paper's: {paper.GAIN:+.2f} %). Exact samples: share of the runs, of all "
        "suites with these variants, failed ones among them. Wall time is that of training."
    )
    return Table(
        "Means over all suites (counterpart of Table 5 of paper 002)", columns, tuple(rows), note=note
    )


def _change(matrix: Matrix, of: Value) -> Estimate:
    """What overlapping changes of a run, over the suites that count."""
    return matrix.overall(lambda suite: matrix.changes(suite, OVERLAPPED, BASELINE, of))


def table_6(matrix: Matrix) -> Table:
    """Suites by gain."""
    ranked = sorted(
        (
            (suite, matrix.gain(suite, OVERLAPPED))
            for suite in matrix.counted
            if matrix.gain(suite, OVERLAPPED).n
        ),
        key=lambda one: -one[1].mean,
    )
    rows = tuple(
        (
            suite.name, suite.data or "command", suite.model or "",
            *_goodputs(matrix, suite), gain.text(),
            _mean_text(matrix.drops(suite, BASELINE)), _mean_text(matrix.drops(suite, OVERLAPPED)),
            _mean_text(matrix.changes(suite, OVERLAPPED, BASELINE, lambda run: run.checkpoints.stall), "s"),
        )
        for suite, gain in ranked
    )  # fmt: skip
    columns = ("suite", "data", "model", "undisturbed", BASELINE, OVERLAPPED, f"{OVERLAPPED} / {BASELINE}",
               f"{BASELINE} / undisturbed", f"{OVERLAPPED} / undisturbed", "stall")  # fmt: skip
    note = f"Goodput in steps/s; undisturbed: {REFERENCE}, which writes no checkpoint."
    return Table(f"Suites by gain of {OVERLAPPED} (counterpart of Table 6)", columns, rows, 3, note)


def table_7(matrix: Matrix) -> Table:
    """Means over slices of the suites that count."""
    slices: tuple[tuple[str, Callable[[PlannedSuite], str]], ...] = (
        ("data", lambda suite: suite.data or "a command"),
        ("model", lambda suite: suite.model or "a command"),
        ("faults", lambda suite: suite.kind),
    )
    rows: list[tuple[str, ...]] = []
    for title, group_of in slices:
        for group in dict.fromkeys(map(group_of, matrix.counted)):
            here = [suite for suite in matrix.counted if group_of(suite) == group]
            gain = over_suites({s.name: matrix.gains(s, OVERLAPPED, BASELINE) for s in here})
            stall = over_suites(
                {
                    s.name: matrix.changes(s, OVERLAPPED, BASELINE, lambda run: run.checkpoints.stall)
                    for s in here
                }
            )
            loss = over_suites({s.name: _loss_changes(matrix, s) for s in here})
            rows.append((title, group, str(len(here)), gain.text(), stall.text("s", 3), loss.text("", 4)))
    rows += [
        (f"paper: {s.slice}", s.group, "4", f"{s.gain:+.2f} %", f"{s.stall:+.2f} s", f"{s.loss:+.4f}")
        for s in paper.TABLE_7
    ]
    columns = ("slice", "group", "suites", f"{OVERLAPPED} over {BASELINE}", "stall", "loss difference")
    note = (
        "Loss difference: of the mean absolute differences to the undisturbed run's losses; 0 where both promise the bits "
        "and keep them. Paper: one seed."
    )
    return Table("By data, model and faults (counterpart of Table 7)", columns, tuple(rows), 2, note)


def table_8(matrix: Matrix) -> Table:
    """All of it, of all suites, those that failed among them."""
    rows, failed = [], set()
    for place, suite in enumerate(matrix.disturbed):
        stall: Callable[[Run], float] = lambda run: run.checkpoints.stall  # noqa: E731
        rows.append(
            (
                suite.name, suite.data or "command", suite.model or "", *_goodputs(matrix, suite),
                matrix.gain(suite, OVERLAPPED).text(), number(matrix.mean(suite.name, BASELINE, stall), 3),
                number(matrix.mean(suite.name, OVERLAPPED, stall), 3),
                _mean_text(matrix.changes(suite, OVERLAPPED, BASELINE, lambda run: run.training_seconds), "s"),
            )
        )  # fmt: skip
        if not matrix.verdicts[suite.name].passed:
            failed.add(place)
    columns = ("suite", "data", "model", "undisturbed", BASELINE, OVERLAPPED, f"{OVERLAPPED} / {BASELINE}",
               f"stall, {BASELINE}, s", f"stall, {OVERLAPPED}, s", "wall time")  # fmt: skip
    note = f"Goodput in steps/s; wall time: {OVERLAPPED} less {BASELINE}."
    return Table("All suites (counterpart of Table 8)", columns, tuple(rows), 3, note, frozenset(failed))


def knobs(matrix: Matrix) -> Section | None:
    """Suites that vary interval, snapshots in flight or storage."""
    rows: list[tuple[str, ...]] = []
    failed = set()
    campaign = matrix.results.plan.campaign
    for suite in matrix.disturbed:
        if suite.varies_a_knob:
            if not matrix.verdicts[suite.name].passed:
                failed.add(len(rows))
            stalls = [
                matrix.mean(suite.name, name, lambda run: run.checkpoints.stall)
                for name in (BASELINE, OVERLAPPED)
            ]
            means = [matrix.mean(suite.name, name) for name in (BASELINE, OVERLAPPED)]
            waited = matrix.mean(suite.name, OVERLAPPED, lambda run: run.checkpoints.backpressure)
            rows.append(
                (
                    suite.name, str(suite.checkpoint_every or campaign.checkpoint_every),
                    str(suite.max_in_flight or campaign.max_in_flight), suite.storage or campaign.storage,
                    *(number(mean, 3) for mean in means), matrix.gain(suite, OVERLAPPED).text(),
                    *(number(stall, 3) for stall in stalls), number(waited, 3),
                )
            )  # fmt: skip
    if not rows:
        return None
    columns = ("suite", "every", "in flight", "storage", f"{BASELINE}, steps/s", f"{OVERLAPPED}, steps/s", "gain",
               f"stall, {BASELINE}, s", f"stall, {OVERLAPPED}, s", "of it for room, s")  # fmt: skip
    said = (
        "The paper keeps these fixed (every 50 steps, 4 in flight, one storage) and leaves them to future work (§8, §9).",
    )
    table = Table("Interval, snapshots in flight, storage", columns, tuple(rows), 1, "", frozenset(failed))
    return Section("knobs", "Interval, snapshots in flight, storage", said, (table,))


def _goodputs(matrix: Matrix, suite: PlannedSuite) -> tuple[str, str, str]:
    calm = matrix.calm_values(suite.training)
    return (
        number(fmean(calm.values()), 3) if calm else NONE,
        number(matrix.mean(suite.name, BASELINE), 3),
        number(matrix.mean(suite.name, OVERLAPPED), 3),
    )


def _loss_changes(matrix: Matrix, suite: PlannedSuite) -> list[float]:
    of = {
        name: {
            seed: run.comparison.loss_difference
            for seed, run in matrix.done(suite.name, name).items()
            if run.comparison is not None and math.isfinite(run.comparison.loss_difference)
        }
        for name in (OVERLAPPED, BASELINE)
    }
    return differences(of[OVERLAPPED], of[BASELINE])


def _mean_text(values: Sequence[float], unit: str = "%") -> str:
    return signed(fmean(values), 2, unit) if values else NONE


def _calm(matrix: Matrix, variant: str, of: Callable[[Run], float]) -> float | None:
    """Undisturbed, mean over the trainings of suites that count."""
    trainings = dict.fromkeys(suite.training for suite in matrix.counted)
    found = [values for training in trainings if (values := matrix.calm_values(training, variant, of))]
    return fmean(fmean(values.values()) for values in found) if found else None


def _exact(matrix: Matrix, variant: str) -> str:
    """Of the runs that were completed and are accounted for, failed suites among them."""
    runs = [run for suite in matrix.of_the_matrix for run in matrix.done(suite.name, variant).values()]
    accounts = [run.samples.exact for run in runs if run.samples is not None]
    return number(fmean(accounts), 3) if accounts else NONE


def _paper_8() -> Table:
    rows = tuple(
        (
            row.data, row.model, row.failure, number(row.reference, 4), number(row.blocking, 4),
            number(row.overlapped, 4), signed(row.gain, 4, "%"), number(row.blocking_stall, 4),
            number(row.overlapped_stall, 4), signed(row.wall_difference, 4),
        )
        for row in paper.TABLE_8
    )  # fmt: skip
    columns = ("data", "model", "faults", "reference", "blocking", "overlapped", "gain",
               "stall, blocking, s", "stall, overlapped, s", "wall time, s")  # fmt: skip
    return Table("What paper 002 prints: Table 8, another machine", columns, rows, 3, long=True)
