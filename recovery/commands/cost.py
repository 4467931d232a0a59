"""`recoveryctl cost`: what failures cost a job, and what each way of recovering would save."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from understudy.recovery.base.errors import BadInput, ExitStatus, NobodyAnswers

if TYPE_CHECKING:
    from understudy.recovery.costs.given.reading import Known, Name

MOST_MONTHS = 100_000


def cost(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Inputs, YAML; --example shows one.")
    ] = None,
    measured: Annotated[
        list[Path] | None,
        typer.Option("--measured", help="JSON of make bench or proxyrun --report; the file goes before."),
    ] = None,
    from_running: Annotated[
        str,
        typer.Option("--from-running", metavar="JOB", help="What is known of it, and its faults."),
    ] = "",
    socket: Annotated[Path | None, typer.Option(help="Of the proxyd that has the running job.")] = None,
    simulate: Annotated[
        int,
        typer.Option(
            help="So many simulated months beside the formulas, one seed each.", min=0, max=MOST_MONTHS
        ),
    ] = 0,
    plot: Annotated[Path | None, typer.Option(help="A PNG of it all over the number of GPUs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    example: Annotated[bool, typer.Option("--example", help="Print a file of inputs, and end.")] = False,
) -> None:
    """What failures waste, in GPU-hours and money a month: by formulas of paper 001, and simulated.

    No proxyd is needed, but for --from-running.
    """
    from rich.console import Console

    from understudy.recovery.costs import comparing, text
    from understudy.recovery.costs.bill import bill_of
    from understudy.recovery.costs.given import measured as measuring
    from understudy.recovery.costs.given import reading
    from understudy.recovery.text.tables import make_console

    if example:
        typer.echo(reading.EXAMPLE.read_text(), nl=False)
        return
    if file is None and not measured and not from_running:
        raise BadInput("a FILE of inputs is needed; recoveryctl cost --example prints one")
    read = reading.combined(
        {} if file is None else reading.of_file(file),
        _of_running(from_running, socket) if from_running else {},
        *(measuring.of_file(path) for path in measured or ()),
    )
    bill = bill_of(read.inputs)
    if plot is not None:
        from understudy.recovery.costs.plots import draw

        draw(read.inputs, bill, plot)
    found = []
    for line in bill.lines if simulate else ():
        with Console(stderr=True).status(f"{simulate} months of {line.way.value}"):
            found.append(comparing.simulated(read.inputs, line.way, simulate))
    if as_json:
        typer.echo(json.dumps(text.as_json(read, bill, found), indent=2))
    else:
        console = make_console()
        console.print(text.origins_table(read))
        console.print(text.bill_table(bill))
        for sentence in text.remarks(bill, read):
            console.print(sentence, markup=False, highlight=False)
        if found:
            console.print(text.simulated_table(found))
        if read.inputs.ours is not None and not measured and not from_running:
            console.print("ours: its times are the file's, nothing of them was measured by this command")
    if not bill.lines:
        raise typer.Exit(ExitStatus.FOUND_BAD)


def _of_running(job: str, socket: Path | None) -> dict[Name, Known]:
    """What a running job's status says, and its recoveries in the history."""
    from understudy.recovery.costs.given.measured import of_job
    from understudy.recovery.history.recorder import Kind, history_file, read
    from understudy.recovery.run.asking import get_status

    ranks = [rank for rank in get_status(socket, job).ranks if rank.job == job]
    if not ranks:
        raise NobodyAnswers(f"no job {job} runs there; recoveryctl status lists them")
    try:
        events = [event for event in read(history_file()).events if event.job == job]
    except OSError:
        events = []
    began_ms = max((event.at_ms for event in events if event.kind == Kind.START), default=0)
    recoveries = [
        dict(event.more) for event in events if event.kind == Kind.RECOVERY and event.at_ms >= began_ms
    ]
    return of_job(job, ranks, recoveries, max(0.0, time.time() - began_ms / 1000) if began_ms else 0.0)
