"""`proxyrun COMMAND…`: run a training command whose devices may fail."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from understudy.recovery.base.control import blocking_channel, pb, rpc, trouble
from understudy.recovery.base.errors import BadInput, Failure, NobodyAnswers
from understudy.recovery.base.job_names import new_name
from understudy.recovery.config.command_line import check_variables, ends_of, say
from understudy.recovery.config.proxyrun_options import PROGRAM, Order, parse
from understudy.recovery.history.report import summary, write
from understudy.recovery.machine.gpus import gpus_of_machine
from understudy.recovery.machine.socket_path import is_answering
from understudy.recovery.migration.process.namespaces import trouble_making
from understudy.recovery.run.conclusion import conclude
from understudy.recovery.run.embedded import EmbeddedDaemon
from understudy.recovery.run.launch import Command, environment, ranks_wanted
from understudy.recovery.samples.attempts import begin_attempt

RETURN_S = 60.0
"""How long a proxyd that died may take to come back."""
STOPPED_S = 2.0
"""The same, of one that was stopped in order."""
PAUSE_S = 0.02


def run(order: Order) -> int:
    """Run the command under a proxyd; answers the exit status.  Raises ForTheUser."""
    if order.migratable and (problem := trouble_making()):
        raise Failure(f"--migratable is not possible here: a pid namespace cannot be made ({problem})")
    if is_answering(order.socket):
        _refuse_what_it_decides(order)
        return _run_under(order, order.socket)
    if order.socket_named:
        raise NobodyAnswers(
            f"nobody listens at {order.socket}, which {order.socket_named} names: start `proxyd --socket "
            f"{order.socket} --devices …`, or leave it out, and this run gets a proxyd of its own"
        )
    if order.hosts > 1:
        raise NobodyAnswers(
            f"--hosts {order.hosts} needs a proxyd on each, with --etcd, --listen and --certs; "
            f"none answers at {order.socket}"
        )
    devices = order.devices or _devices_for(order)
    embedded = EmbeddedDaemon(devices, order.own, tell=lambda sentence: say(PROGRAM, sentence))
    say(PROGRAM, f"no proxyd answers at {order.socket}; started one for this run ({devices}): "
        "`recoveryctl status` finds it")  # fmt: skip
    try:
        return _run_under(order, embedded.socket)
    finally:
        embedded.stop()


def _refuse_what_it_decides(order: Order) -> None:
    """A proxyd that is there was told how to be when it was started."""
    told = [flag for flag in ("--devices",) if order.devices] + list(order.own)
    if told:
        what = " and ".join(told)
        raise BadInput(
            f"a proxyd answers at {order.socket} and decides about {what}: leave out {what}, or stop it"
        )


def _devices_for(order: Order) -> str:
    """The devices of a proxyd of our own, if nobody named them; raises BadInput if we may not choose."""
    ranks = ranks_wanted(order.command)
    if gpus := gpus_of_machine():
        raise BadInput(
            f"this machine has {gpus} GPU{'s' if gpus != 1 else ''}, and no proxyd answers at "
            f"{order.socket}: "
            f"say --devices cuda:{min(ranks, gpus)}, for which docs/gpu.md tells how far it was tried, or "
            f"--devices cpu:{ranks}"
        )
    return f"cpu:{ranks}"


def _run_under(order: Order, socket: Path) -> int:
    job = order.job or new_name()
    samples = None if order.samples is None else begin_attempt(order.samples, job, order.command, order.hosts)
    node = _ask(socket, lambda daemon: daemon.Describe(pb.DescribeRequest(), timeout=30))
    drills = [drill.message() for drill in order.drills]
    request = pb.OpenJobRequest(job=job, drills=drills, launcher_pid=os.getpid(), migratable=order.migratable,
        hosts=order.hosts,
    )  # fmt: skip
    opened = _ask(socket, lambda daemon: daemon.OpenJob(request, timeout=30))
    if opened.error:
        raise Failure(opened.error)
    began = time.monotonic()
    try:
        command = Command(order.command, environment(job, socket, node, opened.relays, samples))
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
    except Failure as problem:
        return pb.JobReport(error=f"proxyd did not report on the run: {problem}")
    except grpc.RpcError as problem:
        return pb.JobReport(error=f"proxyd did not report on the run: {trouble(problem)}")


def _ask(socket: Path, question: Callable[[Any], Any]) -> Any:
    """One conversation with proxyd, or if it dies with its successor.  Raises ForTheUser, grpc.RpcError.

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
                raise NobodyAnswers(f"nobody answers at {socket}")
            time.sleep(PAUSE_S)


def _conclude(order: Order, report: Any, status: int, wall_s: float) -> int:
    if order.report is not None:
        write(order.report, summary(report, order.command, status, wall_s))
    sentences, ends = conclude(report, order.drills, status, whole=order.hosts == 1)
    for sentence in sentences:
        say(PROGRAM, sentence)
    return ends


def main() -> int:
    """Entry point."""

    def work() -> int:
        order = parse()
        check_variables(PROGRAM)
        try:
            return run(order)
        except grpc.RpcError as problem:
            raise Failure(f"proxyd does not answer as it should: {trouble(problem)}") from problem

    return ends_of(PROGRAM, work)


if __name__ == "__main__":
    raise SystemExit(main())
