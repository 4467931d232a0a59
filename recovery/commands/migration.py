"""`recoveryctl doctor`, `preflight` and `migrate`: whether workers can be moved, and moving one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.errors import BadInput, ExitStatus, Failure
from understudy.recovery.machine.criu import find
from understudy.recovery.migration.places import parse_place
from understudy.recovery.migration.preflight.doctor import Check, Verdict, examine, look
from understudy.recovery.migration.preflight.survey import survey, trouble_of_machine
from understudy.recovery.run.asking import JobOption, SocketOption, ask, get_status
from understudy.recovery.text.tables import make_console

JsonOption = Annotated[bool, typer.Option("--json", help="For programs.")]


def add_to(app: typer.Typer) -> None:
    """Make them commands of `recoveryctl`."""
    app.command()(doctor)
    app.command()(preflight)
    app.command()(migrate)
    app.command()(drain)


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
        raise typer.Exit(ExitStatus.FOUND_BAD)


def preflight(
    job: Annotated[str, typer.Option("--job", help="Only this job's workers.")] = "",
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """What stands in the way of moving workers, now.  Exit status 1 if anything does."""
    ranks = [rank for rank in get_status(socket, job).ranks if job in ("", rank.job)]
    if job and not ranks:
        raise Failure(f"no rank of a job {job} is running")
    sentences = [text for rank in ranks if not rank.host for text in survey(rank.rank, rank.worker_pid)]
    for rank in ranks:
        if rank.host and rank.migratable.startswith("no"):
            sentences.append(f"rank {rank.rank}, on host {rank.host}: {rank.migratable}")
    if machine := trouble_of_machine(find()):
        sentences.append(machine)
    if as_json:
        typer.echo(json.dumps({"workers": len(ranks), "obstacles": sentences}, indent=2))
    else:
        for text in sentences or [f"nothing: {len(ranks)} workers could be moved"]:
            typer.echo(text)
    if sentences:
        raise typer.Exit(ExitStatus.FOUND_BAD)


def migrate(
    rank: Annotated[int, typer.Option(help="Whose worker.", min=0)],
    job: JobOption = "",
    criu: Annotated[Path | None, typer.Option(help="Use this CRIU.")] = None,
    images: Annotated[Path | None, typer.Option(help="Where the images lie meanwhile ($TMPDIR).")] = None,
    to: Annotated[str, typer.Option(metavar="DEVICE", help="Go to this device of the host.")] = "",
    socket: SocketOption = None,
) -> None:
    """Take a rank to another device, --to; without it a drill: dump its worker, and restore it in place."""
    if to:
        parse_place(to)
        if criu or images:
            raise BadInput("--criu and --images are of no use with --to: the worker's process stays as it is")
    request = pb.MoveWorkerRequest(
        job=job, rank=rank, criu=str(criu.absolute()) if criu else "",
        images=str(images.absolute()) if images else "", to=to,
    )  # fmt: skip
    reply = ask(socket, lambda daemon: daemon.MoveWorker(request), job)
    if reply.error:
        raise Failure(reply.error)
    typer.echo(reply.detail)


def drain(
    device: Annotated[str, typer.Argument(help="cpu:1, cuda:0")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it be had again, drained or failed.")] = False,
    socket: SocketOption = None,
) -> None:
    """Free a device for maintenance: the rank that has it goes to another one, and nobody new gets it."""
    parse_place(device)
    reply = ask(socket, lambda daemon: daemon.DrainDevice(pb.DrainDeviceRequest(place=device, undo=undo)))
    if reply.error:
        raise Failure(reply.error)
    typer.echo(reply.detail)


def _show(checks: list[Check]) -> None:
    table = Table()
    for heading in ("check", "", "found"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        table.add_row(check.name, check.verdict.value, Text(check.found))
    console = make_console()
    console.print(table)
    for check in checks:
        if check.fix:
            console.print(Text(f"{check.name}: {check.fix}"))
