"""What a proxyd does when a host is lost on which workers, ranks or leaders of its jobs are."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from understudy.protos import control_pb2 as pb
from understudy.recovery.config.settings import DeviceSpec, Settings
from understudy.recovery.job_hosts.spans import Spans
from understudy.recovery.membership.network.links import NoLink
from understudy.recovery.migration.worker_state import Away

SOON_S = 10.0


def no_link(host: str) -> Any:
    raise NoLink(f"{host} is not reached")


class Hosts:
    """What membership thinks of them, as the test says."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}

    async def standings(self) -> tuple[list[pb.HostStanding], list[str]]:
        return [
            pb.HostStanding(record=pb.HostRecord(name=name), state=state, why="nobody reaches it")
            for name, state in self.states.items()
        ], []


class Relay:
    """Of a worker that is away; it hears of its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        server = await asyncio.start_unix_server(self._serve, str(self.folder / "s"))
        try:
            yield
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b'{"state": "remote", "pid": 1}\n')
        if line := await reader.readline():
            self.told.set_result(json.loads(line))
        writer.close()


def spans_of(folder: Path, hosts: Hosts) -> Spans:
    settings = Settings(DeviceSpec("cpu", 1), Path("unused"))
    remote_ranks = SimpleNamespace(take_remote=None, tell=None, close_if_unused=None)
    agent: Any = SimpleNamespace(
        jobs={},
        coordinators={},
        deputies={},
        leases=None,
        settings=settings,
        remote_ranks=remote_ranks,
        follow=None,
        note=None,
    )
    links = SimpleNamespace(to=no_link)
    membership: Any = SimpleNamespace(here="a", cluster="c", hosts=hosts, links=links)
    runtime, here = SimpleNamespace(path=folder), SimpleNamespace(host="a")
    return Spans(agent, cast(Any, None), membership, cast(Any, runtime), cast(Any, here))


def test_a_worker_of_a_job_for_one_host_ends_when_the_host_it_went_to_is_lost(folder: Path) -> None:
    async def lose() -> None:
        hosts, relay = Hosts(), Relay(folder)
        spans = spans_of(folder, hosts)
        moves = spans.moves
        async with relay.run():
            moves.outgoing.follow(folder, Away("c", "move", sure=True))
            for state in ("alive", "suspected", "unknown"):
                hosts.states["c"] = state
                await spans.look_at_hosts()
                assert not relay.told.done()
            hosts.states["c"] = "lost"
            await spans.look_at_hosts()
            told = await asyncio.wait_for(relay.told, SOON_S)
            assert told["problem"].startswith("host c is lost, and the worker with it (nobody reaches it)")
        await moves.close()

    asyncio.run(lose())


def test_a_host_that_is_back_is_trusted_again(folder: Path) -> None:
    async def come_back() -> None:
        hosts = Hosts()
        spans = spans_of(folder, hosts)
        moves = spans.moves
        moves.host_is_lost("c", "host c is lost")
        for state, given_up in (("lost", True), ("suspected", True), ("alive", False)):
            hosts.states["c"] = state
            await spans.look_at_hosts()
            assert ("c" in moves.outgoing.hosts()) == given_up

    asyncio.run(come_back())
