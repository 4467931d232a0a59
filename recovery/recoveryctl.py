"""`recoveryctl`: look at a running proxyd, order drills, read logs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.live import Live

from understudy import replay
from understudy.recovery import certificate_commands, host_commands, snapshot_commands
from understudy.recovery.asking import Failure, JobOption, SocketOption, ask, get_status
from understudy.recovery.command_line import BAD_INPUT, check_variables, say
from understudy.recovery.control import pb
from understudy.recovery.drills import Drill, unknown
from understudy.recovery.faults import BY_NAME
from understudy.recovery.migration import commands as migration_commands
from understudy.recovery.report import account_of_adoption
from understudy.recovery.settings import BadInput
from understudy.recovery.tables import fault_table, log_table, make_console, status_json, status_tables

PROGRAM = "recoveryctl"
SUCCESSOR_S = 20.0
"""How long a drill waits for whoever restarts a proxyd that was killed."""

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Look after a running proxyd.")
log_app = typer.Typer(no_args_is_help=True, help="Read a rank's replay log.")
app.add_typer(log_app, name="log")
app.add_typer(snapshot_commands.app, name="snapshots")
migration_commands.add_to(app)
app.add_typer(certificate_commands.app, name="certs")
app.command("hosts")(host_commands.hosts)


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


@app.command()
def drill(
    fault: Annotated[str, typer.Argument(help="Which; --list names them.")] = "",
    rank: Annotated[int | None, typer.Option(help="Whom it strikes.", min=0)] = None,
    step: Annotated[int | None, typer.Option(help="Minibatch, from 1; without it: now.", min=1)] = None,
    call: Annotated[int | None, typer.Option(help="Record in it, from 1.", min=1)] = None,
    job: JobOption = "",
    socket: SocketOption = None,
    show_list: Annotated[bool, typer.Option("--list", help="Show every fault there is.")] = False,
) -> None:
    """Inject a fault on purpose and show how the job recovers."""
    if show_list:
        make_console().print(fault_table())
        return
    if fault not in BY_NAME:
        raise Failure(f"{unknown(fault)}; recoveryctl drill --list explains them")
    if call and not step:
        raise Failure("--call needs --step")
    if rank is None and not (BY_NAME[fault].by_proxyd and fault != "kill-worker"):
        raise Failure(f"{fault} needs --rank: whom it is to strike")
    order = Drill(fault, rank or 0, step or 0, (call or 1) if step else 0)
    request = pb.DrillRequest(job=job, drill=order.message())
    if fault == "kill-proxyd" and not step:
        _kill_proxyd(socket, request)
        return
    reply = ask(socket, lambda daemon: daemon.OrderDrill(request))
    if reply.error:
        raise Failure(reply.error)
    typer.echo(reply.detail)


def _kill_proxyd(socket: Path | None, request: Any) -> None:
    """The one order whose success is that no answer comes."""
    node = get_status(socket).node
    try:
        reply = ask(socket, lambda daemon: daemon.OrderDrill(request))
    except Failure:
        typer.echo(f"kill-proxyd: proxyd (pid {node.pid}) was killed; {_successor(socket, node.pid)}")
        return
    raise Failure(reply.error or reply.detail)


def _successor(socket: Path | None, former: int) -> str:
    """What became of the jobs, told by the proxyd that adopted them."""
    deadline = time.monotonic() + SUCCESSOR_S
    while time.monotonic() < deadline:
        try:
            status = get_status(socket)
        except Failure:
            time.sleep(0.1)  # nobody tells of a process that is yet to start
            continue
        told = [account_of_adoption(one) for one in status.adoptions if one.former_pid == former]
        return (
            "; ".join(told)
            or f"another one (pid {status.node.pid}) has started, and there was no job to adopt"
        )
    return (
        f"none has followed it within {SUCCESSOR_S:.0f} s: its jobs go on, and one started there adopts them"
    )


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
    make_console().print(log_table(rows, rank, log.tail_index, log.cursor_index))


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
