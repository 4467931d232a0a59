"""`recoveryctl drill`: a fault on purpose, what is waited for meanwhile, and what came of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console
from rich.text import Text

from understudy.recovery.base.control import blocking_channel, pb, rpc, trouble
from understudy.recovery.base.errors import BadInput, Failure, NobodyAnswers
from understudy.recovery.drills.fault_table import BY_NAME
from understudy.recovery.drills.refusals import FLAG
from understudy.recovery.drills.spec import Drill, unknown
from understudy.recovery.history.report import account_of_adoption
from understudy.recovery.run.asking import JobOption, SocketOption, ask, find, get_status
from understudy.recovery.text.tables import fault_table, make_console

SUCCESSOR_S = 20.0
"""How long a drill waits for whoever restarts a proxyd that was killed."""
LOOK_S = 1.0


def drill(
    fault: Annotated[str, typer.Argument(help="Which fault; --list names them.")] = "",
    rank: Annotated[int | None, typer.Option(help="The rank that it strikes.", min=0)] = None,
    step: Annotated[
        int | None, typer.Option(help="Strike in this minibatch, from 1, and not now.", min=1)
    ] = None,
    call: Annotated[
        int | None, typer.Option(help="Strike just before this record of it, from 1 [1].", min=1)
    ] = None,
    job: JobOption = "",
    socket: SocketOption = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds that the fault, once due, may go unnoticed.", min=1)
    ] = 60.0,
    may_end: Annotated[bool, typer.Option(FLAG, help="Order it even if the job cannot survive it.")] = False,
    show_list: Annotated[bool, typer.Option("--list", help="Show every fault there is.")] = False,
) -> None:
    """Inject a fault on purpose and show how the job recovers.

    Without a terminal nothing is shown until it has.
    """
    if show_list:
        make_console().print(fault_table())
        return
    order = _order(fault, rank, step, call)
    request = pb.DrillRequest(job=job, drill=order.message(), may_end_the_job=may_end)
    if fault == "kill-proxyd" and not step:
        _kill_proxyd(socket, request)
        return
    make_console().print(Text(_carried_out(find(socket, job), request, timeout)), soft_wrap=False)


def _order(fault: str, rank: int | None, step: int | None, call: int | None) -> Drill:
    """Raises BadInput."""
    if fault not in BY_NAME:
        raise BadInput(f"{unknown(fault)}; recoveryctl drill --list explains them")
    if call and not step:
        raise BadInput("--call needs --step")
    if rank is None and not (BY_NAME[fault].by_proxyd and fault != "kill-worker"):
        raise BadInput(f"{fault} needs --rank: whom it is to strike")
    return Drill(fault, rank or 0, step or 0, (call or 1) if step else 0)


def _carried_out(path: Path, request: Any, timeout_s: float) -> str:
    """What came of it; raises Failure."""
    drill = request.drill
    due = time.monotonic() if not drill.step else None
    with blocking_channel(path) as channel, Console(stderr=True).status("") as line:
        daemon = rpc.DaemonStub(channel)
        answer = daemon.OrderDrill.future(request)
        try:
            while True:
                try:
                    reply = answer.result(timeout=LOOK_S)
                    break
                except grpc.FutureTimeoutError:
                    pass
                where, come = _stand(daemon, request)
                due = time.monotonic() if due is None and come else due
                line.update(f"{drill.kind} rank {drill.rank}: {where}")
                if due is not None and time.monotonic() - due > timeout_s:
                    raise Failure(
                        f"{drill.kind} at rank {drill.rank} was not noticed within {timeout_s:g} s: {where}"
                    )
        except grpc.RpcError as problem:
            raise NobodyAnswers(f"proxyd at {path} did not answer: {trouble(problem)}") from problem
        finally:
            answer.cancel()
    if reply.error:
        raise Failure(reply.error)
    return str(reply.detail)


def _stand(daemon: Any, request: Any) -> tuple[str, bool]:
    """Where the rank that is struck stands, and whether it has come as far as the drill."""
    drill = request.drill
    status = daemon.GetStatus(pb.StatusRequest(), timeout=10)
    waits = {job.name: f", and a recovery waits: {job.waits_for}" for job in status.jobs if job.waits_for}
    for rank in status.ranks:
        if rank.rank == drill.rank and request.job in ("", rank.job):
            come = rank.step >= drill.step
            still = "" if come else f" of {drill.step}"
            return f"it is {rank.state} in step {rank.step}{still}{waits.get(rank.job, '')}", come
    return "it does not run any more", True


def _kill_proxyd(socket: Path | None, request: Any) -> None:
    """The one order whose success is that no answer comes."""
    path = find(socket, request.job)
    node = get_status(path).node
    try:
        reply = ask(path, lambda daemon: daemon.OrderDrill(request))
    except Failure:
        typer.echo(f"kill-proxyd: proxyd (pid {node.pid}) was killed; {_successor(path, node.pid)}")
        return
    raise Failure(reply.error or reply.detail)


def _successor(socket: Path, former: int) -> str:
    """What became of the jobs, told by the proxyd that adopted them; raises Failure if none comes."""
    deadline = time.monotonic() + SUCCESSOR_S
    with Console(stderr=True).status("") as line:
        while (left := deadline - time.monotonic()) > 0:
            try:
                status = get_status(socket)
            except Failure:
                line.update(f"kill-proxyd: waiting for another one, {left:.0f} s at most")
                time.sleep(0.1)  # nobody tells of a process that is yet to start
                continue
            told = [account_of_adoption(one) for one in status.adoptions if one.former_pid == former]
            return (
                "; ".join(told)
                or f"another one (pid {status.node.pid}) has started, and there was no job to adopt"
            )
    raise Failure(
        f"proxyd (pid {former}) was killed, and none has followed it within {SUCCESSOR_S:.0f} s: its jobs go "
        f"on, and one started at {socket} adopts them"
    )
