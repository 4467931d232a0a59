"""What stands around the numbers: gates, what could not be run, peers, machine, and each run by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from understudy.campaigns.planning.variants import VARIANTS
from understudy.campaigns.report.blocks import NONE, Section, Table, counted, number
from understudy.campaigns.report.gates import Excuse, Gate, Offence
from understudy.campaigns.report.matrix import Matrix, is_peer

MOST_OFFENCES = 40
"""Sentences of one report's page; all are in its JSON."""


def summary(matrix: Matrix) -> Section:
    """In sentences."""
    plan = matrix.results.plan
    campaign = plan.campaign
    statuses = Counter(run.status if run is not None else "unread" for _, run in matrix.every_run())
    names = [name for name in matrix.results.planned if name in matrix.results.suites]
    passed = sum(matrix.verdicts[name].passed for name in names)
    said = [
        f"{counted(len(names), 'suite')} of {counted(len(matrix.results.variants), 'variant')} with "
        f"{counted(len(campaign.seeds), 'seed')} ({', '.join(map(str, campaign.seeds))}): {counted(campaign.ranks, 'rank')}, "
        f"a global batch of {campaign.global_batch}, {counted(campaign.steps, 'step')}, a checkpoint every "
        f"{campaign.checkpoint_every} where there are any, in turns.",
        f"Of {counted(sum(statuses.values()), 'run')} {', '.join(_statuses(statuses))}.",
        f"{passed} of {counted(len(names), 'suite')} passed all gates; means are of the {len(matrix.counted)} of them that have faults, "
        "and the same variants."
        + ("" if passed == len(names) else " What failed is shown as failed, and is in no aggregate."),
    ]
    leaders = Counter(best for suite in matrix.counted if (best := _best(matrix, suite.name)))
    if leaders:
        told = ", ".join(f"{name} in {count}" for name, count in leaders.most_common())
        said.append(
            f"The most goodput under faults, of {counted(len(matrix.counted), 'suite')} that count: {told}."
        )
    rows = tuple(
        (name, VARIANTS[name].what if name in VARIANTS else NONE) for name in matrix.results.variants
    )
    table = Table("", ("variant", "what it is"), rows, 2)
    return Section("summary", "What was run", tuple(said), (table,))


def failures(matrix: Matrix) -> list[str]:
    """Each offence against a gate, as a sentence; one for all runs of a suite that did the same."""
    groups: dict[tuple[str, Gate, str], list[Offence]] = {}
    for verdict in matrix.verdicts.values():
        for one in verdict.offences:
            groups.setdefault((verdict.suite, one.gate, one.what), []).append(one)
    found = []
    for (suite, gate, what), together in groups.items():
        if len(together) == 1:
            found.append(f"{suite}: {together[0].sentence} ({gate.value}).")
        else:
            runs = ", ".join(str(one.key) for one in together)
            found.append(f"{suite}: each of {len(together)} runs {what.rstrip('.')} ({gate.value}): {runs}.")
    return found


def gates(matrix: Matrix) -> Section:
    """A suite is accepted if all of them are passed."""
    names = list(matrix.results.planned)
    rows = []
    for name in names:
        verdict = matrix.verdicts[name]
        cells = [_cell(len(verdict.of(gate))) for gate in Gate]
        runs = len(matrix.results.planned[name])
        excused = f"{len(verdict.excuses)} of {runs}" if verdict.excuses else ""
        rows.append((name, *cells, excused))
    columns = ("suite", *(gate.value for gate in Gate), "runs that could not be")
    failed = frozenset(place for place, name in enumerate(names) if not matrix.verdicts[name].passed)
    offences = failures(matrix)
    if len(offences) > MOST_OFFENCES:
        offences = [*offences[:MOST_OFFENCES], f"{len(offences) - MOST_OFFENCES} more are in report.json."]
    offences += [
        f"{name}: its faults with seed {', '.join(map(str, matrix.verdicts[name].unreckoned))} cannot be reckoned again "
        "(a trace is not there), so that only those that the records name were looked at."
        for name in names
        if matrix.verdicts[name].unreckoned
    ]
    offences += [f"{name} is in the folder of runs, and in no plan." for name in matrix.results.unplanned]
    table = Table("Gates by suite", columns, tuple(rows), len(columns), failed=failed)
    excuses = Table(
        "Runs that could not be", ("variant", "suites", "runs", "why"), _excuses(matrix), 4, long=True
    )
    said = (
        "A suite counts if every run of it did its steps, met all its faults, accounts for its samples and for 95 % of its seconds, left nothing "
        "behind, ends with the parameters that it promises, and has a record that can be read (paper 002 §5.9).",
    )
    return Section(
        "gates", "Gates", said, (table, *((excuses,) if excuses.rows else ())), lists=tuple(offences)
    )


def peers(matrix: Matrix) -> Section | None:
    """What other projects' ways really did here."""
    rows = []
    for name in matrix.results.variants:
        if is_peer(name):
            runs = [(key, run) for key, run in matrix.every_run() if key.variant == name]
            statuses = Counter(run.status if run is not None else "unread" for _, run in runs)
            said = ", ".join(f"{count} {status}" for status, count in statuses.items())
            whys = dict.fromkeys(run.why for _, run in runs if run is not None and run.why)
            rows.append((name, VARIANTS[name].what, said, " / ".join(whys) or NONE))
    if not rows:
        return None
    table = Table("", ("peer", "what it is", "its runs", "what it said"), tuple(rows), 4)
    said_all = "Each from PyPI, in an environment of its own, with this project's PyTorch; where it did not run, that is its row, and nothing was put in its place."
    return Section("peers", "Peers", (said_all,), (table,))


def surroundings(matrix: Matrix) -> Section:
    """Machine, commit, load, and each run."""
    plan = matrix.results.plan
    loads = [run.load for _, run in matrix.every_run() if run is not None]
    busy = sum(load > plan.machine.cores for load in loads) if plan.machine.cores else 0
    rows = (
        ("processor", f"{plan.machine.cores} × {plan.machine.cpu}"),
        ("kernel", plan.machine.kernel),
        ("Python, PyTorch", f"{plan.machine.python}, {plan.machine.torch}"),
        ("commit", plan.commit),
        ("began", plan.began),
        ("digest of the campaign", plan.digest or NONE),
        (
            "load before a run, least, median, most",
            ", ".join(number(v) for v in (min(loads), median(loads), max(loads))) if loads else NONE,
        ),
    )
    said = (
        f"Before {busy} of {counted(len(loads), 'run')} the load was above the number of cores: other work was there." if busy else
        "The load includes what the run before has left in one minute's average.",
    )  # fmt: skip
    each = Table(
        "Each run",
        ("suite", "variant", "seed", "status", "steps", "seconds", "of it training", "goodput", "restarts", "redone", "unaccounted, s", "load"),
        tuple(_run(matrix)), 4, long=True,
    )  # fmt: skip
    return Section("machine", "Machine, commit, load", said, (Table("", ("what", ""), rows, 2), each))


def _run(matrix: Matrix) -> Sequence[tuple[str, ...]]:
    rows = []
    for key, run in matrix.every_run():
        if run is None:
            rows.append((key.suite, key.variant, str(key.seed), "unread", *[NONE] * 8))
        elif run.status in ("impossible", "absent"):
            rows.append((key.suite, key.variant, str(key.seed), run.status, *[NONE] * 8))
        else:
            rows.append(
                (
                    key.suite, key.variant, str(key.seed), run.status, f"{run.steps} of {run.target}", number(run.wall),
                    number(run.training_seconds), number(run.goodput, 3), str(run.restarts), str(run.redone),
                    number(run.unaccounted, 3), number(run.load),
                )
            )  # fmt: skip
    return rows


def _statuses(statuses: Counter[str]) -> list[str]:
    """In words, those that there are."""
    words = {
        "done": "{} completed",
        "failed": "{} failed",
        "impossible": "{} could not be, as such a fault cannot happen to them",
        "absent": "{} of peers that do not run here",
        "unread": "{} without a record that can be relied on",
    }
    return [words[status].format(statuses[status]) for status in words if statuses[status]]


def _best(matrix: Matrix, suite: str) -> str:
    means = {name: mean for name in matrix.variants(suite) if (mean := matrix.mean(suite, name)) is not None}
    return max(means, key=lambda name: means[name]) if means else ""


def _cell(count: int) -> str:
    return "ok" if not count else counted(count, "offence")


def _excuses(matrix: Matrix) -> tuple[tuple[str, str, str, str], ...]:
    """By variant and reason."""
    groups: dict[tuple[str, str], list[Excuse]] = {}
    for verdict in matrix.verdicts.values():
        for one in verdict.excuses:
            groups.setdefault((one.key.variant, f"{one.status}: {one.why}"), []).append(one)
    return tuple(
        (variant, ", ".join(dict.fromkeys(one.key.suite for one in found)), str(len(found)), why)
        for (variant, why), found in groups.items()
    )
