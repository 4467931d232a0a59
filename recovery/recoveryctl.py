"""`recoveryctl`: look at a running proxyd, order drills, read logs."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer
from rich.live import Live

from understudy.recovery import (
    certificate_commands,
    drill_command,
    history_command,
    host_commands,
    log_commands,
    snapshot_commands,
)
from understudy.recovery.asking import SocketOption, get_status
from understudy.recovery.command_line import (
    CONTEXT,
    STATUSES,
    VERSION,
    check_variables,
    ends_of,
    ends_of_app,
)
from understudy.recovery.migration import commands as migration_commands
from understudy.recovery.tables import make_console, status_json, status_tables

PROGRAM = "recoveryctl"

app = typer.Typer(
    no_args_is_help=True, help="Look after a running proxyd.", epilog=STATUSES, context_settings=CONTEXT
)


@app.callback()
def _of_all(version: Annotated[bool, VERSION] = False) -> None:
    """Options of recoveryctl itself."""


app.add_typer(log_commands.app, name="log")
app.command("drill")(drill_command.drill)
app.add_typer(snapshot_commands.app, name="snapshots")
migration_commands.add_to(app)
app.add_typer(certificate_commands.app, name="certs")
app.command("hosts")(host_commands.hosts)
app.command("history")(history_command.history)


@app.command()
def status(
    socket: SocketOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it.")] = False,
) -> None:
    """Devices, servers, sessions and ranks."""
    if as_json:
        typer.echo(json.dumps(status_json(get_status(socket)), indent=2))
        return
    console = make_console()
    if not watch:
        console.print(status_tables(get_status(socket)))
        return
    with Live(status_tables(get_status(socket)), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(0.5)
            live.update(status_tables(get_status(socket)), refresh=True)


def main() -> int:
    """Entry point."""

    def work() -> int:
        check_variables(PROGRAM)
        return ends_of_app(PROGRAM, app)

    return ends_of(PROGRAM, work)


if __name__ == "__main__":
    raise SystemExit(main())
