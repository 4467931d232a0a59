"""Brings a stored set and the stored log behind it to the newest step that all ranks reach, without proxyd.

Device servers of our own replay the log in a private runtime directory, as in any recovery from storage. What
they have then is compared with what was noted when the training was there, and becomes a new run of the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from understudy import replay
from understudy.recovery.agent_api.server import AbsentServer
from understudy.recovery.base.control import OPTIONS, address, pb, rpc
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.host.evidence import facts_of
from understudy.recovery.host.leases import Leases
from understudy.recovery.host.placement import HostPlacement
from understudy.recovery.host.servers import ServerPool
from understudy.recovery.host.spawner import SpawnerError, default_command
from understudy.recovery.job.recovery_round import Round
from understudy.recovery.job.stages import RoundFailed
from understudy.recovery.machine.processes import Watched, start_ticks
from understudy.recovery.machine.runtime_directory import RuntimeDirectory
from understudy.recovery.membership.network.data_network import DataNetwork
from understudy.recovery.planning.facts import FaultFacts, FaultKind
from understudy.recovery.planning.planner import PlanName
from understudy.recovery.rendezvous.services import RendezvousService
from understudy.recovery.rendezvous.store import Store
from understudy.recovery.snapshots.log.log_reach import Laid, Reach, lay_out, log_sizes
from understudy.recovery.snapshots.restore.manifest import read_manifest
from understudy.recovery.snapshots.restore.restorer import Restorer
from understudy.recovery.snapshots.settings import Writing
from understudy.recovery.snapshots.stores.layout import ORIGIN, in_use
from understudy.recovery.snapshots.writing.request import Persist, Written, decode_answer
from understudy.recovery.snapshots.writing.writer import sync_entries
from understudy.recovery.state.durable import Durable
from understudy.recovery.state.jobs import Job, Session

LOOK_S = 0.005
STUCK_S = 300.0
"""Without any record run."""
GRACE_S = 1.0
"""How long device servers outlive us."""
LARGEST_REPLY = 256 << 20
AREA_BYTES, AREA_FACTOR = 8 << 30, 3
"""Of a rank's shadows and snapshots, which take only what they need: bytes at least, and times the set."""
SLOTS = 2


class NotReplayed(RuntimeError):
    """Why, in a sentence."""


@dataclass(frozen=True)
class Replayed:
    """Where the new set lies, and what was compared on the way."""

    run: Path
    step: int
    values_compared: int
    digests_compared: int


class _Faults(rpc.DaemonServicer):  # type: ignore[misc]
    """Where device servers tell what goes wrong."""

    def __init__(self) -> None:
        self.told = ""

    async def ReportFault(self, request: Any, context: Any) -> pb.FaultReply:
        self.told = self.told or f"rank {request.rank}, record {request.record_index}: {request.message}"
        return pb.FaultReply()


def new_run(reach: Reach) -> Path:
    """Where the set goes that a replay makes."""
    run = next(iter(reach.stored.parts.values())).path.parent
    return run.parent / f"{run.name}.replayed-{reach.step}"


def replay_stored(reach: Reach) -> Replayed:
    """Do it, as long as it takes; raises NotReplayed.  Nothing is left behind but the new set."""
    if (written := new_run(reach)).exists():
        raise NotReplayed(f"{written} is there already: export it, or remove it to replay once more")
    return asyncio.run(_cancelled_by_signals(reach))


async def _cancelled_by_signals(reach: Reach) -> Replayed:
    work = asyncio.create_task(_replay(reach))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, work.cancel)
    try:
        return await work
    except asyncio.CancelledError:
        raise NotReplayed("it was interrupted; nothing has changed") from None
    except (OSError, ValueError, SpawnerError, RoundFailed, replay.LogError) as problem:
        raise NotReplayed(str(problem) or repr(problem)) from problem


async def _replay(reach: Reach) -> Replayed:
    run = next(iter(reach.stored.parts.values())).path.parent
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.enter_context(in_use(run))
        runtime = RuntimeDirectory.make()
        cleanup.callback(runtime.remove)
        faults = _Faults()
        socket = runtime.path / "replay.sock"
        await _serve(faults, socket, cleanup)
        driver = next(rank.about.driver for rank in reach.ranks.values() if rank.about is not None)
        devices = [f"{driver}:{index}" for index in range(len(reach.ranks))]
        command = default_command(socket, runtime.path, driver, GRACE_S, DataNetwork())
        pool = ServerPool(devices, 0, runtime.path, command)
        cleanup.push_async_callback(pool.stop)
        cleanup.callback(_kill, pool)
        await pool.start()
        job = Job("replay", None, [])
        laid = {rank: _session(job, reach, rank, devices[rank], runtime) for rank in sorted(reach.ranks)}
        serial = reach.stored.serial + 1
        for session in job.sessions.values():
            session.log.order_snapshot(serial, reach.step)
        leases = Leases(devices, pool)
        for session in job.sessions.values():
            leases.hold(session)
        await _bring_back(job, pool, leases)
        await _replayed(job, serial, faults)
        compared = sum(_check(session, serial, laid[session.rank]) for session in job.sessions.values())
        values = sum(session.log.replies_compared for session in job.sessions.values())
        for session in job.sessions.values():
            _describe(session, serial, laid[session.rank])
        written = new_run(reach)
        with _whole_or_not_at_all(written):
            _tell_origin(written, reach)
            await _write(job, serial, written)
        return Replayed(written, reach.step, values, compared)


async def _serve(faults: _Faults, socket: Path, cleanup: contextlib.AsyncExitStack) -> None:
    """What device servers expect of a proxyd."""
    server = grpc.aio.server(options=OPTIONS)
    previous = os.umask(0o177)
    try:
        server.add_insecure_port(address(socket))
    finally:
        os.umask(previous)
    rpc.add_DaemonServicer_to_server(faults, server)
    rpc.add_RendezvousServicer_to_server(RendezvousService(Store()), server)
    await server.start()
    cleanup.push_async_callback(server.stop, 0.2)


def _session(job: Job, reach: Reach, rank: int, device: str, runtime: RuntimeDirectory) -> Laid:
    """A rank whose log is filled, and whose device server has died; its worker is us."""
    of_rank = reach.ranks[rank]
    about = of_rank.about
    assert about is not None
    directory = runtime.rank_directory(job.name, rank, 0)
    area = AREA_BYTES + AREA_FACTOR * reach.stored.bytes
    replay.create_log(
        str(directory), rank=rank, world=about.world, **log_sizes(of_rank, reach.step),
        reply_bytes=LARGEST_REPLY, shadow_bytes=area, snapshot_bytes=area,
        proxyd_pid=os.getpid(), proxyd_start_ticks=start_ticks(os.getpid()),
    )  # fmt: skip
    log = replay.Log(str(directory))
    laid = lay_out(of_rank, reach.step, log)
    run = next(iter(reach.stored.parts.values())).path.parent
    start = of_rank.start
    dead = AbsentServer(device)
    job.sessions[rank] = Session(
        job=job, rank=rank, world=about.world, device=device, device_index=rank, threads=about.threads,
        worker=Watched(os.getpid()), directory=directory, log=log, server=dead, lacks_state=True,
        durable=[Durable(reach.stored.serial, run, reach.stored.bytes, facts_of(start), start.log_offset)],
    )  # fmt: skip
    return laid


async def _bring_back(job: Job, pool: ServerPool, leases: Leases) -> None:
    """As in a recovery from storage; raises RoundFailed or NotReplayed."""
    job.generation = 1
    everybody = tuple(sorted(job.sessions))
    of_job = Round(job, HostPlacement(pool, leases), True, lambda session: None, Restorer(None))
    result = await of_job.run(FaultFacts(FaultKind.REHEARSAL, everybody), [])
    if result.plan.name is not PlanName.RESTORE_STORED_REPLAY:
        raise NotReplayed(f"the set and its log do not fit together: {result.plan.reason}")


async def _replayed(job: Job, serial: int, faults: _Faults) -> None:
    """Until every rank has a snapshot of the commit that its log ends with; raises NotReplayed."""
    sessions = list(job.sessions.values())
    seen: list[int] = []
    moved = time.monotonic()
    while not all(any(kept.serial == serial for kept in s.log.snapshots()) for s in sessions):
        for session in sessions:
            log = session.log
            log.floor_commit = max(log.floor_commit, log.commit_count)  # nobody will go back
            _check_health(session, serial)
        if faults.told:
            raise NotReplayed(f"a device server failed: {faults.told}")
        cursors = [session.log.cursor for session in sessions]
        if cursors != seen:
            seen, moved = cursors, time.monotonic()
        elif time.monotonic() - moved > STUCK_S:
            raise NotReplayed(f"the replay has not moved for {STUCK_S:.0f} s")
        await asyncio.sleep(LOOK_S)


def _check_health(session: Session, serial: int) -> None:
    log, who = session.log, f"rank {session.rank}"
    if log.session_state:
        raise NotReplayed(f"{who} cannot be replayed: {log.lost_message}")
    if log.error_kind:
        raise NotReplayed(f"{who} fails in the replay: {log.error_message}")
    if log.snapshot_failed >= serial:
        raise NotReplayed(f"there is no memory in /dev/shm for the state of {who}")
    if not session.server.process.running:
        raise NotReplayed(f"the device server of {who} died")


def _check(session: Session, serial: int, laid: Laid) -> int:
    """Whether the replay led to what there was; how many digests say so.  Raises NotReplayed."""
    who = f"rank {session.rank}"
    if session.log.replies_different:
        raise NotReplayed(
            f"{session.log.replies_different} of {session.log.replies_compared} values that {who} read are "
            "others in the replay: this program's log is not replayable"
        )
    found, was = session.log.snapshot_contents(serial), laid.goal.commit
    now = found.commit
    where = ("step", "log_offset", "record_index", "communicators")
    if any(getattr(now, name) != getattr(was, name) for name in where):
        raise NotReplayed(f"the replay of {who} ended at another commit than the stored one")
    if not laid.goal.manifest:
        return 0  # a rank alone keeps none
    try:
        rows = [row for row in read_manifest(laid.goal.manifest) if row.kept]
    except ValueError as problem:
        raise NotReplayed(f"the stored commit of {who} is of no use: {problem}") from problem
    digests = {handle: (count, digest) for handle, count, digest, _ in found.buffers}
    differing = [row.handle for row in rows if digests.get(row.handle) != (row.bytes, row.digest)]
    if differing:
        raise NotReplayed(
            f"the replay of {who} gave other bits than the training had: buffers "
            f"{', '.join(map(str, differing[:5]))}{' …' if len(differing) > 5 else ''}"
        )
    return len(rows)


def _describe(session: Session, serial: int, laid: Laid) -> None:
    if laid.description:
        (session.directory / f"client-{serial}").write_bytes(laid.description)


def _kill(pool: ServerPool) -> None:
    """What device servers hold is of no use any more, and some may hang."""
    for server in pool.servers:
        server.process.send(signal.SIGKILL)


@contextlib.contextmanager
def _whole_or_not_at_all(run: Path) -> Iterator[None]:
    """That directory; raises OSError if it is there already."""
    run.mkdir(mode=0o700)
    try:
        yield
    except BaseException:
        shutil.rmtree(run, ignore_errors=True)
        raise


def _tell_origin(run: Path, reach: Reach) -> None:
    """Beside the new stores: what they were made of."""
    stored = reach.stored
    origin: Mapping[str, object] = {
        "run": stored.run, "serial": stored.serial, "step": stored.step, "replayed_to": reach.step,
    }  # fmt: skip
    path = run / ORIGIN
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(json.dumps(origin))
        file.flush()
        os.fsync(file.fileno())
    sync_entries(path)


async def _write(job: Job, serial: int, run: Path) -> None:
    """As snapshots of a running job go to storage; raises NotReplayed."""
    sessions = [job.sessions[rank] for rank in sorted(job.sessions)]
    writing = Writing()
    process = await asyncio.create_subprocess_exec(
        *module_command("recovery.snapshots.writing.writer"), str(run.parent.parent),
        "--job", run.parent.name, "--slots", str(SLOTS), "--threads", str(writing.threads),
        "--chunk", str(writing.chunk_bytes), "--pool", str(writing.pool_bytes), "--keep-runs", "1",
        "--parent", str(os.getpid()),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        directories = {session.rank: str(session.directory) for session in sessions}
        process.stdin.write(Persist(serial, run.name, len(sessions), directories).encode())
        answers = [_answer(await process.stdout.readline()) for _ in sessions]
        _raise_if_failed(answers)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _answer(line: bytes) -> Written:
    if not line:
        raise NotReplayed("the process that writes the new set ended")
    return decode_answer(line)


def _raise_if_failed(answers: Sequence[Written]) -> None:
    for answer in answers:
        if answer.error:
            raise NotReplayed(f"the new set was not written: {answer.error}")
