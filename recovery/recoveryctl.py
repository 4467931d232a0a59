"""`recoveryctl`: look at a running proxyd, order drills, read logs."""

from __future__ import annotations

from typing import Annotated

import typer

from understudy.recovery.commands import (
    campaign,
    certificates,
    cost,
    drill,
    history,
    hosts,
    log,
    migration,
    samples,
    snapshots,
    status,
)
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


app.add_typer(log.app, name="log")
app.command("drill")(drill.drill)
app.add_typer(snapshots.app, name="snapshots")
app.add_typer(samples.app, name="samples")
migration.add_to(app)
app.add_typer(certificates.app, name="certs")
app.command("hosts")(hosts.hosts)
app.command("cost")(cost.cost)
app.add_typer(campaign.app, name="campaign")
app.command("history")(history.history)
app.command("status")(status.status)


def main() -> int:
    """Entry point."""

    def work() -> int:
        check_variables(PROGRAM)
        return ends_of_app(PROGRAM, app)

    return ends_of(PROGRAM, work)


if __name__ == "__main__":
    raise SystemExit(main())
