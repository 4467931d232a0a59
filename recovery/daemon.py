"""proxyd running: pool, desk and services put together, until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import grpc.aio
import structlog

from recovery.control import OPTIONS, address, rpc
from recovery.processes import Watched
from recovery.rendezvous import RendezvousService, Store
from recovery.runtime_directory import SHARED_MEMORY, RuntimeDirectory, remove_leftovers
from recovery.servers import ServerPool
from recovery.service import DaemonService
from recovery.sessions import Desk
from recovery.settings import BadInput, Settings
from recovery.socket_path import claim
from recovery.spawner import SpawnerError, default_command

log = structlog.get_logger()

SpawnerCommand = Callable[[Path, Path, str], list[str]]
"""(proxyd's socket, runtime directory, driver) -> command."""


async def serve(
    settings: Settings,
    ready: Callable[[], None] = lambda: None,
    parent_pid: int = 0,
    spawner_command: SpawnerCommand = default_command,
) -> None:
    """Serve until SIGINT, SIGTERM, or the end of `parent_pid`; leaves nothing behind.

    Raises BadInput or SpawnerError, with a sentence for the user, if it cannot start.
    """
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = grpc.aio.server(options=OPTIONS)
    with claim(settings.socket):
        for leftover in remove_leftovers():
            log.warning("removed what a dead proxyd left behind", path=str(leftover))
        _bind(server, settings.socket)
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.callback(settings.socket.unlink, missing_ok=True)
        cleanup.push_async_callback(server.stop, 0)
        runtime = RuntimeDirectory()
        cleanup.callback(runtime.remove)
        command = spawner_command(settings.socket, runtime.path, settings.devices.kind)
        pool = ServerPool(settings.devices.names, settings.spares, runtime.path, command)
        cleanup.push_async_callback(pool.stop)
        starting = asyncio.create_task(pool.start())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return
        store = Store()
        desk = Desk(settings, runtime, pool, starting.result(), store)
        rpc.add_DaemonServicer_to_server(DaemonService(desk, pool), server)
        rpc.add_RendezvousServicer_to_server(RendezvousService(store), server)
        await server.start()
        cleanup.push_async_callback(server.stop, 0.2)
        cleanup.push_async_callback(desk.close, "proxyd was stopped")
        log.info(
            "ready", socket=str(settings.socket), devices=settings.devices.names, runtime=str(runtime.path)
        )
        _warn_of_little_memory(settings)
        ready()
        await _stopped(stop, parent_pid)
        log.info("stopping")


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


def _warn_of_little_memory(settings: Settings) -> None:
    """Shared memory that runs out kills processes (SIGBUS); containers get 64 MiB unless told otherwise."""
    state = os.statvfs(SHARED_MEMORY)
    free = state.f_bavail * state.f_frsize
    wanted = settings.segment_count * settings.segment_bytes * settings.devices.count
    if free < min(wanted, 1 << 30):
        log.warning(
            "little shared memory: a full one ends workers with SIGBUS", free_bytes=free, may_need=wanted
        )


__all__ = ["BadInput", "SpawnerError", "serve"]
