"""`recoveryctl campaign`: every way of outliving faults, on the same trainings, under the same faults."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from understudy.recovery.base.errors import BadInput, ExitStatus

app = typer.Typer(help="Compare ways of recovering, by running them.", no_args_is_help=True)


@app.command("run")
def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The campaign, YAML.")],
    directory: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Of its runs; else the file's name, here.")
    ] = None,
) -> None:
    """Make the runs that are not over yet; interrupted or killed, the same command goes on.

    No proxyd is needed. Exit status 1 if a gate is failed.
    """
    from rich.console import Console
    from rich.markup import escape

    from understudy.campaigns.planning import reading
    from understudy.campaigns.running.manifest import Manifest
    from understudy.campaigns.running.runner import Runner

    campaign = reading.of_file(file)
    signal.signal(signal.SIGTERM, _end)
    place = directory or Path(file.stem)
    console = Console(stderr=True)
    with Manifest.of(place, campaign) as manifest, console.status("") as status:

        def told(sentence: str) -> None:
            console.print(sentence, markup=False, highlight=False)

        Runner(manifest, told, lambda sentence: status.update(escape(sentence))).work()
    report(place)


def _end(number: int, frame: FrameType | None) -> None:
    """As Ctrl-C does: what the run under way has started is ended with it."""
    raise SystemExit(128 + number)


@app.command("report")
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Of a campaign's runs.")],
) -> None:
    """One page, report.html, with report.json and figures beside it; exit status 1 if a gate is failed."""
    from understudy.campaigns.report import write

    if not directory.is_dir():
        raise BadInput(f"{directory} is no directory of a campaign's runs")
    written = write(directory)
    typer.echo(f"{written.page}")
    for sentence in written.failures:
        typer.echo(sentence)
    if written.failures:
        raise typer.Exit(ExitStatus.FOUND_BAD)


@app.command("example")
def example() -> None:
    """Print a campaign's file: the one of `make campaign OPTIONS=--quick`."""
    from understudy import campaigns

    typer.echo((Path(campaigns.__file__).parent / "quick.yaml").read_text(), nl=False)
