"""`recoveryctl status`: who trains here, how fast, and what is wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from understudy.recovery.base.errors import BadInput, Failure
from understudy.recovery.history.recorder import now_ms
from understudy.recovery.run.asking import JobOption, SocketOption, all_status
from understudy.recovery.text.status_text import Line, job_heading, rank_lines, status_lines
from understudy.recovery.text.tables import make_console, ranks_table, status_json
from understudy.recovery.text.view import view_of

AGAIN_S = 1.0
Statuses = Mapping[Path, Any]


def status(
    rank: Annotated[int | None, typer.Argument(help="All that is known of this one.", min=0)] = None,
    socket: SocketOption = None,
    job: JobOption = "",
    wide: Annotated[
        bool, typer.Option("--wide", help="Every number of every rank; needs 240 columns.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it, until Ctrl-C.")] = False,
) -> None:
    """Jobs, their ranks and devices: of the node's proxyd, and of those that runs have of their own."""
    if watch and (as_json or wide or rank is not None):
        raise BadInput("--watch shows all, and nothing else: leave out RANK, --json and --wide")

    def look() -> Statuses:
        return {path: _only(found, job) for path, found in all_status(socket).items()}

    if as_json:
        typer.echo(json.dumps(_as_json(look(), rank), indent=2))
    elif watch:
        _watch(look)
    else:
        console = make_console()
        found = look()
        _print(
            console, rank_lines(_the_rank(found, rank)) if rank is not None else _lines(found, console.width)
        )
        for one in found.values() if wide else ():
            console.print(ranks_table(one.ranks))


def _only(found: Any, job: str) -> Any:
    """What is told of one job; everything if none is named."""
    for rows in (found.ranks, found.jobs) if job else ():
        name = "job" if rows is found.ranks else "name"
        kept = [row for row in rows if getattr(row, name) == job]
        del rows[:]
        rows.extend(kept)
    return found


def _the_rank(found: Statuses, rank: int) -> Any:
    fitting = [one for status in found.values() for one in status.ranks if one.rank == rank]
    if not fitting:
        there = sorted({one.rank for status in found.values() for one in status.ranks})
        raise Failure(f"there is no rank {rank}; there are: {', '.join(map(str, there)) or 'none'}")
    if len(fitting) > 1:
        jobs = ", ".join(sorted(one.job for one in fitting))
        raise Failure(f"several jobs have a rank {rank}: name one with --job ({jobs})")
    return fitting[0]


def _as_json(found: Statuses, rank: int | None) -> Any:
    """What one proxyd says; what several say, by socket."""
    if rank is not None:
        _the_rank(found, rank)
        (whole,) = (status_json(one) for one in found.values() if any(r.rank == rank for r in one.ranks))
        return next(row for row in whole["ranks"] if row["rank"] == rank)
    told = {str(path): status_json(one) for path, one in found.items()}
    return next(iter(told.values())) if len(told) == 1 else told


def _lines(found: Statuses, width: int) -> Iterator[Line]:
    now = now_ms()
    for number, (path, one) in enumerate(found.items()):
        if len(found) > 1:
            yield f"{'' if number == 0 else chr(10)}{path}", False
        yield from status_lines(view_of(one, now), width)


def _print(console: Console, lines: Iterator[Line]) -> None:
    for line, bad in lines:
        console.print(Text(line, style="bold red" if bad else ""), soft_wrap=True)


def _watch(look: Callable[[], Statuses]) -> None:
    """On a screen of its own; where there is no terminal, a line for each job now and then."""
    console = make_console()
    try:
        if not console.is_terminal:
            return _follow(look)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(_page(look(), console.width), refresh=True)
                time.sleep(AGAIN_S)
    except KeyboardInterrupt:  # how it is meant to end
        return


def _page(found: Statuses, width: int) -> Group:
    head = Text(f"{datetime.now().strftime('%H:%M:%S')}  recoveryctl status --watch, Ctrl-C ends it", "dim")
    return Group(head, *(Text(line, style="bold red" if bad else "") for line, bad in _lines(found, width)))


def _follow(look: Callable[[], Statuses]) -> None:
    while True:
        when = datetime.now().strftime("%H:%M:%S")
        jobs = [job for one in look().values() for job in view_of(one, now_ms()).jobs]
        for line in [job_heading(job) for job in jobs] or ["no job runs"]:
            typer.echo(f"{when} {line}")
        time.sleep(AGAIN_S)
