"""`recoveryctl doctor`: whether this machine can do what we offer."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recovery.migration.doctor import Check, Verdict, examine, look

JsonOption = Annotated[bool, typer.Option("--json", help="For programs.")]
FOUND_SOMETHING = 1
"""Exit status of a look that found what stands in the way."""


def add_to(app: typer.Typer) -> None:
    """Make them commands of `recoveryctl`."""
    app.command()(doctor)


def doctor(
    criu: Annotated[Path | None, typer.Option(help="Use this CRIU.")] = None,
    persist: Annotated[Path | None, typer.Option(help="Look at this directory of snapshots, too.")] = None,
    as_json: JsonOption = False,
) -> None:
    """What this machine lacks, and how to get it.  Needs no proxyd; exit status 1 if something is bad."""
    checks = examine(look(criu, persist))
    if as_json:
        typer.echo(json.dumps({"checks": [asdict(check) for check in checks]}, indent=2))
    else:
        _show(checks)
    if any(check.verdict is Verdict.BAD for check in checks):
        raise typer.Exit(FOUND_SOMETHING)


def _show(checks: list[Check]) -> None:
    table = Table()
    for heading in ("check", "", "found"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        table.add_row(check.name, check.verdict.value, Text(check.found))
    console = Console()
    console.print(table)
    for check in checks:
        if check.fix:
            console.print(Text(f"{check.name}: {check.fix}"))
