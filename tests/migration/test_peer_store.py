"""Stores of a job on several hosts: what is passed on to its leader, and what comes of it when that dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from linked_hosts import Host, Span

from understudy.recovery.base.control import OPTIONS, address, asynchronous_channel, pb, rpc
from understudy.recovery.membership.network.certificates import issue, load, make_authority
from understudy.recovery.membership.network.links import Links
from understudy.recovery.rendezvous.forwarder import Leader, NotPassedOn, StoreForwarder
from understudy.recovery.rendezvous.services import MOST_KEYS_AT_ONCE, PeerStoreService, RendezvousService
from understudy.recovery.rendezvous.store import LONGEST_KEY, Store

LONG_MS = 60_000


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    """For hosts a, b, c and d; d has no part in the job."""
    directory = tmp_path / "certs"
    make_authority(directory, "tests")
    for host in "abcd":
        issue(directory, host)
    return directory


class Scene:
    """Hosts a and c, each of which may lead; device servers of host b, and how they ask."""

    def __init__(self, certs: Path, socket: Path) -> None:
        self.a, self.c = Host(certs, "a"), Host(certs, "c")
        known = {host.name: host.record for host in (self.a, self.c)}
        self.links = {name: Links(known.get, load(certs, name)) for name in "bd"}
        self.span = Span()
        self.store = Store()
        self._socket = socket
        self.server: Any = None
        """As a device server of b asks."""

    def lead(self, host: Host, by: str = "b") -> None:
        self.span.leader = Leader(host.name, self.links[by].to(host.name))

    def meeting(self, host: Host, by: str = "b") -> Any:
        return rpc.MeetingStub(self.links[by].to(host.name))

    async def __aenter__(self) -> Scene:
        await self.a.start()
        await self.c.start()
        self._here = grpc.aio.server(options=OPTIONS)
        service = RendezvousService(self.store, self.span.where)
        rpc.add_RendezvousServicer_to_server(service, self._here)
        self._here.add_insecure_port(address(self._socket))
        await self._here.start()
        self._channel = asynchronous_channel(self._socket)
        self.server = rpc.RendezvousStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()
        await self._here.stop(0)
        for links in self.links.values():
            await links.close()
        await self.a.stop()
        await self.c.stop()


@pytest.fixture
def scene(certs: Path, tmp_path: Path) -> Callable[[Callable[[Scene], Awaitable[None]]], None]:
    def played(play: Callable[[Scene], Awaitable[None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(60), Scene(certs, tmp_path / "b.sock") as made:
                await play(made)

        asyncio.run(main())

    return played


Play = Callable[[Callable[[Scene], Awaitable[None]]], None]


@contextlib.asynccontextmanager
async def refused(code: grpc.StatusCode, sentence: str) -> AsyncIterator[None]:
    with pytest.raises(grpc.RpcError, match=sentence) as told:
        yield
    assert told.value.code() is code
    assert "\n" not in told.value.details()


async def waited_for(scene: Scene, store: Store) -> asyncio.Task[Any]:
    """A wait of b for a key that nobody sets, once the leader knows of it."""
    seen = asyncio.Event()
    get = store.get_all

    async def noticed(keys: Sequence[str], timeout: float) -> list[bytes] | None:
        seen.set()
        return await get(keys, timeout)

    store.get_all = noticed  # type: ignore[method-assign]
    waiting = asyncio.ensure_future(scene.server.Get(pb.StoreGetRequest(keys=["j/1/x"], timeout_ms=LONG_MS)))
    await seen.wait()
    assert not waiting.done()
    return waiting


def test_ranks_of_two_hosts_meet_at_the_store_of_the_leader(scene: Play) -> None:
    async def play(scene: Scene) -> None:
        scene.lead(scene.a)
        waiting = asyncio.ensure_future(
            scene.server.Get(pb.StoreGetRequest(keys=["j/1/a"], timeout_ms=LONG_MS))
        )
        await scene.server.Set(pb.StoreSetRequest(key="j/1/b", value=b"\0b"))
        assert await scene.a.store.get("j/1/b", 0) == b"\0b" and len(scene.store) == 0
        await scene.a.store.set("j/1/a", b"a")
        assert list((await waiting).values) == [b"a"]
        assert (await scene.server.Check(pb.StoreCheckRequest(keys=["j/1/a", "j/1/b"]))).found
        assert (await scene.server.Add(pb.StoreAddRequest(key="j/1/n", amount=3))).count == 3
        assert await scene.a.store.add("j/1/n", 1) == 4
        assert (await scene.server.Delete(pb.StoreDeleteRequest(key="j/1/n"))).found
        assert not (await scene.server.Get(pb.StoreGetRequest(keys=["j/1/n"]))).found
        assert not (await scene.server.Get(pb.StoreGetRequest(keys=["j/1/n"], timeout_ms=1))).found

    scene(play)


def test_all_that_peers_publish_comes_with_one_request(scene: Play) -> None:
    async def play(scene: Scene) -> None:
        scene.lead(scene.a)
        keys = [f"j/1/{number}" for number in range(3)]
        get = scene.server.Get(pb.StoreGetRequest(keys=[*keys, keys[0]], timeout_ms=LONG_MS))
        waiting = asyncio.ensure_future(get)
        for key in reversed(keys):
            assert not waiting.done()
            await scene.server.Set(pb.StoreSetRequest(key=key, value=key.encode()))
        assert list((await waiting).values) == [key.encode() for key in (*keys, keys[0])]
        some = pb.StoreGetRequest(keys=[keys[0], "j/1/absent"], timeout_ms=1)
        assert (await scene.server.Get(some)) == pb.StoreReply(found=False)

    scene(play)


@pytest.mark.parametrize("count", [0, MOST_KEYS_AT_ONCE + 1])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_request_for_no_key_or_for_too_many_is_refused(count: int, elsewhere: bool, scene: Play) -> None:
    async def play(scene: Scene) -> None:
        if elsewhere:
            scene.lead(scene.a)
        else:
            scene.span.leader = None
        request = pb.StoreGetRequest(keys=["j/x"] * count, timeout_ms=LONG_MS)
        async with refused(grpc.StatusCode.INVALID_ARGUMENT, "a request is for 1 to 4096 keys"):
            await scene.server.Get(request)

    scene(play)


def test_jobs_that_this_host_leads_stay_here(scene: Play) -> None:
    async def play(scene: Scene) -> None:
        scene.span.leader = None
        await scene.server.Set(pb.StoreSetRequest(key="j/1/b", value=b"b"))
        assert await scene.store.get("j/1/b", 0) == b"b" and len(scene.a.store) == 0

    scene(play)


@pytest.mark.parametrize("what", ["another", "nobody", "this host"])
def test_a_wait_ends_with_a_sentence_when_the_leader_changes(what: str, scene: Play) -> None:
    async def play(scene: Scene) -> None:
        scene.lead(scene.a)
        waiting = await waited_for(scene, scene.a.store)
        match what:
            case "another":
                scene.lead(scene.c)
            case "nobody":
                scene.span.leader = "its lease has ended"
            case "this host":
                scene.span.leader = None
        why = "lost its leader: its lease has ended" if what == "nobody" else "another leads job j now"
        async with refused(grpc.StatusCode.ABORTED, f"waiting for j/1/x was given up: .*{why}"):
            await waiting

    scene(play)


def test_a_wait_at_this_host_ends_when_another_leads(scene: Play) -> None:
    async def play(scene: Scene) -> None:
        scene.span.leader = None
        waiting = await waited_for(scene, scene.store)
        scene.lead(scene.a)
        async with refused(grpc.StatusCode.ABORTED, "another leads job j now"):
            await waiting

    scene(play)


def test_a_wait_ends_with_a_sentence_when_the_link_breaks(scene: Play) -> None:
    async def play(scene: Scene) -> None:
        scene.lead(scene.a)
        waiting = await waited_for(scene, scene.a.store)
        await scene.a.stop()
        async with refused(grpc.StatusCode.ABORTED, "given up: host a, which leads job j, cannot be asked"):
            await waiting

    scene(play)


def test_a_server_that_is_parked_waits_at_the_leader_no_more(scene: Play) -> None:
    async def play(scene: Scene) -> None:
        scene.lead(scene.a)
        ended = asyncio.Event()

        async def held(keys: Sequence[str], timeout: float) -> list[bytes] | None:
            seen.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return None

        seen = asyncio.Event()
        scene.a.store.get_all = held  # type: ignore[method-assign]
        call = scene.server.Get(pb.StoreGetRequest(keys=["j/1/x"], timeout_ms=LONG_MS))
        waiting = asyncio.ensure_future(call)
        await seen.wait()
        call.cancel()
        await ended.wait()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    scene(play)


def test_what_may_be_done_twice_waits_for_the_next_leader(scene: Play) -> None:
    async def play(scene: Scene) -> None:
        scene.lead(scene.a)
        await scene.server.Set(pb.StoreSetRequest(key="j/1/x", value=b"x"))
        await scene.a.stop()
        setting = asyncio.ensure_future(scene.server.Set(pb.StoreSetRequest(key="j/1/y", value=b"y")))
        getting = asyncio.ensure_future(scene.server.Get(pb.StoreGetRequest(keys=["j/1/x"])))
        scene.span.leader = "nobody leads it yet"
        await scene.c.store.set("j/1/x", b"x")
        scene.lead(scene.c)
        assert (await setting).found and list((await getting).values) == [b"x"]
        assert await scene.c.store.get("j/1/y", 0) == b"y"

    scene(play)


class DiesBeforeItAnswers(PeerStoreService):
    """Has added, and its host is gone."""

    async def Add(self, request: Any, context: Any) -> Any:
        await super().Add(request, context)
        self.added.set()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "it died")

    added: asyncio.Event


def test_an_addition_whose_answer_was_lost_counts_once(scene: Play) -> None:
    async def play(scene: Scene) -> None:
        await scene.a.stop()
        dying = DiesBeforeItAnswers(scene.a.store, scene.span)
        dying.added = asyncio.Event()
        await scene.a.start(dying)
        scene.lead(scene.a)
        adding = asyncio.ensure_future(scene.server.Add(pb.StoreAddRequest(key="j/1/n", amount=5)))
        await dying.added.wait()
        await scene.a.stop()
        await scene.a.start()
        assert (await adding).count == 5
        assert await scene.a.store.get("j/1/n", 0) == b"5"

    scene(play)


def test_a_request_that_nobody_answers_ends_with_a_sentence_in_time() -> None:
    async def nothing(request: Any) -> Any:
        raise AssertionError

    span = Span()
    forwarder = StoreForwarder(span.where, patience_s=0.2)
    with pytest.raises(NotPassedOn, match=r"has not answered for 0.2 s: nobody leads it"):
        asyncio.run(forwarder.ask("j", lambda stub: stub.Set, pb.StoreSetRequest(key="j/x"), nothing))
    with pytest.raises(NotPassedOn, match="nobody led job j while j/x was waited for: nobody leads it"):
        asyncio.run(forwarder.wait("j/x", pb.StoreGetRequest(keys=["j/x"], timeout_ms=200), nothing))


def test_values_too_large_for_a_message_are_refused_before_they_are_sent(scene: Play) -> None:
    async def play(scene: Scene) -> None:
        scene.lead(scene.a)
        async with refused(grpc.StatusCode.INVALID_ARGUMENT, "bytes at most"):
            await scene.server.Set(pb.StoreSetRequest(key="j/x", value=bytes(8 << 20)))

    scene(play)


def test_hosts_without_a_part_in_a_job_and_keys_of_none_are_refused(scene: Play) -> None:
    async def play(scene: Scene) -> None:
        invalid = grpc.StatusCode.INVALID_ARGUMENT
        async with refused(grpc.StatusCode.ABORTED, "host d has no part in job j"):
            await scene.meeting(scene.a, "d").Set(pb.StoreSetRequest(key="j/x", value=b"d"))
        async with refused(grpc.StatusCode.ABORTED, "host b has no part in job k"):
            await scene.meeting(scene.a).Get(pb.StoreGetRequest(keys=["k/x"]))
        for keys in (["j/x", "k/x"], ["j"], [""], []):
            async with refused(invalid, "keys begin with the name of their job"):
                await scene.meeting(scene.a).Check(pb.StoreCheckRequest(keys=keys))
        async with refused(invalid, "an addition from another host has an id"):
            await scene.meeting(scene.a).Add(pb.StoreAddRequest(key="j/x", amount=1))
        async with refused(invalid, "a key has at most"):
            await scene.meeting(scene.a).Set(pb.StoreSetRequest(key="j/" + "x" * LONGEST_KEY))
        async with refused(grpc.StatusCode.ABORTED, "host d has no part in job j"):
            await scene.meeting(scene.a, "d").AskWorkerStore(pb.WorkerStoreRequest(job="j", line=b"{}"))
        async with refused(grpc.StatusCode.ABORTED, "there is no job j with --migratable at its leader"):
            await scene.meeting(scene.a).AskWorkerStore(pb.WorkerStoreRequest(job="j", line=b"{}"))
        await scene.a.store.set("j/t", b"text")
        async with refused(grpc.StatusCode.FAILED_PRECONDITION, "j/t holds no number"):
            await scene.meeting(scene.a).Add(pb.StoreAddRequest(key="j/t", amount=1, id="i"))
        assert len(scene.a.store) == 1

    scene(play)


def test_a_reader_gets_what_is_there_at_one_moment_even_if_a_key_went_meanwhile() -> None:
    async def main() -> None:
        store = Store()
        reading = asyncio.ensure_future(store.get_all(["j/a", "j/b"], 20))
        await asyncio.sleep(0)
        await store.set("j/a", b"old")
        store.delete("j/a")
        await store.set("j/b", b"b")
        for _ in range(5):
            await asyncio.sleep(0)
        assert not reading.done()
        await store.set("j/a", b"new")
        assert await reading == [b"new", b"b"]

    asyncio.run(main())


def test_readers_that_gave_up_are_forgotten_and_wake_nobody() -> None:
    async def main() -> None:
        store = Store()
        readers = [asyncio.ensure_future(store.get_all(["j/a", f"j/{n}"], 20)) for n in range(3)]
        late = asyncio.ensure_future(store.get_all(["j/a", "j/b"], 0.001))
        await asyncio.sleep(0)
        readers[1].cancel()
        assert await late is None
        await store.set("j/a", b"a")
        assert await store.add("j/0", 7) == 7
        assert await readers[0] == [b"a", b"7"]
        readers[2].cancel()
        await asyncio.wait(readers)
        assert store._waits == {}

    asyncio.run(main())


def test_a_store_that_is_full_says_so_and_frees_what_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.recovery.rendezvous.store.LARGEST_STORE", 100)

    async def main() -> None:
        store = Store()
        await store.set("j/x", bytes(90))
        await store.set("j/x", bytes(95))
        with pytest.raises(ValueError, match="holds 0 MiB at most"):
            await store.set("j/y", bytes(90))
        store.delete("j/x")
        await store.set("j/y", bytes(90))
        assert store.holds(["j/y"])

    asyncio.run(main())
