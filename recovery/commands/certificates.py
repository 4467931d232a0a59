"""`recoveryctl certs`: who may talk to whom in a cluster of several hosts.  No proxyd is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from understudy.recovery.membership.network import certificates
from understudy.recovery.text.tables import make_console

app = typer.Typer(no_args_is_help=True, help="Certificates for proxyd --listen.")

DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Where they lie.")]


@app.command()
def init(
    directory: DirectoryArgument,
    cluster: Annotated[str, typer.Option(help="Its name, for those who look at them.")] = "default",
) -> None:
    """Make a certificate authority for a cluster."""
    certificates.make_authority(directory, cluster)
    typer.echo(f"made {directory}/ca.pem, which every host needs, and {directory}/ca.key, which none does")


@app.command()
def issue(
    directory: DirectoryArgument,
    host: Annotated[str, typer.Argument(help="As proxyd --host-name.")],
    address: Annotated[
        list[str] | None, typer.Option(help="Of the host, where others know it by that: an etcd, for one.")
    ] = None,
    days: Annotated[int, typer.Option(help="How long it is valid.")] = certificates.HOST_DAYS,
) -> None:
    """Make a certificate and a key for a host."""
    certificates.issue(directory, host, address or (), days)
    certificate, key = certificates.host_files(directory, host)
    typer.echo(f"made {certificate} and {key}: bring them, and ca.pem, to {host}, for proxyd --certs")


@app.command()
def show(directory: DirectoryArgument) -> None:
    """What lies there, and how long it is valid."""
    table = Table()
    for heading in ("name", "addresses", "valid from", "until", "problem"):
        table.add_column(heading)
    for one in certificates.show(directory):
        table.add_row(
            one.name, ", ".join(one.addresses) or "–", one.begins.isoformat(" ", "minutes"),
            one.expires.isoformat(" ", "minutes"), one.problem or "–",
        )  # fmt: skip
    make_console().print(table)
