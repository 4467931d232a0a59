"""The options of proxyrun, and what they order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from understudy.recovery.base.errors import BadInput
from understudy.recovery.base.job_names import trouble_with
from understudy.recovery.config.command_line import command_of, given_to, option
from understudy.recovery.config.proxyd_options import OfRuns, ProxydOptions
from understudy.recovery.config.proxyd_settings import settings_from
from understudy.recovery.drills.spec import Drill, parse_drill
from understudy.recovery.machine.socket_path import default_socket
from understudy.recovery.membership.settings import MOST_HOSTS_OF_A_JOB

PROGRAM = "proxyrun"
RUN = "The run"
OWN_PROXYD = "A proxyd of its own, started where none answers"


@dataclass(frozen=True, kw_only=True)
class ProxyrunOptions(OfRuns):
    """All that proxyrun may be told: of the run, and of the proxyd that it starts if none answers."""

    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND…", help="python, torchrun, …, and its arguments.")
    ] = None
    job: Annotated[
        str,
        option(
            "--job",
            "Name of the job; keep it when the command is started anew: snapshots on storage are its [a new "
            "random name].",
            RUN, "NAME",
        ),
    ] = ""  # fmt: skip
    drill: Annotated[
        list[str] | None,
        option(
            "--drill",
            "Inject a fault at rank R just before record C [1] of its minibatch S, from 1. May be repeated; "
            "`recoveryctl drill --list` names the faults.",
            RUN, "'FAULT rank=R step=S call=C'",
        ),
    ] = None  # fmt: skip
    report: Annotated[
        Path | None, option("--report", "Write a JSON summary of the run there.", RUN, "FILE")
    ] = None
    samples: Annotated[
        Path | None,
        option(
            "--samples",
            "Write there which samples each minibatch had; `recoveryctl samples check DIR` judges it.",
            RUN, "DIR",
        ),
    ] = None  # fmt: skip
    socket: Annotated[
        Path | None,
        option(
            "--socket",
            "Of a proxyd that runs already [$UNDERSTUDY_SOCKET, or in $XDG_RUNTIME_DIR].",
            RUN, "PATH",
        ),
    ] = None  # fmt: skip
    migratable: Annotated[
        bool,
        option(
            "--migratable",
            "Start each worker such that its process can be moved; it needs root and CRIU: see "
            "`recoveryctl doctor`.",
            RUN,
        ),
    ] = False  # fmt: skip
    hosts: Annotated[
        int,
        option(
            "--hosts",
            "The job spans so many hosts: say the same --job and --hosts on each, and torchrun --nnodes.",
            RUN, "N",
        ),
    ] = 1  # fmt: skip
    devices: Annotated[
        str,
        option(
            "--devices",
            "Its devices, cpu:2 or cuda:8 [cpu, one for each rank of the command].",
            OWN_PROXYD, "KIND:COUNT",
        ),
    ] = ""  # fmt: skip


@dataclass(frozen=True)
class Order:
    """What the command line asks for."""

    command: list[str]
    drills: list[Drill]
    report: Path | None
    devices: str
    socket: Path
    socket_named: str
    """By what, if not by us; empty: by nobody."""
    own: dict[str, str]
    """Options of a proxyd of its own, by flag; a switch has "" for a value."""
    job: str = ""
    migratable: bool = False
    hosts: int = 1
    samples: Path | None = None


def proxyrun_command() -> object:
    """proxyrun's command line."""
    return command_of(ProxyrunOptions, "Run a training command whose devices may fail.")


def parse(arguments: Sequence[str] | None = None) -> Order:
    """A command line, by default ours; raises BadInput."""
    given: ProxyrunOptions = given_to(proxyrun_command(), PROGRAM, arguments)
    if not given.command:
        raise BadInput("no command: write for example proxyrun torchrun --nproc-per-node 2 train.py")
    if given.report is not None and not os.access(given.report.absolute().parent, os.W_OK):
        raise BadInput(
            f"cannot write the report {given.report}: its directory does not exist or is not writable"
        )
    if given.job and (trouble := trouble_with(given.job)):
        raise BadInput(f"--job {trouble}")
    if not 1 <= given.hosts <= MOST_HOSTS_OF_A_JOB:
        raise BadInput(f"--hosts {given.hosts} is not possible: 1 to {MOST_HOSTS_OF_A_JOB}")
    if given.hosts > 1 and not given.job:
        raise BadInput(f"--hosts {given.hosts} needs --job NAME, the same on each of them")
    settings_from(_for_proxyd(given))  # refuses what proxyd would
    return Order(
        given.command,
        [parse_drill(text) for text in given.drill or ()],
        given.report,
        given.devices,
        (given.socket or default_socket()).absolute(),
        _by_what(given.socket),
        given.told(),
        given.job,
        given.migratable,
        given.hosts,
        given.samples,
    )


def _for_proxyd(given: ProxyrunOptions) -> ProxydOptions:
    shared: dict[str, Any] = {field.name: getattr(given, field.name) for field in fields(OfRuns)}
    return ProxydOptions(devices=given.devices or "cpu:1", **shared)


def _by_what(socket: Path | None) -> str:
    if socket is not None:
        return "--socket"
    return "UNDERSTUDY_SOCKET" if os.environ.get("UNDERSTUDY_SOCKET") else ""
