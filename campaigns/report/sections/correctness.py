"""Whether the results are right: samples, losses, parameters."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from understudy.campaigns.report import paper
from understudy.campaigns.report.blocks import NONE, Section, Table
from understudy.campaigns.report.gates import of_a_users_command
from understudy.campaigns.report.matrix import Matrix
from understudy.campaigns.results.records import Run


def correctness(matrix: Matrix) -> Section:
    """Counterpart of paper 002, §6.5 and eq. 8, and of its correctness checker."""
    names = [suite.name for suite in matrix.disturbed] + list(matrix.undisturbed)
    variants = matrix.results.variants
    failed = frozenset(place for place, name in enumerate(names) if not matrix.verdicts[name].passed)
    samples = tuple(
        (name, *(samples_of(matrix.done(name, variant)) for variant in variants)) for name in names
    )
    equal = tuple(
        (name, *(parameters_of(matrix.done(name, variant)) for variant in variants)) for name in names
    )
    tables = [
        Table(
            "Samples: runs whose account is exact", ("suite", *variants), samples, failed=failed,
            note="No duplicate, none missing, none besides (paper 002, eq. 2 and 5), over all epochs, ranks and attempts.",
        ),
        Table(
            "Parameters at the end, beside the undisturbed run of the same training and seed", ("suite", *variants), equal,
            failed=failed,
            note="Equal: to the bit. Otherwise the mean absolute difference of losses (eq. 8) and the L2 distance of parameters, "
            "means over seeds. ≠: the bits were promised.",
        ),
    ]  # fmt: skip
    if distances := _distances(matrix):
        tables.append(
            Table(
                "L2 distance of parameters at checkpoints",
                ("suite", "variant", "seed", "by step"),
                distances,
                4,
                long=True,
            )
        )
    known = ", ".join(f"{value:.4f} for {name}" for name, value in paper.LOSS_DIFFERENCE.items())
    said = (
        f"In paper 002 the correctness invariants hold in all runs, while losses differ from the reference's: by {known}, on {paper.ELSEWHERE_002}. "
        "Here the bits of the parameters are compared wherever a way promises them.",
    )
    return Section("correctness", "Samples, losses, parameters", said, tuple(tables))


def samples_of(runs: Mapping[int, Run]) -> str:
    """In a cell."""
    accounts = [run.samples for run in runs.values() if run.samples is not None]
    if not accounts:
        return "not accounted for" if runs else NONE
    exact = sum(account.exact for account in accounts)
    return f"{exact} of {len(runs)}"


def parameters_of(runs: Mapping[int, Run]) -> str:
    """In a cell."""
    compared = [(run, run.comparison) for run in runs.values() if run.comparison is not None]
    if not compared:
        return NONE
    if all(one.losses_equal if of_a_users_command(run) else one.parameters_equal for run, one in compared):
        what = "losses equal" if any(of_a_users_command(run) for run, _ in compared) else "equal"
        return f"{what}, {len(compared)} of {len(compared)}"
    loss = fmean(one.loss_difference for _, one in compared)
    ends = [one.distances[max(one.distances)] for _, one in compared if one.distances]
    broken = "≠ " if any(run.exact and not one.parameters_equal for run, one in compared) else ""
    distance = f"; L2 {fmean(ends):.3g}" if ends else ""
    return f"{broken}loss ±{loss:.4f}{distance}"


def _distances(matrix: Matrix) -> tuple[tuple[str, str, str, str], ...]:
    """Of runs whose parameters are not equal."""
    rows = []
    for key, run in matrix.every_run():
        one = run.comparison if run is not None and run.status == "done" else None
        if one is not None and not one.parameters_equal and one.distances:
            by_step = ", ".join(f"{step}: {value:.3g}" for step, value in sorted(one.distances.items()))
            rows.append((key.suite, key.variant, str(key.seed), by_step))
    return tuple(rows)
