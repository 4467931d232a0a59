"""`recoveryctl`: look at a running proxyd, order drills, read logs."""

from __future__ import annotations

from typing import Annotated

import typer

from understudy.recovery.commands import campaign as campaign_command
from understudy.recovery.commands import certificates as certificate_commands
from understudy.recovery.commands import cost as cost_command
from understudy.recovery.commands import drill as drill_command
from understudy.recovery.commands import history as history_command
from understudy.recovery.commands import hosts as host_commands
from understudy.recovery.commands import log as log_commands
from understudy.recovery.commands import migration as migration_commands
from understudy.recovery.commands import samples as samples_command
from understudy.recovery.commands import snapshots as snapshot_commands
from understudy.recovery.commands import status as status_command
from understudy.recovery.config.command_line import (
    CONTEXT,
    STATUSES,
    VERSION,
    check_variables,
    ends_of,
    ends_of_app,
)

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
