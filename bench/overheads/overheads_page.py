"""The part of docs/cost.md on paper 001's Table 3, from what `make bench-overheads` measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import markdown_tables
from overheads_results import (
    CHECKFREQ,
    DISK,
    MEMORY,
    PERIODIC,
    SIZES,
    Model,
    Results,
    daily_percent,
    hours_between,
    optimal_percent,
)
from steady_cost import Spread

from understudy.campaigns.report.statistics import NO_DIFFERENCE, Estimate
from understudy.recovery.costs.given import paper

TITLE = "Table 3 in full, measured here"
NOT_MEASURED = "Not measured: `make bench-overheads` has not been run where this page was made."
NAMES = {
    "adam_gpt": "GPT, AdamW (`adam_gpt.py`)",
    "resnet18": "ResNet-18, SGD with momentum (`resnet18_cifar.py`)",
}
SHARES = ("PC_disk", "PC_mem", "CheckFreq", "PC_1/day", "JIT-C", "ours", "ours: snapshots")
PAPERS = (paper.PC_DISK, paper.PC_MEM, paper.CHECKFREQ, paper.PC_DAILY, paper.JIT_C)
"""Its columns, as SHARES has them."""


def measured_part(path: Path) -> str:
    """From the JSON; a sentence if there is none.  Raises as `Results.read` for what is no such JSON."""
    return section(Results.read(path) if path.exists() else None)


def section(results: Results | None) -> str:
    """In Markdown, with its heading."""
    if results is None:
        return f"\n## {TITLE}\n\n{NOT_MEASURED}\n"
    paragraphs = [
        f"## {TITLE}",
        _head(results),
        _table(
            ["model", "parameters", "state, MB", "minibatch, ms", *(f"o of {way}, s" for way in PERIODIC), "CheckFreq: held, s",
             "`jit`: own code, µs", "ours, ms", "snapshot of ours, s"],
            map(_measured, results.models),
        ),
        _definitions(),
        _table(
            ["", "N", "c* of PC_disk", *(f"{share} %" for share in SHARES)],
            [*(_shares(model, gpus) for gpus in SIZES for model in results.models), *map(_papers, paper.PC_MEM)],
        ),
        _reading(),
    ]  # fmt: skip
    return "\n" + "\n\n".join(one.strip() for one in paragraphs) + "\n"


def _head(results: Results) -> str:
    machine = results.machine
    return _text(f"""Written from `{results.command}` ([how](../bench/README.md)): {machine["date"]}, commit {machine["commit"]}
    (+: with changes), {machine["cores"]} × {machine["cpu"]}, PyTorch {machine["torch"]}, Python {machine["python"]}; load average
    {machine["load_before"]:.1f} before and {machine["load_after"]:.1f} behind it, the run's own included; {results.took / 60:.1f} minutes;
    seed {results.seed}. Medians of rounds (10th to 90th percentile).""")


def _measured(model: Model) -> list[str]:
    minibatch = Spread.of(model.minibatch)
    ours = [one - other for one, other in zip(model.ours.proxied, model.ours.native, strict=True)]
    return [
        NAMES.get(model.name, model.name),
        f"{model.parameters:,}",
        f"{model.state_bytes / 1e6:.0f}",
        _spread(minibatch, 1000, 1),
        *(f"{_spread(model.checkpoint(way), 1, 3)}" for way in PERIODIC),
        f"{model.held(CHECKFREQ):.3f}",
        f"{1e6 * model.jit.own:.0f} of {1000 * model.jit.minibatch:.1f} ms ({100 * model.jit.own / model.jit.minibatch:.2f} %)",
        _spread(Spread.of(ours), 1000, 1),
        _spread(Spread.of(model.ours.snapshots), 1, 3),
    ]


def _definitions() -> str:
    return _text(f"""*o* is what one checkpoint adds to the training: PC_disk and PC_mem (`torch.save`, `fsync`; to a disk, to a tmpfs) hold it
    until they return; CheckFreq copies during the next forward and backward pass, the update waits for that (*held*), and steps beside its write
    may be slower, which counts until it has ended. Percentages are the paper's: c* o for the periodic ways, with f = {paper.FAILURES_PER_GPU_DAY:g} per GPU
    and day and c* = √(N f / 2 o) (eq. 3); in the paper N is each job's own number of GPUs (Table 2), here {SIZES[0]}, the least that has a replica, and
    {SIZES[1]:,}, where o is taken to be the same. PC_1/day is o of PC_mem over a day. JIT-C is `understudy.jit`, two ranks, and *ours* one rank under
    `proxyrun` with what is on by itself, each as percent of a minibatch without it: means of pairs with their 95 % interval. *Ours: snapshots* is c* o
    of `--persist`, to be added if they are wanted.""")


def _shares(model: Model, gpus: int) -> list[str]:
    periodic = [f"{optimal_percent(model.least_checkpoint(way), gpus):.4f}" for way in PERIODIC]
    return [
        NAMES.get(model.name, model.name),
        f"{gpus:,}",
        _often(hours_between(model.least_checkpoint(DISK), gpus)),
        *periodic,
        f"{daily_percent(model.least_checkpoint(MEMORY)):.5f}",
        model.jit_percent.text("", 2),
        model.ours_percent.text("", 2),
        _snapshots(model.snapshot, model.snapshot_seconds, gpus),
    ]


def _snapshots(seconds: float, found: Estimate, gpus: int) -> str:
    """Where rounds show no cost, what it can be at most."""
    if found.shows_a_difference and seconds > 0:
        return f"{optimal_percent(seconds, gpus):.4f}"
    if found.high is None:
        return "once: no interval"
    return f"{NO_DIFFERENCE} (at most {optimal_percent(max(0.0, found.high), gpus):.4f})"


def _papers(name: str) -> list[str]:
    work = paper.BY_NAME[name]
    often = f"{_often(hours_between(work.checkpoint, work.gpus))} (PC_mem)"
    return [f"*paper: {name}*", str(work.gpus), often, *(f"{column[name]:g}" for column in PAPERS), "–", "–"]


def _often(hours: float) -> str:
    return f"every {hours:.1f} h" if hours >= 1 else f"every {60 * hours:.1f} min"


def _reading() -> str:
    gpt = paper.BY_NAME["GPT2-S"]
    return _text(f"""The paper's rows are of **another machine, other models and GPUs**: they say in which order of magnitude things lie, no more.
    Here all is on processors' cores: what is written behind a training, a rank's device server and its snapshots have the second core to themselves
    (periodic ways and ours run with one rank), while under `jit` two ranks have one each. CheckFreq's
    write competes with the training's arithmetic for memory and for Python's lock; beside GPUs that arithmetic is elsewhere. In the paper's terms ours is a steady overhead as JIT-C is, which no
    frequency makes less; it buys recoveries that the table does not show (above, and `recoveryctl cost`). Table 3's JIT-C of {gpt.name} is
    {paper.JIT_C[gpt.name]:g} %, Table 4's overhead over its minibatch {100 * gpt.steady_overhead:.2g} %. PC_1/day follows, cut, from o of Table 4, which is that of PC_mem.""")


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(markdown_tables.table(headings, rows))


def _spread(spread: Spread, factor: float, digits: int) -> str:
    middle, low, high = (f"{factor * one:.{digits}f}" for one in (spread.median, spread.low, spread.high))
    return f"{middle} ({low} to {high})"


def _text(wrapped: str) -> str:
    """A paragraph as one line."""
    return " ".join(wrapped.split())
