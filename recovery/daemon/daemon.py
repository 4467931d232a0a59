"""proxyd running: pool, agent and services put together, until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc.aio
import structlog

from understudy.recovery.agent.host_agent import HostAgent, Told
from understudy.recovery.agent.open_jobs import OpenJobs
from understudy.recovery.base.control import OPTIONS, address, pb, rpc
from understudy.recovery.config.command_line import say
from understudy.recovery.config.settings import BadInput, Settings, missing_gpus, refuse_missing_gpus
from understudy.recovery.daemon.metrics import Metrics, serve_metrics
from understudy.recovery.daemon.node import describe_node, describe_ranks
from understudy.recovery.daemon.service import DaemonService
from understudy.recovery.history.recorder import recorder
from understudy.recovery.host.gpu_health import GpuHealth
from understudy.recovery.host.leases import Leases
from understudy.recovery.host.servers import ServerPool
from understudy.recovery.host.spawner import default_command
from understudy.recovery.job_hosts.spans import Spans
from understudy.recovery.machine.processes import Watched
from understudy.recovery.machine.runtime_directory import RuntimeDirectory
from understudy.recovery.machine.service_manager import ServiceManager
from understudy.recovery.machine.socket_path import claim
from understudy.recovery.machine.stop_signals import StopSignals, account_of_running
from understudy.recovery.membership.membership import Membership
from understudy.recovery.membership.network.data_network import DataNetwork, data_network
from understudy.recovery.migration.transfer.header import Here
from understudy.recovery.rendezvous.services import PeerStoreService, RendezvousService
from understudy.recovery.rendezvous.store import FILE as STORE
from understudy.recovery.rendezvous.store import Notes, Store
from understudy.recovery.snapshots.remote.first_contact import tell_of_first_contact
from understudy.recovery.takeover.adoption import Successor
from understudy.recovery.takeover.journaling import Journaling
from understudy.recovery.takeover.leftovers import Leftovers, claim_leftovers

log = structlog.get_logger()

HISTORY_S = 2.0
"""How long the last lines of the history are waited for."""
SpawnerCommand = Callable[[Path, Path, str, float, DataNetwork, str, str], list[str]]
"""(proxyd's socket, runtime directory, driver, grace of device servers, network, exact, collectives) ->
command."""


async def serve(
    settings: Settings,
    ready: Callable[[], None] = lambda: None,
    parent_pid: int = 0,
    spawner_command: SpawnerCommand = default_command,
) -> bool:
    """Serve until SIGINT, SIGTERM, or the end of `parent_pid`; leaves nothing behind.

    Answers whether it has served: it may be stopped before.  First adopts the jobs of a proxyd that died at
    the same socket.  Raises ForTheUser if it cannot start.
    """
    manager = ServiceManager()
    open_jobs = OpenJobs()
    signals = StopSignals(
        lambda sentence: say("proxyd", sentence), lambda: account_of_running(open_jobs.ranks_running())
    )
    stop = signals.came
    server = grpc.aio.server(options=OPTIONS)
    with claim(settings.socket):
        leftovers = claim_leftovers(settings, settings.log_directory)
        _bind(server, settings.socket)
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.callback(settings.socket.unlink, missing_ok=True)
        cleanup.push_async_callback(server.stop, 0)
        runtime = (
            leftovers.runtime if leftovers is not None else RuntimeDirectory.make(settings.log_directory)
        )
        leaving = contextlib.ExitStack()  # what was not adopted is left for another try
        cleanup.push(leaving)
        leaving.callback(runtime.release if leftovers is not None else runtime.remove)
        network = data_network(settings.membership, must=leftovers is None)
        command = spawner_command(
            settings.socket, runtime.path, settings.devices.kind, settings.adoption_grace_s, network,
            settings.exact, settings.collectives,
        )  # fmt: skip
        known_gpus = leftovers.journal.gpus if leftovers is not None else ()
        pool = ServerPool(settings.devices.names, settings.spares, runtime.path, command, known_gpus)
        cleanup.push_async_callback(pool.stop)
        held = {session.device_index for session in _sessions(leftovers)}
        barred = {*leftovers.journal.draining, *leftovers.journal.fenced} if leftovers is not None else set()
        for index in held | barred:
            pool.lease(settings.devices.names[index])
        starting = asyncio.create_task(pool.start())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return False
        installation = starting.result()
        if not known_gpus:
            refuse_missing_gpus(settings.devices, installation.gpus)
        if settings.persist is not None:
            settings.persist.make_directory()
        store = Store(Notes(runtime.path / STORE))
        leases = Leases(settings.devices.names, pool, GpuHealth(pool.gpus))
        for index in missing_gpus(known_gpus, installation.gpu_uuids):
            leases.fence_free(index, f"CUDA does not show it any more ({known_gpus[index]})")
        membership = Membership(
            settings.membership, str(settings.socket),
            partial(describe_node, settings, installation, leases, pool),
            partial(describe_ranks, open_jobs.jobs),
            must=leftovers is None,  # jobs that a dead proxyd left cannot wait for other hosts
            timing=settings.timing,
        )  # fmt: skip
        history = recorder()
        cleanup.push_async_callback(asyncio.to_thread, history.settle, HISTORY_S)
        journaling = Journaling(settings, open_jobs, leases, pool, runtime.path)
        metrics = Metrics(open_jobs.jobs, membership.status, settings.timing) if settings.metrics else None
        told = Told(history, journaling.note, metrics.forget if metrics is not None else lambda job: None)
        agent = HostAgent(settings, runtime, pool, leases, installation, store, open_jobs, told)
        look = asyncio.to_thread(Here.look, settings.membership.host, installation.torch_version)
        spans = Spans(agent, pool, membership, runtime, await look)
        if leftovers is not None:
            await Successor(leftovers, agent, pool, spans).adopt()
            leaving.pop_all()
            leaving.callback(runtime.remove)
        journaling.begin()
        agent.run_beside(journaling.run())
        peers_store = PeerStoreService(store, spans, open_jobs.worker_stores.get)
        await spans.moves.resume()
        cleanup.push_async_callback(spans.moves.close)
        await membership.start([spans.add_to, partial(rpc.add_MeetingServicer_to_server, peers_store)])
        cleanup.push_async_callback(membership.leave)
        cleanup.push_async_callback(spans.stop)
        agent.run_beside(spans.run())
        service = DaemonService(agent, pool, membership, spans, settings.timing)
        rpc.add_DaemonServicer_to_server(service, server)
        rendezvous = RendezvousService(store, spans.where)
        rpc.add_RendezvousServicer_to_server(rendezvous, server)
        if metrics is not None:
            _serve_metrics(metrics, settings.metrics, cleanup)
        await server.start()
        cleanup.push_async_callback(server.stop, 0.2)
        cleanup.push_async_callback(agent.close, "proxyd was stopped")
        log.info(
            "ready", socket=str(settings.socket), devices=settings.devices.names, runtime=str(runtime.path)
        )
        _warn_of_little_memory(settings)
        if settings.persist is not None and settings.persist.mirror is not None:
            agent.run_beside(tell_of_first_contact(settings.persist.mirror.url))
        gc.freeze()  # what is there by now stays: to look at all of it took longer than a recovery
        ready()
        manager.tell("READY=1")
        await _stopped(stop, parent_pid)
        log.info("stopping")
        manager.tell("STOPPING=1")
    return True


def _serve_metrics(metrics: Metrics, address: str, cleanup: contextlib.AsyncExitStack) -> None:
    http = serve_metrics(metrics, address)
    cleanup.callback(http.server_close)
    cleanup.push_async_callback(asyncio.to_thread, http.shutdown)
    log.info("metrics", address=address)


def _bind(server: grpc.aio.Server, socket: Path) -> None:
    """Nobody but us may connect, from the first moment on."""
    previous = os.umask(0o177)
    try:
        server.add_insecure_port(address(socket))
    except RuntimeError as problem:
        raise BadInput(f"cannot listen at {socket}: {problem}") from problem
    finally:
        os.umask(previous)
    os.chmod(socket, 0o600)


async def _stopped(stop: asyncio.Event, parent_pid: int) -> None:
    waits = [asyncio.create_task(stop.wait())]
    if parent_pid:
        try:
            waits.append(asyncio.create_task(Watched(parent_pid).ended.wait()))
        except ProcessLookupError:
            return
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _sessions(leftovers: Leftovers | None) -> list[pb.JournaledSession]:
    jobs = leftovers.journal.jobs if leftovers is not None else []
    return [session for job in jobs for session in job.sessions]


def _warn_of_little_memory(settings: Settings) -> None:
    """Shared memory that runs out kills processes (SIGBUS); containers get 64 MiB unless told otherwise."""
    state = os.statvfs(settings.log_directory)
    free = state.f_bavail * state.f_frsize
    wanted = settings.segment_count * settings.segment_bytes * settings.devices.count
    if free < min(wanted, 1 << 30):
        log.warning(
            "little shared memory: a full one ends workers with SIGBUS", free_bytes=free, may_need=wanted
        )
