"""`recoveryctl snapshots`: what `proxyd --persist` has written, and how often it should.

No proxyd is needed, but for `restore`; nothing that is there is changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.errors import ExitStatus, Failure
from understudy.recovery.base.structured_log import configure
from understudy.recovery.config.command_line import verbatim
from understudy.recovery.config.settings import BadInput, parse_bytes, parse_seconds, parse_share
from understudy.recovery.run.asking import JobOption as RunningJobOption
from understudy.recovery.run.asking import SocketOption, ask, looking
from understudy.recovery.snapshots.export.formats import FORMATS
from understudy.recovery.snapshots.remote.mirror import Mirror
from understudy.recovery.snapshots.remote.second_tier import Remote
from understudy.recovery.snapshots.stores.catalogue import Catalogue, StoredSet
from understudy.recovery.snapshots.stores.layout import logs_of
from understudy.recovery.snapshots.tiers import Tier, tier_at
from understudy.recovery.snapshots.tuning.tuner import size
from understudy.recovery.text.tables import make_console
from understudy.recovery.tuning.tune import Order, measure

app = typer.Typer(no_args_is_help=True, help="Snapshots that proxyd --persist writes.")

DirectoryArgument = Annotated[Path, typer.Argument(help="What --persist named.")]
PlaceArgument = Annotated[
    str, typer.Argument(metavar="DIRECTORY|URL", help="What --persist named, or --mirror.")
]
JobOption = Annotated[str, typer.Option("--job", help="Only this job's.")]
JsonOption = Annotated[bool, typer.Option("--json", help="For programs.")]


def read(tier: Tier, called: str, job: str) -> Catalogue:
    """Raises BadInput."""
    try:
        return tier.catalogue(job)
    except OSError as problem:
        raise BadInput(f"{called} cannot be read: {problem.strerror or problem}") from problem


def with_newest(
    tier: Tier, called: str, job: str, serial: int | None, beside: Path, use: Callable[[StoredSet], list[str]]
) -> tuple[StoredSet, list[str]]:
    """The newest complete set (of that `serial`) that `use` does not fail with, and what there is to tell.

    `beside`: room for what has to be fetched.  Raises BadInput.
    """
    told: list[str] = []
    for one in read(tier, called, job).sets:
        if not one.complete or serial not in (None, one.serial):
            continue
        try:
            with tier.readable(one, beside) as ready:
                return one, told + use(ready)
        except (OSError, ValueError, RuntimeError, ImportError) as problem:
            told.append(f"serial {one.serial} (step {one.step}) was passed over: {problem}")
    raise BadInput("; ".join(told) or f"{called} holds no snapshot that is complete on all ranks")


@app.command("list")
def list_snapshots(where: PlaceArgument, job: JobOption = "", as_json: JsonOption = False) -> None:
    """Every snapshot, newest first, and whether all ranks have it; exit status 1 if there is none."""
    found = read(tier_at(where), where, job)
    if as_json:
        rows = [as_row(one) | {"complete": one.complete} for one in found.sets]
        typer.echo(json.dumps({"snapshots": rows, "problems": found.problems}, indent=2))
    else:
        _show(found, where)
    if not found.sets:
        raise typer.Exit(ExitStatus.FOUND_BAD)


def _show(found: Catalogue, where: str) -> None:
    table = Table()
    for heading in ("job", "run", "serial", "step", "ranks", "complete", "size", "written"):
        table.add_column(heading)
    for one in found.sets:
        table.add_row(
            one.job, one.run, str(one.serial), str(one.step), f"{len(one.parts)} of {one.world}",
            "yes" if one.complete else "no", size(one.bytes), when(one),
        )  # fmt: skip
    console = make_console()
    console.print(table if found.sets else f"no snapshots in {where}")
    if logged := _with_log(found):
        console.print(f"behind step {logged.step} of job {logged.job} lies a stored log: see `replay`")
    for problem in found.problems:
        console.print(problem, style="yellow")


def _with_log(found: Catalogue) -> StoredSet | None:
    """The newest complete set, if a stored log lies behind it."""
    newest = next((one for one in found.sets if one.complete), None)
    if newest is None:
        return None
    run = newest.parts[0].path.parent
    with contextlib.suppress(OSError):  # fetched from a second tier, which has none
        return newest if logs_of(run) else None
    return None


@app.command()
def verify(where: PlaceArgument, job: JobOption = "", as_json: JsonOption = False) -> None:
    """Read every byte of every snapshot; exit status 1 if one is damaged, or none is whole."""
    tier = tier_at(where)
    found = read(tier, where, job)
    damaged = {id(one): tier.problems_of(one) for one in found.sets}
    whole = next((one for one in found.sets if not damaged[id(one)]), None)
    if as_json:
        rows = [as_row(one) | {"problems": damaged[id(one)]} for one in found.sets]
        newest = as_row(whole) if whole else None
        typer.echo(json.dumps({"snapshots": rows, "problems": found.problems, "newest": newest}, indent=2))
    else:
        for one in found.sets:
            state = "; ".join(damaged[id(one)]) or "whole"
            typer.echo(f"{one.job} {one.run} serial {one.serial}, step {one.step}: {state}")
        for problem in found.problems:
            typer.echo(problem)
        typer.echo(
            f"newest that is whole: step {whole.step} of job {whole.job}, written {when(whole)}"
            if whole
            else "no snapshot is whole"
        )
    broken = [one for one in found.sets if one.complete and damaged[id(one)]]
    if whole is None or broken or found.problems:
        raise typer.Exit(ExitStatus.FOUND_BAD)


@app.command()
def restore(
    job: Annotated[str, typer.Argument(help="Which, if several run.")] = "", socket: SocketOption = None
) -> None:
    """A drill: take a running job back to its snapshot on storage, replay its log, and show how that went."""
    reply = ask(socket, lambda daemon: daemon.RehearseRestore(pb.RehearseRestoreRequest(job=job)), job)
    if reply.error:
        raise Failure(reply.error)
    typer.echo(reply.detail)


@app.command()
def export(
    where: PlaceArgument,
    out: Annotated[Path, typer.Argument(help="A directory that does not exist yet.")],
    job: JobOption = "",
    serial: Annotated[
        int | None, typer.Option(help="Of the snapshot; without it: the newest whole one.")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="torch, dcp or safetensors.")] = "torch",
) -> None:
    """Write a snapshot as a checkpoint that scripts load."""
    if form not in FORMATS:
        raise BadInput(f"--format {form!r} is not known: {', '.join(FORMATS)}")
    if out.exists():
        raise BadInput(f"{out} exists: name a directory that does not")
    from understudy.recovery.snapshots.export.exporting import (
        export as write,  # PyTorch, with all that it loads
    )

    def use(ready: StoredSet) -> list[str]:  # every byte is checked
        return [f"not included: {what}" for what in write(ready, out, form)]

    tier = tier_at(where)
    one, told = with_newest(tier, where, job, serial, out, use)
    for sentence in told:
        typer.echo(sentence)
    typer.echo(f"step {one.step} of job {one.job}, written {when(one)}, is in {out}")
    logged = _with_log(read(tier, where, job)) if serial is None else None
    if logged and (logged.job, logged.run, logged.serial) == (one.job, one.run, one.serial):
        typer.echo(
            f"behind it lies a stored log: to go further, `recoveryctl snapshots replay {where}`, then "
            "export again"
        )


@app.command("replay")
def replay_log(
    directory: DirectoryArgument,
    job: JobOption = "",
    run: Annotated[str, typer.Option("--run", help=verbatim("Of the job [its newest]."))] = "",
) -> None:
    """After a power cut: replay the log that proxyd --persist-log stored, and store the state it leads to.

    The newest complete snapshot of the run is taken to the newest step that all its ranks' logs reach, and
    becomes a run of its own, which `export` then takes.  No proxyd is needed, nothing that is there changes.
    """
    from understudy.recovery.daemon.offline_replay import (  # gRPC, which others need not wait for
        NotReplayed,
        replay_stored,
    )
    from understudy.recovery.snapshots.log.log_reach import newest_reach

    configure("error")
    newest = next(
        (one for one in read(tier_at(str(directory)), str(directory), job).sets
         if one.complete and run in ("", one.run)), None,
    )  # fmt: skip
    if newest is None:
        raise BadInput(f"{directory} holds no snapshot that is complete on all ranks")
    folder = directory / newest.job / newest.run
    try:
        reach = newest_reach(folder)
        if reach is None:
            raise BadInput(f"{folder} holds no snapshot that is complete on all ranks any more")
        for note in reach.notes:
            typer.echo(note)
        if reach.step <= reach.stored.step:
            typer.echo(f"the stored log leads no further than the newest snapshot: step {reach.stored.step}")
            return
        done = replay_stored(reach)
    except (OSError, ValueError, RuntimeError) as problem:
        if isinstance(problem, BadInput):
            raise
        said = problem if isinstance(problem, NotReplayed) else f"{folder} cannot be read: {problem}"
        raise Failure(f"{said}; step {newest.step} can still be exported") from problem
    typer.echo(
        f"step {done.step} of job {newest.job}, replayed from step {newest.step}, is in {done.run} "
        f"({done.values_compared} values and {done.digests_compared} buffers are what they were)"
    )


@app.command()
def copy(
    where: PlaceArgument,
    to: Annotated[str, typer.Argument(metavar="URL", help="As --mirror takes it.")],
    job: JobOption = "",
    serial: Annotated[
        int | None, typer.Option(help="Of the snapshot; without it: the newest that can be read.")
    ] = None,
) -> None:
    """Copy a snapshot to a second tier, as proxyd --mirror does; nothing there is removed."""
    os.umask(0o077)  # where the second tier is a directory: the owner's alone
    target = Mirror(Remote(to))

    def use(ready: StoredSet) -> list[str]:
        target.upload(ready)
        return []

    with tempfile.TemporaryDirectory() as folder:
        one, told = with_newest(tier_at(where), where, job, serial, Path(folder) / "set", use)
    for sentence in told:
        typer.echo(sentence)
    typer.echo(f"step {one.step} of job {one.job}, written {when(one)}, is at {to}")


@app.command()
def tune(
    directory: DirectoryArgument,
    state: Annotated[
        str, typer.Option(metavar="SIZE", help=verbatim("Of a snapshot [the running job's]."))
    ] = "",
    step: Annotated[
        str, typer.Option(metavar="SECONDS", help=verbatim("That a step takes [the running job's]."))
    ] = "",
    overhead: Annotated[str, typer.Option(metavar="SHARE", help="Of the time, for persisting.")] = "3%",
    storage: Annotated[str, typer.Option(metavar="SIZE", help="For snapshots [90% of what is free].")] = "",
    dram: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory for chunks; proxyd has 64MiB a rank.")
    ] = "64MiB",
    probe_limit: Annotated[
        str, typer.Option(metavar="SIZE", help="The most to write per snapshot; beyond, it is scaled.")
    ] = "512MiB",
    watch: Annotated[
        str, typer.Option(metavar="SECONDS", help="To watch a running job for, before and while writing.")
    ] = "5",
    no_load: Annotated[
        bool, typer.Option("--no-load", help="Do not write on only to see what it costs a running job.")
    ] = False,
    job: RunningJobOption = "",
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the storage and a running job, and explain how often to persist (PCcheck, section 3.4).

    With both --state and --step, no proxyd is asked.
    """
    share = parse_share(overhead, "--overhead")
    if share == 0:
        raise BadInput(f"--overhead {overhead!r} leaves no time for snapshots: write for example 3%")
    order = Order(
        directory=directory.absolute(),
        state_bytes=parse_bytes(state, "--state") if state else None,
        step_s=parse_seconds(step, "--step", least=1e-6, example="0.35") if step else None,
        dram_bytes=parse_bytes(dram, "--dram"),
        storage_bytes=parse_bytes(storage, "--storage") if storage else None,
        overhead=share,
        probe_limit=parse_bytes(probe_limit, "--probe-limit"),
        watch_s=parse_seconds(watch, "--watch"),
        load=not no_load,
        job=job,
    )
    progress = Console(stderr=True)
    with progress.status("") as line:  # nothing of it shows where nobody looks
        if order.needs_job:
            with looking(socket, job) as look:
                advice = measure(order, look, line.update)
        else:
            advice = measure(order, None, line.update)
    typer.echo(json.dumps(advice.as_json(), indent=2) if as_json else advice.text())


def as_row(one: StoredSet) -> dict[str, object]:
    """For programs."""
    return {
        "job": one.job, "run": one.run, "serial": one.serial, "step": one.step, "world": one.world,
        "ranks": sorted(one.parts), "bytes": one.bytes, "written": when(one),
    }  # fmt: skip


def when(one: StoredSet) -> str:
    """Local time."""
    return datetime.fromtimestamp(one.time_ns / 1e9).astimezone().isoformat(" ", "seconds")
