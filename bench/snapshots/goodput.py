"""Goodput of ways to take snapshots while devices come and go: PCcheck's Figure 9, from measured costs.

    .venv/bin/python bench/snapshots/goodput.py --costs COSTS.json --trace a100_spot_preemptions.csv

prints a table and, with --output and --plot, writes JSON and a PNG.  Beside the paper's formula stands a run
through every event of the trace (goodput_model.py).  There are no costs built in: --example-costs shows what
a file looks like (goodput_costs.py), and everything made of that says that it was not measured.

The paper rolls back "whenever a change in the allocated resources occurs (preempted or retrieved)": 48 times
in its trace.  Its worked numbers fit the 26 losses only (tests/bench/test_goodput.py); --losses-only counts
those.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from understudy.recovery.costs.given.goodput_costs import BadCosts, Costs, example, read_costs
from understudy.recovery.costs.models.goodput_model import BadTrace, Row, Trace, evaluate, read_trace
from understudy.recovery.text.tables import make_console

NOT_MEASURED = "NOT MEASURED"
TRACE = Path(__file__).resolve().parents[3] / "shared" / "data" / "a100_spot_preemptions.csv"
BAD_INPUT = 2


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit status."""
    options = _options(arguments)
    if options.example_costs:
        print(json.dumps(example(), indent=2))
        return 0
    try:
        if options.costs is None:
            raise BadCosts("--costs FILE is needed: goodput has no numbers of its own; see --example-costs")
        costs = read_costs(options.costs)
        trace = read_trace(options.trace)
    except (BadCosts, BadTrace) as problem:
        print(f"goodput: {problem}", file=sys.stderr)
        return BAD_INPUT
    if not options.whole:
        trace = trace.until_devices_are_gone()
    rows = evaluate(costs, trace, options.draws, every_change=not options.losses_only)
    console = make_console()
    console.print(table(costs, trace, rows))
    if not costs.measured:
        console.print(f"[bold red]{NOT_MEASURED}[/]: {costs.origin}")
    if options.output:
        options.output.write_text(json.dumps(as_json(costs, trace, rows), indent=2) + "\n")
    if options.plot:
        draw(costs, trace, rows, options.plot)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Goodput over the interval of snapshots, from measured costs."
    )
    parser.add_argument("--costs", type=Path, help="JSON, see --example-costs")
    parser.add_argument("--trace", type=Path, default=TRACE, help="CSV with Time and GPUs")
    parser.add_argument("--output", type=Path, help="JSON of the results")
    parser.add_argument("--plot", type=Path, help="PNG of the results")
    parser.add_argument("--draws", type=_positive, default=20, help="of which devices a loss takes (20)")
    parser.add_argument("--losses-only", action="store_true", help="gained devices change nothing")
    parser.add_argument("--whole", action="store_true", help="also the end of the trace, without devices")
    parser.add_argument("--example-costs", action="store_true", help="show a costs file; nothing is measured")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, 1 or more")
    return int(text)


def as_json(costs: Costs, trace: Trace, rows: list[Row]) -> dict[str, object]:
    """For programs: steps, steps per second, seconds."""
    return {
        "measured": costs.measured,
        "origin": costs.origin,
        "step_s": costs.step_s,
        "shards": costs.shards,
        "trace": {
            "length_s": trace.length_s,
            "changes": len(trace.changes),
            "losses": sum(change.is_loss for change in trace.changes),
        },
        "ideal": 1 / costs.step_s,
        "rows": [asdict(row) for row in rows],
    }


def table(costs: Costs, trace: Trace, rows: list[Row]) -> Table:
    """For people; a star marks a policy's best interval."""
    losses = sum(change.is_loss for change in trace.changes)
    label = "" if costs.measured else f"{NOT_MEASURED}: "
    found = Table(
        title=f"{label}goodput in steps/s, ideal {1 / costs.step_s:.3f}; state on {costs.shards} devices; "
        f"{trace.length_s:.0f} s, {losses} losses and {len(trace.changes) - losses} gains"
    )
    found.add_column("policy")
    formula = ("every", "paper's formula", "redone")
    events = (
        "through events",
        "least .. most",
        "unlucky",
        "redone",
        "stopped s",
        "in place",
        "restored",
        "lost all",
    )
    for heading in formula + events:
        found.add_column(heading, justify="right")
    best_formula = {
        name: max((r for r in rows if r.policy == name), key=_by_formula) for name in _names(rows)
    }
    best_run = {name: max((r for r in rows if r.policy == name), key=_by_events) for name in _names(rows)}
    for row in rows:
        found.add_row(
            row.policy,
            str(row.interval),
            f"{'* ' if row is best_formula[row.policy] else ''}{row.formula.goodput:.4f}",
            f"{row.formula.redone:.0f}",
            f"{'* ' if row is best_run[row.policy] else ''}{row.goodput:.4f}",
            f"{row.goodput_least:.4f} .. {row.goodput_most:.4f}",
            f"{row.goodput_unlucky:.4f}",
            f"{row.run.redone:.0f}",
            f"{row.run.stopped_s:.0f}",
            f"{row.run.in_place:.1f}",
            f"{row.run.restored:.1f}",
            f"{row.run.from_scratch:.1f}",
            end_section=row.interval == max(r.interval for r in rows if r.policy == row.policy),
        )
    return found


def _names(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row.policy for row in rows))


def _by_formula(row: Row) -> float:
    return row.formula.goodput


def _by_events(row: Row) -> float:
    return row.goodput


def draw(costs: Costs, trace: Trace, rows: list[Row], path: Path) -> None:
    """Both models side by side, over the interval, as PNG."""
    import matplotlib  # only here: the table needs none of it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    for axis, title, value in zip(
        axes, ("the paper's formula", "through the events"), (_by_formula, _by_events), strict=True
    ):
        for name in _names(rows):
            points = [(row.interval, value(row)) for row in rows if row.policy == name]
            axis.plot(*zip(*points, strict=True), marker=".", label=name)
        axis.axhline(1 / costs.step_s, color="black", linestyle="--", label="ideal")
        axis.set(title=title, xscale="log", xlabel="steps from one snapshot to the next")
    axes[0].set_ylabel("goodput, useful steps per second")
    axes[1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.suptitle(costs.origin if costs.measured else f"{NOT_MEASURED}: {costs.origin}", fontsize="small")
    figure.tight_layout()
    # The date and version that matplotlib would add make equal results differ.
    figure.savefig(path, format="png", dpi=120, metadata={"Software": None})
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
