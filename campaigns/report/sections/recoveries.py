"""Recoveries by part: counterparts of Tables 4 to 7 of paper 001."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median

from understudy.campaigns.report import paper
from understudy.campaigns.report.blocks import NONE, Section, Table, number
from understudy.campaigns.report.matrix import Matrix
from understudy.campaigns.report.statistics import differences, estimate
from understudy.campaigns.results.records import PARTS, Recovery, Run
from understudy.recovery.costs.given.paper import TRANSPARENT, WORKLOADS

USER_LEVEL, PROXIED = "jit", ("transparent", "transparent+persist")
IN_PLACE = frozenset({"rewind-in-place"})
"""Plans that keep the device server: the paper's transient errors. All others take another one: its hard errors."""
ENDS = frozenset({"give-up", "end-with-peer"})


def recoveries(matrix: Matrix) -> Section:
    """Of suites that have passed their gates."""
    said = (
        "Medians of seconds, of all recoveries in suites that passed. The paper's numbers are of "
        f"{paper.ELSEWHERE_001}: they say in which order of magnitude its parts lie.",
    )
    tables = [_by_rung(matrix), _user_level(matrix), _transient(matrix), _hard(matrix), _by_step(matrix)]
    return Section("recoveries", "Recoveries by part, beside Tables 4 to 7 of paper 001", said, tuple(tables))


def _found(
    matrix: Matrix, variants: Iterable[str], training: str | None = None
) -> Iterator[tuple[Run, Recovery]]:
    wanted = frozenset(variants)
    for suite in matrix.disturbed:
        if matrix.verdicts[suite.name].passed and training in (None, suite.training):
            for variant in matrix.variants(suite.name):
                if variant in wanted:
                    for run in matrix.done(suite.name, variant).values():
                        yield from ((run, one) for one in run.recoveries if one.plan not in ENDS)


def _by_rung(matrix: Matrix) -> Table:
    """All of them."""
    groups: dict[tuple[str, str], list[Recovery]] = {}
    for run, one in _found(matrix, matrix.results.variants):
        groups.setdefault((run.variant, one.plan), []).append(one)
    shown = [part for part in PARTS if any(part in one.parts for found in groups.values() for one in found)]
    rows = tuple(
        (
            variant, plan, str(len(found)), _median(one.total for one in found),
            *(_median(one.parts[part] for one in found if part in one.parts) for part in shown),
        )
        for (variant, plan), found in groups.items()
    )  # fmt: skip
    note = "A plan is a rung of the ladder of the proxy, or how the other ways begin again. Medians of parts need not add up."
    return Table("By way and plan", ("variant", "plan", "times", "all", *shown), rows, 2, note)


def _user_level(matrix: Matrix) -> Table:
    rows = []
    for training in matrix.trainings():
        found = [one for _, one in _found(matrix, [USER_LEVEL], training)]
        if found:
            saved = [_sum(one, "snapshot", "write") for one in found]
            back = [_sum(one, "restart", "copy", "communicators") for one in found]
            rows.append(
                (
                    training, "here", str(len(found)), _median(saved), _median(back),
                    _median(one.total - one.parts.get("detect", 0.0) for one in found),
                    *_steps(matrix, training, USER_LEVEL),
                )
            )  # fmt: skip
    rows += [
        (row.name, f"paper, {row.gpus} GPUs", "", f"{row.checkpoint:g}", f"{row.restore:g}", f"{row.recovery:g}",
         f"{row.minibatch:g}", _printed(row.overhead))
        for row in WORKLOADS
    ]  # fmt: skip
    note = (
        "Restore here: restart, copy and communicators, with the launcher's time, which the paper leaves out (§6.4); recovery: all but noticing. "
        "Overhead: a median step, less that of an undisturbed run without us; the paper's 0 is one that it could not measure."
    )
    columns = ("model", "where", "times", "checkpoint", "restore", "recovery", "minibatch", "overhead")
    return Table(f"User-level: {USER_LEVEL} (counterpart of Table 4)", columns, tuple(rows), 2, note)


def _transient(matrix: Matrix) -> Table:
    rows = []
    for training in matrix.trainings():
        found = [one for _, one in _found(matrix, PROXIED, training) if one.plan in IN_PLACE]
        if found:
            rows.append(
                (
                    training,
                    "here",
                    str(len(found)),
                    _median(one.total for one in found),
                    *_steps(matrix, training, PROXIED[0]),
                )
            )
    rows += [
        (row.name, "paper, 8 × V100", "", f"{row.recovery:g}", f"{row.minibatch:g}", _printed(row.overhead))
        for row in TRANSPARENT
    ]
    columns = ("model", "where", "times", "recovery", "minibatch", "overhead")
    return Table("Transparent, in place: transient errors (counterpart of Table 5)", columns, tuple(rows), 2)


def _hard(matrix: Matrix) -> Table:
    rows = []
    for training in matrix.trainings():
        found = [(run, one) for run, one in _found(matrix, PROXIED, training) if one.plan not in IN_PLACE]
        if found:
            rows.append(
                (
                    training, "here", str(len(found)), _median(_healthy(one) for _, one in found),
                    _median(one.total for _, one in found), _median(run.step_seconds for run, _ in found),
                )
            )  # fmt: skip
    rows += [
        (row.name, f"paper, {row.gpus}", "", f"{row.healthy:g}", f"{row.failed:g}", f"{row.minibatch:g}")
        for row in paper.TABLE_6_OF_001
    ]
    note = (
        "Here a failed rank has all parts; a healthy one waits while the other gets a server and its state (restart, copy), and what is shown is what it "
        "does besides. All go on together. In the paper healthy ranks checkpoint themselves, and so take longer."
    )
    columns = ("model", "where", "times", "healthy rank", "failed rank", "minibatch")
    return Table(
        "Transparent, with another device server: hard errors (counterpart of Table 6)",
        columns,
        tuple(rows),
        2,
        note,
    )


def _by_step(matrix: Matrix) -> Table:
    trainings = [t for t in matrix.trainings() if any(True for _ in _found(matrix, PROXIED, t))]
    found = {t: [one for _, one in _found(matrix, PROXIED, t)] for t in trainings}
    rows = []
    for title, printed in paper.TABLE_7_OF_001.items():
        part = paper.COUNTERPARTS_OF_TABLE_7[title]
        ours = [
            _median(o.parts[part] for o in found[t] if part in o.parts) if part else NONE for t in trainings
        ]
        rows.append((title, part or "in restart", *ours, *(f"{value:g}" for value in printed)))
    for part in ("detect", "copy"):
        ours = [_median(o.parts[part] for o in found[t] if part in o.parts) for t in trainings]
        rows.append(("not in the paper's table", part, *ours, *(NONE for _ in paper.MODELS_OF_TABLE_7)))
    columns = ("step", "our part", *trainings, *(f"paper: {name}" for name in paper.MODELS_OF_TABLE_7))
    return Table("Transparent, by step (counterpart of Table 7)", columns, tuple(rows), 2)


def _healthy(one: Recovery) -> float:
    return one.total - _sum(one, "restart", "copy")


def _steps(matrix: Matrix, training: str, variant: str) -> tuple[str, str]:
    """Median step of a variant, and by how much it is longer than an undisturbed one of the reference."""
    of: Callable[[Run], float] = lambda run: run.step_seconds  # noqa: E731
    suites = [s for s in matrix.disturbed if s.training == training and matrix.verdicts[s.name].passed]
    calm = matrix.calm_values(training, of=of)
    ours = matrix.calm_values(training, variant, of) or {
        seed: median(values[seed] for values in found if seed in values)
        for found in [[matrix.values(suite.name, variant, of) for suite in suites]]
        for seed in {seed for values in found for seed in values}
    }
    overhead = estimate(differences(ours, calm))
    return _median(ours.values(), 4), overhead.text("", 5)


def _printed(value: float) -> str:
    """Without an exponent."""
    return f"{value:.5f}".rstrip("0").rstrip(".")


def _sum(one: Recovery, *parts: str) -> float:
    return sum(one.parts.get(part, 0.0) for part in parts)


def _median(values: Iterable[float], digits: int = 3) -> str:
    found: Sequence[float] = list(values)
    return number(median(found), digits) if found else NONE
