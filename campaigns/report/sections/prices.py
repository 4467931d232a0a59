"""What protection costs while nothing fails, and what faults cost on top: two numbers of each way."""

from __future__ import annotations

from understudy.campaigns.planning.variants import REFERENCE
from understudy.campaigns.report.blocks import NONE, Section, Table
from understudy.campaigns.report.matrix import Matrix
from understudy.campaigns.report.statistics import gains, over_suites


def prices(matrix: Matrix) -> Section:
    """The paper's reference checkpoints, too: so the price of checkpoints is in neither of its numbers."""
    trainings = [t for t in matrix.trainings() if matrix.calm(t)]
    variants = [v for v in matrix.results.variants if any(matrix.calm(t, v) for t in trainings)]
    rows = [
        (training, *(_protection(matrix, [training], name) for name in variants)) for training in trainings
    ]
    if len(trainings) > 1:
        rows.append(("all", *(_protection(matrix, trainings, name) for name in variants)))
    undisturbed = Table(
        f"Undisturbed: goodput against {REFERENCE}, percent", ("training", *variants), tuple(rows),
        note="Nothing fails: what is lost is the price of checkpoints, or of the proxy.",
    )  # fmt: skip
    faults = []
    for suite in matrix.counted:
        drops = []
        for name in variants:
            own = gains(matrix.values(suite.name, name), matrix.calm_values(suite.training, name))
            drops.append(over_suites({suite.name: own}).text())
        faults.append((suite.name, *drops))
    totals = (
        matrix.overall(
            lambda suite, name=name: gains(  # type: ignore[misc]
                matrix.values(suite.name, name), matrix.calm_values(suite.training, name)
            )
        ).text()
        for name in variants
    )
    faults.append(("all suites that count", *totals))
    disturbed = Table(
        "Faults: goodput against the same way undisturbed, percent", ("suite", *variants), tuple(faults) if variants else (),
        note="What is lost is the price of faults: noticing, restarts or recoveries, and steps done again.",
    )  # fmt: skip
    said = (
        "Each way pays twice: for being prepared, and for the fault. Both are differences of pairs with the same seed; "
        f"ways that were not run undisturbed have no price here ({', '.join(_without(matrix, variants)) or 'none'}).",
    )
    return Section("prices", "Price of protection, price of faults", said, (undisturbed, disturbed))


def _protection(matrix: Matrix, trainings: list[str], variant: str) -> str:
    if variant == REFERENCE:
        return NONE
    return over_suites(
        {
            training: gains(matrix.calm_values(training, variant), matrix.calm_values(training))
            for training in trainings
        }
    ).text()


def _without(matrix: Matrix, have: list[str]) -> list[str]:
    return [name for name in matrix.results.variants if name not in have]
