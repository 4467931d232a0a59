"""`recoveryctl samples`: what proxyrun --samples has written down, judged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from understudy.recovery.base.errors import ExitStatus, Failure

if TYPE_CHECKING:
    from understudy.recovery.samples.verdict import Verdict

app = typer.Typer(no_args_is_help=True, help="Judge which samples a run has used.")
MOST_SHOWN = 12
"""Loaders, by name."""


@app.callback()
def _of_all() -> None:
    """Judge which samples a run has used."""


@app.command("check")
def check(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The DIR of proxyrun --samples.")],
    against: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Another run; it must have had the same samples.")
    ] = None,
    may_repeat: Annotated[
        bool, typer.Option("--may-repeat", help="Samples come again within an epoch on purpose.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Whether a run has used its samples as its samplers promise, and as another run has.

    By the indices of each batch that the script was handed, and by what each minibatch copied to the device.
    """
    from understudy.recovery.samples.judging import judge
    from understudy.recovery.samples.reading import Damaged, read_run

    try:
        mine = read_run(run)
        theirs = None if against is None else read_run(against)
    except Damaged as problem:
        raise FoundDamaged(str(problem)) from None
    verdict = judge(mine, theirs, may_repeat=may_repeat)
    typer.echo(_as_json(verdict) if as_json else _text(verdict, against))
    if not verdict.good:
        raise typer.Exit(ExitStatus.FOUND_BAD)


class FoundDamaged(Failure):
    """What was written down is not as a worker writes it."""

    status = ExitStatus.FOUND_BAD


def _as_json(verdict: Verdict) -> str:
    fields = dataclasses.asdict(verdict)
    fields["offences"] = [str(one) for one in verdict.offences]
    return json.dumps({"good": verdict.good} | fields, indent=2)


def _text(verdict: Verdict, against: Path | None) -> str:
    from understudy.recovery.text.tables import binary_size, printable

    lines = [
        f"{_several(verdict.ranks, 'rank')}, {_several(verdict.attempts, 'attempt')}: "
        f"{_several(verdict.samples, 'sample')} in {_several(verdict.batches, 'batch')}, "
        f"{_several(verdict.minibatches, 'minibatch')} with {binary_size(verdict.bytes)} in "
        f"{_several(verdict.payloads, 'copy')} to the device",
        *verdict.loaders[:MOST_SHOWN],
    ]
    if len(verdict.loaders) > MOST_SHOWN:
        lines.append(f"and {_several(len(verdict.loaders) - MOST_SHOWN, 'loader')} more")
    lines += [f"note: {note}" for note in verdict.notes]
    if verdict.good:
        lines.append("nothing wrong" if against is None else f"nothing wrong, and the same as {against}")
    else:
        again = f", {_several(verdict.repeated, 'sample')} repeated" if verdict.repeated else ""
        lines.append(f"NOT as it should be ({_several(len(verdict.offences), 'time')}{again}); first at")
        lines.append(str(verdict.offences[0]))
    return "\n".join(printable(line) for line in lines)


_PLURALS = {"batch": "batches", "minibatch": "minibatches", "copy": "copies"}


def _several(number: int, name: str) -> str:
    return f"{number} {name if number == 1 else _PLURALS.get(name, name + 's')}"
