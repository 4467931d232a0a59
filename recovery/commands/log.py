"""`recoveryctl log`: a rank's replay log as a person reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from understudy import replay
from understudy.recovery.base.errors import BadInput, Failure
from understudy.recovery.config.command_line import verbatim
from understudy.recovery.run.asking import JobOption, SocketOption, get_status
from understudy.recovery.text.log_text import Buffers, Origin, lines, log_table, state_names
from understudy.recovery.text.tables import make_console

app = typer.Typer(no_args_is_help=True, help="Read a rank's replay log.")

LAST = 50
"""Records that are shown if none are named."""
MOST = 1000
"""That one table holds."""
AT_A_TIME = 100
"""Of --json; a hostile worker's may be large."""
MOST_BUFFERS = 200
"""That are told of below a table."""


@app.command("dump")
def dump(
    rank: Annotated[int, typer.Argument(help="Whose log.", min=0)],
    job: JobOption = "",
    records: Annotated[
        str, typer.Option(metavar="A:B", help=verbatim(f"By index, B not included [the last {LAST}]."))
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line, of all of them.")
    ] = False,
    socket: SocketOption = None,
) -> None:
    """Show records of a rank's log and what their buffers are; a thousand at most, all with --json."""
    parse_range(records, 0)  # refused before anybody is asked
    try:
        directory = _log_directory(get_status(socket, job), rank, job)
        log = replay.Log(directory)
        first, end = parse_range(records, log.tail_index)
        names = state_names(Path(directory))
        walk = replay.LogWalk(log)
        if as_json:
            dump_json(walk, first, end, names)
            return
        rows = walk.rows(first, end, MOST)
        make_console().print(log_table(rows, rank, log.tail_index, log.cursor_index))
        told = [*_left_out(rows, first, min(end, log.tail_index)), *buffer_lines(rows, walk, names)]
    except replay.LogError as problem:
        raise Failure(str(problem)) from problem
    for line in told:
        typer.echo(line)


def dump_json(walk: replay.LogWalk, first: int, end: int, names: Mapping[int, str]) -> None:
    """A line as soon as its record is read."""
    while rows := walk.rows(first, end, AT_A_TIME):
        for row in rows:
            for buffer in row["buffers"]:
                if buffer["handle"] in names:
                    buffer["state"] = names[buffer["handle"]]
            typer.echo(json.dumps(row))


def buffer_lines(rows: Sequence[dict[str, Any]], walk: replay.LogWalk, names: Mapping[int, str]) -> list[str]:
    """One line for each that the table names, and what became of it up to the end of the log."""
    if not rows or walk.first_index is None:
        return []
    buffers = Buffers()
    for row in rows:
        buffers.note(row)
    buffers.note_freed(walk.freed(buffers.alive()))
    return lines(buffers.found.values(), Origin(walk.first_index, walk.knows_all), names, MOST_BUFFERS)


def _left_out(rows: Sequence[dict[str, Any]], first: int, end: int) -> list[str]:
    """What was asked for and is not shown."""
    if not rows:
        return [f"records {first} to {end - 1} are let go of"] if first < end else []
    told = []
    begins, last = rows[0]["index"], rows[-1]["index"]
    if begins > first:
        told.append(f"records {first} to {begins - 1} are let go of: no recovery needs them any more")
    if last + 1 < end:
        told.append(f"go on with --records {last + 1}:{end}, or take all with --json")
    return told


def parse_range(text: str, tail_index: int) -> tuple[int, int]:
    """`A:B`, either may be left out -> [A, B); raises BadInput."""
    if not text:
        return max(0, tail_index - LAST), tail_index
    first, colon, end = text.partition(":")
    if not colon or not all(not part or (part.isascii() and part.isdigit()) for part in (first, end)):
        raise BadInput(f"--records {text!r} is no range: write A:B, for example 100:150")
    begin, stop = int(first or 0), int(end) if end else max(tail_index, int(first or 0))
    if stop < begin:
        raise BadInput(f"--records {text!r} ends before it begins")
    return begin, stop


def _log_directory(status: Any, rank: int, job: str) -> str:
    jobs = sorted({entry.job for entry in status.ranks})
    if not job and len(jobs) > 1:
        raise Failure(f"several jobs run, name one with --job: {', '.join(jobs)}")
    for entry in status.ranks:
        if entry.rank == rank and job in ("", entry.job):
            return str(entry.log_directory)
    raise Failure(f"no rank {rank} is running" + (f" in job {job}" if job else ""))
