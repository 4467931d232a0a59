"""`recoveryctl`: look at a running proxyd, order drills, read logs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import grpc
import typer
from rich.console import Console
from rich.live import Live

import replay
from recovery.command_line import BAD_INPUT, check_variables, say
from recovery.control import blocking_channel, pb, rpc, trouble
from recovery.drills import Drill
from recovery.settings import BadInput
from recovery.socket_path import default_socket, is_answering
from recovery.tables import log_table, status_json, status_tables

PROGRAM = "recoveryctl"

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Look after a running proxyd.")
drill_app = typer.Typer(no_args_is_help=True, help="Inject a fault on purpose.")
log_app = typer.Typer(no_args_is_help=True, help="Read a rank's replay log.")
app.add_typer(drill_app, name="drill")
app.add_typer(log_app, name="log")

SocketOption = Annotated[Path | None, typer.Option("--socket", help="Of the proxyd.")]
JobOption = Annotated[str, typer.Option("--job", help="Needed if several jobs run.")]


class Failure(RuntimeError):
    """A sentence for the user; exit status 2."""


def ask(socket: Path | None, question: Callable[[Any], Any]) -> Any:
    """One conversation with proxyd; raises Failure."""
    path = (socket or default_socket()).absolute()
    if not is_answering(path):
        raise Failure(
            f"no proxyd answers at {path}: start one with proxyd --devices cpu:2, or name its --socket"
        )
    try:
        with blocking_channel(path) as channel:
            return question(rpc.DaemonStub(channel))
    except grpc.RpcError as problem:
        raise Failure(f"proxyd at {path} did not answer: {trouble(problem)}") from problem


def get_status(socket: Path | None) -> Any:
    """What proxyd knows now."""
    return ask(socket, lambda daemon: daemon.GetStatus(pb.StatusRequest(), timeout=10))


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
    console = Console()
    if not watch:
        console.print(status_tables(get_status(socket)))
        return
    with Live(status_tables(get_status(socket)), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(0.5)
            live.update(status_tables(get_status(socket)), refresh=True)


@drill_app.command("kill-server")
def kill_server(
    rank: Annotated[int, typer.Option(help="Whose device server.", min=0)],
    step: Annotated[int | None, typer.Option(help="Minibatch, from 1; without it: now.", min=1)] = None,
    call: Annotated[int | None, typer.Option(help="Record in it, from 1.", min=1)] = None,
    job: JobOption = "",
    socket: SocketOption = None,
) -> None:
    """Kill a device server with SIGKILL and show how the job recovers."""
    if call and not step:
        raise Failure("--call needs --step")
    drill = Drill("kill-server", rank, step or 0, (call or 1) if step else 0)
    request = pb.DrillRequest(job=job, drill=drill.message())
    reply = ask(socket, lambda daemon: daemon.OrderDrill(request))
    if reply.error:
        raise Failure(reply.error)
    typer.echo(reply.detail)


@log_app.command("dump")
def dump(
    rank: Annotated[int, typer.Argument(help="Whose log.", min=0)],
    job: JobOption = "",
    records: Annotated[str, typer.Option(help="A:B, by index; without it: the last 50.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    socket: SocketOption = None,
) -> None:
    """Show records of a rank's log as a person would read them."""
    log = replay.Log(_log_directory(get_status(socket), rank, job))
    first, end = parse_range(records, log.tail_index)
    rows = log.dump(first=first, count=max(0, end - first))
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row))
        return
    Console().print(log_table(rows, rank, log.tail_index, log.cursor_index))


def parse_range(text: str, tail_index: int) -> tuple[int, int]:
    """`A:B`, either may be left out -> [A, B); raises Failure."""
    if not text:
        return max(0, tail_index - 50), tail_index
    first, colon, end = text.partition(":")
    if not colon or not all(not part or (part.isascii() and part.isdigit()) for part in (first, end)):
        raise Failure(f"--records {text!r} is no range: write A:B, for example 100:150")
    begin, stop = int(first or 0), int(end) if end else tail_index
    if stop < begin:
        raise Failure(f"--records {text!r} ends before it begins")
    return begin, stop


def _log_directory(status: Any, rank: int, job: str) -> str:
    jobs = sorted({entry.job for entry in status.ranks})
    if not job and len(jobs) > 1:
        raise Failure(f"several jobs run, name one with --job: {', '.join(jobs)}")
    for entry in status.ranks:
        if entry.rank == rank and job in ("", entry.job):
            return str(entry.log_directory)
    raise Failure(f"no rank {rank} is running" + (f" in job {job}" if job else ""))


def main() -> NoReturn:
    """Entry point."""
    try:
        check_variables(PROGRAM)
        app()
    except (Failure, BadInput, replay.LogError) as problem:
        say(PROGRAM, str(problem))
        sys.exit(BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


if __name__ == "__main__":
    main()
