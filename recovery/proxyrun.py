"""`proxyrun COMMAND…`: run a training command whose devices may fail."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from understudy.recovery.command_line import BAD_INPUT, Parser, check_variables, say
from understudy.recovery.control import blocking_channel, pb, rpc, trouble
from understudy.recovery.drills import Drill, parse_drill
from understudy.recovery.embedded import EmbeddedDaemon
from understudy.recovery.launch import Command, environment, ranks_wanted
from understudy.recovery.membership.settings import MOST_HOSTS_OF_A_JOB
from understudy.recovery.migration.namespaces import trouble_making
from understudy.recovery.report import (
    account_of_adoption,
    account_of_different,
    account_of_no_step,
    drill_of,
    ended_with_peer,
    summary,
    write,
)
from understudy.recovery.settings import (
    BadInput,
    parse_devices,
    parse_log_directory,
    parse_seconds,
    parse_share,
)
from understudy.recovery.socket_path import default_socket, is_answering

PROGRAM = "proxyrun"
RETURN_S = 60.0
"""How long a proxyd that died may take to come back."""
STOPPED_S = 2.0
"""The same, of one that was stopped in order."""
PAUSE_S = 0.02
DRILL_NEVER_FIRED = 3
"""Exit status of a run that succeeded although a scheduled fault never happened."""
VALUES_DIFFERENT = 4
"""Of one that succeeded although replay gave other values than the program had been given."""


@dataclass(frozen=True)
class Order:
    """What the command line asks for."""

    command: list[str]
    drills: list[Drill]
    report: Path | None
    devices: str
    socket: Path
    spares: int
    options: tuple[str, ...] = ()
    """Of the embedded proxyd."""
    job: str = ""
    migratable: bool = False
    hosts: int = 1


def parse(arguments: list[str] | None = None) -> Order:
    """The command line; raises BadInput."""
    parser = Parser(prog=PROGRAM, description="Run a training command whose devices may fail.")
    parser.add_argument(
        "--drill", action="append", default=[], metavar="'FAULT rank=R step=S call=C'",
        help="inject a fault at rank R just before record C of its minibatch S (from 1; repeatable); "
        "recoveryctl drill --list names the faults",
    )  # fmt: skip
    parser.add_argument(
        "--job", default="", metavar="NAME",
        help="keep it when the command is started anew: snapshots on storage are its (a new random name)",
    )  # fmt: skip
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a JSON summary of the run")
    parser.add_argument("--devices", default="", metavar="KIND:COUNT", help="of the embedded proxyd")
    parser.add_argument("--socket", type=Path, help="of a running proxyd")
    parser.add_argument("--spares", type=int, default=1, metavar="N", help="of the embedded proxyd (1)")
    parser.add_argument("--hang-timeout", default="", metavar="SECONDS", help="of the embedded proxyd (300)")
    parser.add_argument(
        "--validate-every", type=int, default=None, metavar="N", help="of the embedded proxyd (1000)"
    )
    parser.add_argument(
        "--snapshot-overhead", default="", metavar="SHARE", help="of the embedded proxyd (1%%; 0: none)"
    )
    parser.add_argument(
        "--adoption-grace", default="", metavar="SECONDS", help="of the embedded proxyd (600)"
    )
    parser.add_argument(
        "--persist", default="", metavar="DIRECTORY",
        help="where the embedded proxyd copies snapshots, so that they outlive this node's memory (off)",
    )  # fmt: skip
    parser.add_argument(
        "--log-dir", default="", metavar="DIRECTORY", help="of the embedded proxyd (/dev/shm)"
    )
    parser.add_argument("--persist-every", default="", metavar="TIME", help="of the embedded proxyd (30)")
    parser.add_argument(
        "--persist-overhead", default="", metavar="SHARE", help="of the embedded proxyd (3%%)"
    )
    parser.add_argument("--persist-slots", type=int, metavar="N", help="of the embedded proxyd (3)")
    parser.add_argument("--persist-only", action="store_true", help="of the embedded proxyd (off)")
    parser.add_argument("--persist-log", action="store_true", help="of the embedded proxyd (off)")
    parser.add_argument("--keep-runs", type=int, metavar="N", help="of the embedded proxyd (3)")
    parser.add_argument("--mirror", default="", metavar="URL", help="of the embedded proxyd (off)")
    parser.add_argument("--keep-last", type=int, metavar="N", help="of the embedded proxyd (3)")
    parser.add_argument("--keep-every", type=int, metavar="STEPS", help="of the embedded proxyd (0)")
    parser.add_argument(
        "--migratable", action="store_true",
        help="start each worker such that its process can be moved (needs root and CRIU: recoveryctl doctor)",
    )  # fmt: skip
    parser.add_argument(
        "--hosts", type=int, default=1, metavar="N",
        help="the job spans so many: say the same --job and --hosts on each, and torchrun --nnodes (1)",
    )  # fmt: skip
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND …", help="python, torchrun, …")
    given = parser.parse_args(arguments)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        raise BadInput("no command: write for example proxyrun torchrun --nproc-per-node 2 train.py")
    if given.devices:
        parse_devices(given.devices)
    options: list[str] = []
    if given.hang_timeout:
        parse_seconds(given.hang_timeout, "--hang-timeout")
        options += ["--hang-timeout", given.hang_timeout]
    if given.adoption_grace:
        parse_seconds(given.adoption_grace, "--adoption-grace")
        options += ["--adoption-grace", given.adoption_grace]
    if given.validate_every is not None:
        options += ["--validate-every", str(given.validate_every)]
    if given.snapshot_overhead:
        parse_share(given.snapshot_overhead, "--snapshot-overhead")
        options += ["--snapshot-overhead", given.snapshot_overhead]
    if given.log_dir:
        options += ["--log-dir", str(parse_log_directory(given.log_dir, "--log-dir"))]
    options += _persistence(given)
    if not 0 <= given.spares <= 64:
        raise BadInput(f"--spares {given.spares} is not possible: 0 to 64")
    if given.report is not None and not os.access(given.report.absolute().parent, os.W_OK):
        raise BadInput(
            f"cannot write the report {given.report}: its directory does not exist or is not writable"
        )
    if not 1 <= given.hosts <= MOST_HOSTS_OF_A_JOB:
        raise BadInput(f"--hosts {given.hosts} is not possible: 1 to {MOST_HOSTS_OF_A_JOB}")
    if given.hosts > 1 and not given.job:
        raise BadInput(f"--hosts {given.hosts} needs --job NAME, the same on each of them")
    drills = [parse_drill(text) for text in given.drill]
    socket = (given.socket or default_socket()).absolute()
    return Order(
        command,
        drills,
        given.report,
        given.devices,
        socket,
        given.spares,
        tuple(options),
        given.job,
        given.migratable,
        given.hosts,
    )


def _persistence(given: Any) -> list[str]:
    """For the embedded proxyd, which knows what is possible; raises BadInput."""
    options = [f"--persist={given.persist}"] if given.persist else []
    for flag in (
        "persist-every", "persist-overhead", "persist-slots",
        "keep-runs", "mirror", "keep-last", "keep-every",
    ):  # fmt: skip
        if (value := getattr(given, flag.replace("-", "_"))) not in (None, ""):
            if not given.persist:
                raise BadInput(f"--{flag} {value} is of no use without --persist DIRECTORY")
            options.append(f"--{flag}={value}")
    for flag in ("persist-only", "persist-log"):
        if getattr(given, flag.replace("-", "_")):
            if not given.persist:
                raise BadInput(f"--{flag} is of no use without --persist DIRECTORY")
            options.append(f"--{flag}")
    return options


def run(order: Order) -> int:
    """Run the command under a proxyd; answers the exit status.  Raises BadInput."""
    if order.migratable and (problem := trouble_making()):
        raise BadInput(f"--migratable is not possible here: a pid namespace cannot be made ({problem})")
    with contextlib.ExitStack() as cleanup:
        socket = order.socket
        if is_answering(socket):
            if order.devices:
                raise BadInput(
                    f"a proxyd answers at {socket} and decides about devices: leave out --devices, or stop it"
                )
            if any(option.startswith("--persist=") for option in order.options):
                raise BadInput(
                    f"a proxyd answers at {socket} and decides about snapshots on storage: "
                    "leave out --persist, or stop it"
                )
        else:
            if order.hosts > 1:
                raise BadInput(
                    f"--hosts {order.hosts} needs a proxyd on each, with --etcd, --listen and --certs; "
                    f"none answers at {socket}"
                )
            devices = order.devices or f"cpu:{ranks_wanted(order.command)}"
            embedded = EmbeddedDaemon(
                devices, order.spares, order.options, tell=lambda sentence: say(PROGRAM, sentence)
            )
            cleanup.callback(embedded.stop)
            socket = embedded.socket
        return _run_under(order, socket)


def _run_under(order: Order, socket: Path) -> int:
    job = order.job or uuid.uuid4().hex
    node = _ask(socket, lambda daemon: daemon.Describe(pb.DescribeRequest(), timeout=30))
    drills = [drill.message() for drill in order.drills]
    request = pb.OpenJobRequest(job=job, drills=drills, launcher_pid=os.getpid(), migratable=order.migratable,
        hosts=order.hosts,
    )  # fmt: skip
    opened = _ask(socket, lambda daemon: daemon.OpenJob(request, timeout=30))
    if opened.error:
        raise BadInput(opened.error)
    began = time.monotonic()
    try:
        command = Command(order.command, environment(job, socket, node, opened.relays))
    except OSError as problem:
        _close(socket, job)
        raise BadInput(f"cannot start {order.command[0]}: {problem.strerror}") from problem
    status = command.wait()
    command.kill_rest()
    wall_s = time.monotonic() - began
    return _conclude(order, _close(socket, job), status, wall_s)


def _close(socket: Path, job: str) -> Any:
    try:
        return _ask(socket, lambda daemon: daemon.CloseJob(pb.CloseJobRequest(job=job), timeout=120))
    except BadInput as problem:
        return pb.JobReport(error=f"proxyd did not report on the run: {problem}")
    except grpc.RpcError as problem:
        return pb.JobReport(error=f"proxyd did not report on the run: {trouble(problem)}")


def _ask(socket: Path, question: Callable[[Any], Any]) -> Any:
    """One conversation with proxyd, or if it dies with its successor.  Raises BadInput, grpc.RpcError.

    No channel stays open while the command runs: proxyd may be asked to do without us for weeks.
    """
    began = time.monotonic()
    seen = began
    with blocking_channel(socket) as channel:
        while True:
            is_answering(socket)  # raises, if it is not a proxyd of ours
            try:  # `channel_ready_future` would keep the channel from being closed for 0.2 s
                return question(rpc.DaemonStub(channel))
            except grpc.RpcError as problem:
                if problem.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            now = time.monotonic()
            # One that was stopped has removed its socket; one that starts makes it anew in no time.
            seen = now if socket.exists() else seen
            if now > min(began + RETURN_S, seen + STOPPED_S):
                raise BadInput(f"nobody answers at {socket}")
            time.sleep(PAUSE_S)


def _conclude(order: Order, report: Any, status: int, wall_s: float) -> int:
    for adoption in report.adoptions:
        say(PROGRAM, account_of_adoption(adoption))
    for recovery in report.recoveries:
        what = f"{recovery.fault} on rank {recovery.rank} in step {recovery.step}, call {recovery.call}"
        if recovery.recovered:
            say(PROGRAM, f"{what}: recovered in {recovery.total_s:.3f} s ({recovery.plan})")
        elif ended_with_peer(recovery):
            waited = f"rank {recovery.rank} was in a collective of step {recovery.step}, and ended as well"
            say(PROGRAM, f"{recovery.reason.partition(' (')[0]}: {waited}")
        else:
            say(PROGRAM, f"{what}: given up: {recovery.reason}")
    if report.error:
        say(PROGRAM, report.error)
    if report.automatic_commits and not report.steps:
        say(PROGRAM, account_of_no_step(report.automatic_commits))
    if order.report is not None:
        write(order.report, summary(report, order.command, status, wall_s))
    idle = [str(drill_of(fault.drill)) for fault in report.faults if not fault.fired]
    if report.error and not report.faults:
        idle = [str(drill) for drill in order.drills]
    for drill in idle:
        say(PROGRAM, f"the drill '{drill}' never fired: the run has no such rank, step or call")
    ends = _status_of(report, idle) if status == 0 else status
    if report.not_replayable and not report.replies_different:
        say(PROGRAM, f"replay would give other numbers: {report.not_replayable}")
    if report.replies_different:
        sentence = account_of_different(report.replies_different)
        say(PROGRAM, sentence if status else f"{sentence} (exit status {ends})")
    return ends


def _status_of(report: Any, idle: list[str]) -> int:
    """Of a run whose command has succeeded."""
    if report.replies_different:
        return VALUES_DIFFERENT
    if report.error:
        return BAD_INPUT
    return DRILL_NEVER_FIRED if idle else 0


def main() -> int:
    """Entry point."""
    try:
        order = parse()
        check_variables(PROGRAM)
        return run(order)
    except BadInput as problem:
        say(PROGRAM, str(problem))
    except grpc.RpcError as problem:
        say(PROGRAM, f"proxyd does not answer as it should: {trouble(problem)}")
    except KeyboardInterrupt:
        return 130
    return BAD_INPUT


if __name__ == "__main__":
    raise SystemExit(main())
