"""A bill as people and programs read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from understudy.recovery.costs.bill import HOURS_PER_MONTH, LATE_AT_MOST, Bill
from understudy.recovery.costs.comparing import Simulated
from understudy.recovery.costs.given.reading import Read

TITLES = {
    "periodic": "periodic checkpoints",
    "user_level": "user-level just-in-time",
    "transparent": "transparent (paper 001)",
    "ours": "understudy",
}
PARTS = ("steady", "detection", "recovery", "redone")


def bill_table(bill: Bill) -> Table:
    """A row for each way, the cheapest first."""
    table = Table(title=f"what failures waste, at {HOURS_PER_MONTH:.0f} hours a month")
    for heading in ("way", "wasted", *PARTS, "checkpoints", "GPU-hours a month", "money a month"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for line in sorted(bill.lines, key=lambda line: line.waste.total):
        table.add_row(
            TITLES[line.way.value],
            percent(line.waste.fraction),
            *(percent(getattr(line.waste, part)) for part in PARTS),
            f"{line.per_hour:.3g} an hour" if line.per_hour else "–",
            f"{line.gpu_hours:,.0f}",
            "–" if line.money is None else f"{line.money:,.0f}",
        )
    return table


def remarks(bill: Bill, read: Read) -> Iterator[str]:
    """Sentences below the table."""
    for way, why in bill.left_out.items():
        yield f"{TITLES[way.value]} is left out: {why}"
    for one in bill.crossovers:
        better, worse = TITLES[one.better.value], TITLES[one.worse.value]
        yield f"from {one.gpus:,} GPUs on, {better} wastes less than {worse}"
    if bill.spares is None:
        yield "devices is not given: how many spares are needed is not known"
    else:
        kept = read.inputs.devices.spares if read.inputs.devices else 0
        yield (
            f"{bill.spares:,} spares are needed for fewer than {LATE_AT_MOST:.1%} of failures to find none; "
            f"there are {kept:,}"
        )
    if read.inputs.prices is None:
        yield "prices is not given: nothing is said about money"


def origins_table(read: Read) -> Table:
    """Each input and where it came from."""
    table = Table(title="inputs")
    for heading in ("input", "value", "from"):
        table.add_column(heading)
    flat = dict(flattened(read.inputs.model_dump(mode="json", exclude_none=True)))
    for name, value in flat.items():
        table.add_row(name, str(value), read.origins.get(name, "the option's default, which changes nothing"))
    return table


def simulated_table(found: Sequence[Simulated]) -> Table:
    """Beside the formulas."""
    table = Table(title="simulated, beside the formulas")
    for heading in ("way", "simulated", "95 % of means", "formula", "failures", "waited", "recoveries"):
        table.add_column(heading, justify="left" if heading in ("way", "recoveries") else "right")
    for one in found:
        table.add_row(
            TITLES[one.way.value],
            percent(one.mean),
            f"{percent(one.low)} .. {percent(one.high)}",
            percent(one.formula),
            f"{one.failures:,}",
            percent(one.waited),
            ", ".join(f"{name} {count:,}" for name, count in sorted(one.rungs.items())),
        )
    return table


def as_json(read: Read, bill: Bill, simulated: Sequence[Simulated]) -> dict[str, Any]:
    """For programs: fractions, seconds, GPU-hours."""
    return {
        "inputs": read.inputs.model_dump(mode="json", exclude_none=True),
        "origins": dict(read.origins),
        "ways": [
            {
                "way": line.way.value,
                "wasted_fraction": line.waste.fraction,
                **{part: getattr(line.waste, part) for part in PARTS},
                "checkpoints_per_hour": line.per_hour,
                "gpu_hours_a_month": line.gpu_hours,
                "money_a_month": line.money,
            }
            for line in bill.lines
        ],
        "left_out": {way.value: why for way, why in bill.left_out.items()},
        "crossovers": [
            {"better": one.better.value, "worse": one.worse.value, "from_gpus": one.gpus}
            for one in bill.crossovers
        ],
        "spares_needed": bill.spares,
        "simulated": [asdict(one) | {"way": one.way.value} for one in simulated],
    }


def flattened(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Values by their path with dots."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def percent(fraction: float) -> str:
    """Three digits that count."""
    value = 100 * fraction
    return f"{value:.3g} %" if value < 1000 else f"{value:.0f} %"
