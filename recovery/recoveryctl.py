"""`recoveryctl`: look at a running proxyd, order drills, read logs."""

from __future__ import annotations

from typing import Annotated

import typer

from understudy.recovery import (
    campaign_command,
    certificate_commands,
    cost_command,
    drill_command,
    history_command,
    host_commands,
    log_commands,
    samples_command,
    snapshot_commands,
    status_command,
)
from understudy.recovery.command_line import (
    CONTEXT,
    STATUSES,
    VERSION,
    check_variables,
    ends_of,
    ends_of_app,
)
from understudy.recovery.migration import commands as migration_commands

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
app.add_typer(samples_command.app, name="samples")
migration_commands.add_to(app)
app.add_typer(certificate_commands.app, name="certs")
app.command("hosts")(host_commands.hosts)
app.command("cost")(cost_command.cost)
app.add_typer(campaign_command.app, name="campaign")
app.command("history")(history_command.history)
app.command("status")(status_command.status)


def main() -> int:
    """Entry point."""

    def work() -> int:
        check_variables(PROGRAM)
        return ends_of_app(PROGRAM, app)

    return ends_of(PROGRAM, work)


if __name__ == "__main__":
    raise SystemExit(main())
