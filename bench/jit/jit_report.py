"""docs/reports/jit.md: what a fault costs under `understudy.jit`, and what none costs.

    .venv/bin/python bench/jit/jit_report.py bench/results/jit.json [--output FILE]

writes the page anew from what was measured; `make bench-jit` does so itself.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fault_plan import EVERY
from fault_runs import LAUNCHERS_PATIENCE_S
from jit_results import WAYS, Results
from machine import ROOT
from markdown_tables import table
from recovery_parts import PAPERS_RESTORE, PARTS, Recovery
from steady_cost import AIM, NAMES, Cost, Spread

REPORT = ROOT / "docs" / "reports" / "jit.md"
KINDS = {"kill": "A rank is killed (SIGKILL)", "stop": "A rank is stopped (SIGSTOP)"}
TITLES = {"jit": "`understudy.jit`", "periodic": f"`torchrun`, a checkpoint every {EVERY} steps"}
STEADY = (
    "model", "parameters", "step, ms", "in turns", "pairs", "boundary, µs", "hooks, µs", "threads, µs", "own",
    f"≤ {100 * AIM:g} %", "own is within it from a step of",
)  # fmt: skip
TABLE_4 = (
    ("BERT-L-PT", "8 × V100", 5.0, 9.9, 14.8, 0.418, "0.00003"),
    ("BERT-B-FT", "8 × V100", 1.4, 8.8, 10.1, 0.416, "0"),
    ("GPT2-S", "4 × A100", 3.8, 7.2, 10.35, 0.629, "0.00001"),
    ("GPT2-XL", "8 × V100", 6.7, 14.0, 20.6, 2.632, "0"),
    ("GPT2-8B", "16 × V100", 18.8, 28.6, 46.9, 2.953, "0"),
    ("GPT2-18B", "32 × V100", 20.5, 34.2, 54.8, 3.474, "0"),
    ("T5-3B", "8 × A100", 7.6, 35.25, 42.65, 0.498, "0"),
    ("ViT", "8 × V100", 4.6, 20.2, 24.4, 0.292, "0"),
)
"""Of paper 001: model, GPUs (Table 2), checkpoint, restore, JIT recovery, minibatch, overhead; seconds."""


def render(results: Results) -> str:
    """The page."""
    sections = [_head(results)]
    sections += [_of_kind(results, kind) for kind in KINDS if _of(results, "jit", kind)]
    sections += [_beside_the_paper(results), _steady(results), _losses(results)]
    return "\n".join(line for section in sections for line in [*section, ""])


def _head(results: Results) -> list[str]:
    machine, setting = results.machine, results.setting
    return [
        "# Just-in-time checkpoints: what a fault costs, and what none costs",
        "",
        _text(f"""Written by `{results.command}` ([how](../../bench/README.md)); not to be edited.
        {machine["date"]}, commit {machine["commit"]} (+: with changes), {machine["cores"]} ×
        {machine["cpu"]}, PyTorch {machine["torch"]}, Python {machine["python"]}; load average
        {machine["load_before"]:.1f} before and {machine["load_after"]:.1f} behind it, the run's own
        included; {results.took / 60:.1f} minutes; seed {results.seed}."""),
        "",
        _text(f"""Two ranks of a training under `torchrun --max-restarts`: a character-level GPT in
        `DistributedDataParallel`, Gloo, AdamW, dropout, one thread a rank, {1000 * results.step:.0f} ms a
        step. Both ways in turns, with the same faults: `understudy.jit`, and without it a checkpoint
        every {EVERY} steps, by a `StatePack` that lets the ranks wait until it is durable. Rank and step
        of a fault are drawn: it falls anywhere between two checkpoints, behind a forward pass.
        `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` for both. The time-out of collectives is
        {setting["timeout"]:g} s (PyTorch's own: 1800), `minimum_stall` {setting["minimum_stall"]:g} s
        (`jit`'s own: 30)."""),
        "",
        _text("""Seconds, medians (10th to 90th percentile). Each part ends when both ranks have come to
        its end. Medians of parts need not add up to the median of the total; in each recovery all parts,
        and what is not accounted for, are the total."""),
    ]


def _of_kind(results: Results, kind: str) -> list[str]:
    found = {way: _of(results, way, kind) for way in WAYS}
    counts = " and ".join(str(len(one)) for one in found.values())
    rows = [[f"{name}: {what}", *(_part(found[way], name) for way in WAYS)] for name, what in PARTS.items()]
    rows.append(["unaccounted", *(_spread(found[way], lambda one: one.unaccounted) for way in WAYS)])
    rows.append(
        [
            "**fault to first new step**",
            *(f"**{_spread(found[way], lambda one: one.total)}**" for way in WAYS),
        ]
    )
    rows.append(["steps done once more", *(_redone(found[way]) for way in WAYS)])
    return [
        f"## {KINDS[kind]}",
        "",
        *table([f"{counts} times", *(TITLES[way] for way in WAYS)], rows),
        "",
        *(f"{TITLES[way]}: first noticed by {_noticed(found[way])}." for way in WAYS),
        *(_patience(results) if kind == "stop" else []),
    ]


def _patience(results: Results) -> list[str]:
    own, here = LAUNCHERS_PATIENCE_S, results.setting["patience"]
    cut_short = f"""The process was killed after {here:g} s here: add {own - here:g} s to *ended*, and to
    the total, of both."""
    return [
        "",
        _text(f"""`torchrun` waits {own:g} s for a process that SIGTERM does not end, as a stopped one,
        and takes no option for that where it restarts a job. {cut_short if here < own else ""}"""),
        _text(f"""Without `jit` nothing but the time-out of collectives notices a stopped rank: *noticed*
        is {results.setting["timeout"]:g} s because that was set, and would be 1800 s by itself."""),
    ]


def _beside_the_paper(results: Results) -> list[str]:
    kills = _of(results, "jit", "kill")
    saved = Spread.of([one.parts.get("saved", 0.0) for one in kills])
    restored = Spread.of([sum(one.parts.get(name, 0.0) for name in PAPERS_RESTORE) for one in kills])
    whole = Spread.of([one.as_in_the_paper for one in kills])
    own = ["this, a rank killed", f"{results.machine['cores']} CPU cores"]
    own += [f"{one.median:.2f}" for one in (saved, restored, whole)]
    gpt = next((cost for cost in results.steady if cost.model == "gpt"), None)
    own += [f"{results.step:.3f}", f"{gpt.spent:.5f}" if gpt is not None else "–"]
    rows = [
        [model, where, *(f"{one:g}" for one in seconds), over] for model, where, *seconds, over in TABLE_4
    ]
    return [
        "## Beside Table 4 of the paper",
        "",
        _text("""The paper's seconds are of **other machines**, models and frameworks, on GPUs with NCCL:
        they say in which order of magnitude its parts lie, no more. It counts from when a fault has been
        noticed, and without the launcher (paper 001, §6.4); so the last row has *saved*, and *imports* to
        *loaded* as what the paper calls restoring. An overhead of 0 is one that the paper could not
        measure; ours is *own* below."""),
        "",
        *table(
            ["model", "on", "checkpoint", "restore", "JIT recovery", "minibatch", "overhead"], [*rows, own]
        ),
    ]


def _steady(results: Results) -> list[str]:
    lines = [
        "## While nothing fails",
        "",
        _text(f"""Two ranks, blocks of steps with and without `jit` in turns in the same processes; aim: ≤
        {100 * AIM:g} % of a step. *In turns*: the ratio of two neighbouring blocks' median steps, less 1;
        its spread is mostly the machine's. *Own*: what `jit` was seen to spend in a step:
        `jit.boundary()`, the hooks that PyTorch calls, and the processors' time of its threads. The aim
        counts as met if both are within it, as not met if *own* is not, and as not shown if only *own*
        is."""),
        "",
        *(
            table(STEADY, map(_cost, results.steady))
            if results.steady
            else ["Not measured: the bench ended before."]
        ),
    ]
    if (spent := results.checkpoint) is not None:
        share = spent.median / (spent.median + EVERY * results.step)
        lines += [
            "",
            _text(f"""Periodic checkpoints cost something while nothing fails, too: one kept the ranks of
            the training above for {_milliseconds(spent)} ms ({spent.count} of them), {100 * share:.1f} %
            of the time at one every {EVERY} steps."""),
        ]
    return lines


def _cost(cost: Cost) -> list[str]:
    ratio = cost.ratio
    turns = [f"{100 * (one - 1):+.2f} %" for one in (ratio.median, ratio.low, ratio.high)]
    return [
        NAMES.get(cost.model, cost.model),
        f"{cost.parameters:,}",
        f"{1000 * cost.step:.2f}",
        f"{turns[0]} ({turns[1]} to {turns[2]})",
        str(ratio.count),
        *(f"{1e6 * one:.0f}" for one in (cost.boundary, cost.hooks, cost.threads)),
        f"{100 * cost.own:.2f} %",
        f"**{cost.verdict}**",
        f"{1000 * cost.enough:.0f} ms",
    ]


def _losses(results: Results) -> list[str]:
    lines = [
        "## Losses",
        "",
        _text(f"""All {results.losses:,} losses of both ranks in all jobs, those of steps that were done
        once more included, were compared with those of a job without faults, without `jit` and without
        checkpoints: the same, bit for bit. Otherwise there would be no report."""),
    ]
    if results.repeated:
        lines += ["", "Jobs without `jit` that were run once more:", ""]
        lines += [f"- {why}" for why in results.repeated]
    return lines


def _text(wrapped: str) -> str:
    """A paragraph as one line."""
    return " ".join(wrapped.split())


def _of(results: Results, way: str, kind: str) -> list[Recovery]:
    return [one for one in results.recoveries[way] if one.kind == kind]


def _part(found: Sequence[Recovery], name: str) -> str:
    """A dash where it does not exist."""
    if not any(name in one.parts for one in found):
        return "–"
    return _spread(found, lambda one: one.parts.get(name, 0.0))


def _spread(found: Sequence[Recovery], seconds: Callable[[Recovery], float]) -> str:
    spread = Spread.of([seconds(one) for one in found])
    return f"{spread.median:.3f} ({spread.low:.3f} to {spread.high:.3f})"


def _redone(found: Sequence[Recovery]) -> str:
    spread = Spread.of([one.redone for one in found])
    return f"{spread.median:g} ({min(one.redone for one in found)} to {max(one.redone for one in found)})"


def _noticed(found: Sequence[Recovery]) -> str:
    counts = Counter(one.noticed_by for one in found).most_common()
    return ", ".join(f"{who} ({count})" for who, count in counts)


def _milliseconds(spread: Spread) -> str:
    return f"{1000 * spread.median:.0f} ({1000 * spread.low:.0f} to {1000 * spread.high:.0f})"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, help="bench/results/jit.json")
    parser.add_argument("--output", type=Path, default=REPORT)
    chosen = parser.parse_args(arguments)
    try:
        page = render(Results.read(chosen.results))
    except (OSError, ValueError, TypeError, KeyError) as problem:
        print(f"jit_report: {chosen.results} is none that `make bench-jit` wrote: {problem}", file=sys.stderr)
        return 2
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    chosen.output.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
