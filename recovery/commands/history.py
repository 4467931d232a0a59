"""`recoveryctl history`: what became of jobs, of those that have ended, too.  It asks no proxyd."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from understudy.recovery.base.errors import BadInput, Failure
from understudy.recovery.history.recorder import Event, History, Kind, history_file, read
from understudy.recovery.text.tables import duration, make_console, readable

HEADINGS = ("when", "job", "what", "rank", "step", "took", "outcome")
NUMBERS = (3, 4, 5)
"""Columns that are aligned at their right."""
SHORTEST_JOB, SHORTEST_OUTCOME = 8, len("recovered r-7f3a9c")
"""Letters that these columns get, however narrow the terminal is."""
LONGEST_CELL = 26
"""Letters of what a file may have anything in."""
WIDE = 100
"""Columns from which on times have their year."""
BAD = ("given up", "DIFFERS", "stayed", "never fired", "not in order")
"""How outcomes begin that somebody has to know of: their reason is told, too."""
INDENT = "    "
KINDS = tuple(kind.value for kind in Kind)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def history(
    job: Annotated[str, typer.Option(help="Of this one only; the beginning of its name will do.")] = "",
    last: Annotated[int, typer.Option(help="The newest of them.", min=1)] = 50,
    kind: Annotated[str, typer.Option(help=f"Only these: {', '.join(KINDS)}.")] = "",
    since: Annotated[str, typer.Option(metavar="TIME", help="None that is older: 90s, 30m, 2h, 7d.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="The lines of the file, for programs.")] = False,
) -> None:
    """Recoveries, moves, drills, adoptions, failed validations, starts and ends of jobs; newest last.

    Of running jobs and of ended ones, from proxyd's own file, whether or not one runs.
    """
    began_ms = int((time.time() - seconds_of(since)) * 1000) if since else 0
    path = history_file()
    try:
        found = read(path)
    except OSError as problem:
        raise Failure(f"the history {path} cannot be read: {problem.strerror}") from problem
    kinds = {*KINDS, *(event.kind for event in found.events)}
    if kind and kind not in kinds:
        raise BadInput(f"--kind {kind!r} is no kind of event: there are {', '.join(sorted(kinds))}")
    events = found.events if as_json else with_durations(found.events)
    wanted = chosen(events, job, kind, began_ms)
    if found.nonsense:
        typer.echo(f"{path}: lines that make no sense, left out: {found.nonsense}", err=True)
    if not wanted:
        given = {"--job": job, "--kind": kind, "--since": since}
        options = " ".join(f"{flag} {value}" for flag, value in given.items() if value)
        typer.echo(account_of_nothing(path, found, options), err=as_json)
    elif as_json:
        typer.echo("\n".join(event.line() for event in wanted[-last:]))
    else:
        _show(wanted, last)


def _show(wanted: Sequence[Event], last: int) -> None:
    console = make_console()
    if len(wanted) > last:
        console.print(Text(f"the last {last} of {len(wanted)} events", style="dim"), soft_wrap=True)
    for line, bad in table(wanted[-last:], console.width):
        told = line.encode(console.encoding, "replace").decode(console.encoding)
        console.print(Text(told, style="red" if bad else ""), soft_wrap=True)


def seconds_of(text: str) -> float:
    """`90s`, `2h`, `1.5d`; raises BadInput."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([smhdw])", text.strip())
    if not found:
        raise BadInput(f"--since {text!r} is no time: write for example 90s, 30m, 2h or 7d")
    return float(found[1]) * _UNITS[found[2]]


def chosen(events: Sequence[Event], job: str, kind: str, since_ms: int) -> list[Event]:
    """`job`, `kind`: "" for all; a job's name may be cut short if none is called so."""
    known = {event.job for event in events}
    jobs = {job} if job in known else {name for name in known if name.startswith(job)}
    return [
        event
        for event in events
        if event.job in jobs and kind in ("", event.kind) and event.at_ms >= since_ms
    ]


def account_of_nothing(path: Path, found: History, options: str) -> str:
    """`options`: by which events were chosen."""
    if found.events:
        return f"none of the {len(found.events)} events in the history {path} fits {options}"
    if path.exists():
        return f"the history {path} is empty"
    return f"there is no history yet: no proxyd has written to {path}"


def with_durations(events: Sequence[Event]) -> list[Event]:
    """Ends of jobs get the time since their start, if that is still known."""
    started: dict[str, int] = {}
    told = []
    for event in events:
        if event.kind == Kind.START:
            started[event.job] = event.at_ms
        elif event.kind == Kind.END and event.job in started:
            event = replace(event, seconds=max(0, event.at_ms - started.pop(event.job)) / 1000)
        told.append(event)
    return told


# ------------------------------------------------------------------ the table
def table(events: Sequence[Event], width: int) -> Iterator[tuple[str, bool]]:
    """Lines, and whether somebody has to know of what they say.

    An outcome for which there is no room is below, and so is the reason of one that is bad.
    """
    hosts = {readable(event.more.get("host")) for event in events}
    rows = [_cells(event, width >= WIDE, len(hosts) > 1) for event in events]
    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]
    fixed = sum(widths) - widths[1] - widths[-1] + len(widths) - 1
    widths[1] = max(SHORTEST_JOB, min(widths[1], width - fixed - SHORTEST_OUTCOME))
    widths[-1] = max(SHORTEST_OUTCOME, width - fixed - widths[1])
    yield _line(HEADINGS, widths), False
    for event, row in zip(events, rows, strict=True):
        bad = event.outcome.startswith(BAD)
        fits = len(row[-1]) <= widths[-1]
        yield _line(row if fits else (*row[:-1], ""), widths), bad
        reason = readable(event.more.get("reason")) if bad else ""
        for text in ("" if fits else row[-1], reason):
            for line in textwrap.wrap(
                text, max(SHORTEST_OUTCOME, width), initial_indent=INDENT, subsequent_indent=INDENT
            ):
                yield line, bad


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        cell.rjust(room) if i in NUMBERS else cell.ljust(room)
        for i, (cell, room) in enumerate(zip(row, widths, strict=True))
    ]
    cells[1] = cells[1][: widths[1]]
    return " ".join(cells).rstrip()


def _cells(event: Event, with_year: bool, with_host: bool) -> tuple[str, ...]:
    when = datetime.fromtimestamp(event.at_ms / 1000).astimezone()
    outcome = " ".join(readable(text) for text in (event.outcome, event.id) if text)
    if with_host and (host := readable(event.more.get("host"))):
        outcome += f", on {host}"
    return (
        when.strftime("%Y-%m-%d %H:%M:%S" if with_year else "%m-%d %H:%M:%S"),
        readable(event.job) or "-",
        _what(event)[:LONGEST_CELL],
        "-" if event.rank is None else _number(event.rank),
        "-" if event.step is None else _number(event.step),
        "-" if event.seconds is None else duration(event.seconds),
        outcome,
    )


def _what(event: Event) -> str:
    if event.kind == Kind.RECOVERY:
        return readable(event.what) or event.kind
    if event.kind == Kind.DRILL:
        return f"drill {readable(event.what)}"
    if event.kind not in KINDS:
        return f"{event.kind} (unknown)"
    return event.kind


def _number(number: int) -> str:
    return str(number) if number < 10**9 else f"{number:.1e}"
