"""Who leads a job on when its leading host is lost: what the heir is left, and when it may."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from images_of_workers import header, some_parts
from led_job import becomes

from recovery.control import pb
from recovery.jobs import Job
from recovery.membership.election import Leadership
from recovery.membership.embedded import EmbeddedStore
from recovery.membership.records import VERSION, read, written
from recovery.membership.store import Unreachable
from recovery.rendezvous import Change, Notes, Store
from recovery.spanning import bequest, succession
from recovery.spanning.bequest import Bequest, NotLeft, Sources
from recovery.spanning.cpu_images import Pair
from recovery.spanning.estate import Estates, NotKept
from recovery.spanning.leadership import Leading, claim, claim_as_heir, heir_key_of, key_of
from recovery.spanning.span import Span
from recovery.spanning.succession import Succession
from recovery.worker_store import WorkerStore

TOKEN = b"t" * 32
NUMBERS = itertools.count(1)
"""Of a leader's requests."""
HEIR, LEADER = heir_key_of("c", "j"), key_of("c", "j")
ID, OTHER = "0" * 16, "1" * 16


def in_order(store: Store) -> list[Change]:
    return sorted(store.changes(), key=str)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def heir(host: str, estate: str = ID, token: bytes = TOKEN, leads: str = "a") -> bytes:
    return written(pb.JobHeir(version=VERSION, leader=leads, token=token, host=host, estate=estate))


def leader(host: str, token: bytes = TOKEN) -> pb.JobLeader:
    return pb.JobLeader(version=VERSION, host=host, hosts=2, token=token)


async def named(store: EmbeddedStore) -> tuple[str, str]:
    entry = await store.get(HEIR)
    record = read(entry.value, pb.JobHeir) if entry is not None else pb.JobHeir(host="no record")
    return record.host, record.estate


# ------------------------------------------------------------------ who may lead
def test_an_heir_leads_only_when_the_lease_of_the_lost_leader_has_ended() -> None:
    async def check() -> None:
        clock = Clock()
        store = EmbeddedStore(clock)
        claimed = await claim(store, "c", "j", "a", 2)
        assert claimed.leadership is not None
        revision = await store.put(HEIR, heir("b"))
        assert await claim_as_heir(store, "c", "j", leader("b"), ID, revision) is None
        clock.now = 60.0
        leads = await claim_as_heir(store, "c", "j", leader("b"), ID, revision)
        assert leads is not None and leads.token > claimed.leadership.token
        assert await named(store) == ("", ID)  # its own heir is still to be found

    asyncio.run(check())


def test_whoever_claims_a_job_again_has_no_heir_and_a_former_heir_cannot_lead() -> None:
    async def check() -> None:
        clock = Clock()
        store = EmbeddedStore(clock)
        claimed = await claim(store, "c", "j", "a", 2)
        revision = await store.put(HEIR, heir("b"))
        clock.now = 60.0
        again = await claim(store, "c", "j", "a", 2, claimed.record.token)
        assert again.leadership is not None
        assert await named(store) == ("", "")
        clock.now = 120.0
        assert await claim_as_heir(store, "c", "j", leader("b"), ID, revision) is None
        assert await store.get(LEADER) is None

    asyncio.run(check())


def test_a_leader_that_comes_back_while_its_heir_does_not_lead_for_a_moment_never_leads_again() -> None:
    async def check() -> None:
        clock = Clock()
        store = EmbeddedStore(clock)
        claimed = await claim(store, "c", "j", "a", 2)
        entry = await store.get(HEIR)
        assert entry is not None
        revision = await store.swap(HEIR, entry.revision, heir("b", token=claimed.record.token))
        clock.now = 60.0
        assert await claim_as_heir(store, "c", "j", leader("b", claimed.record.token), ID, revision)
        clock.now = 120.0  # its lease has ended, too
        late = await claim(store, "c", "j", "a", 2, claimed.record.token)
        assert late.leadership is None and late.record.host == "b"
        back = await claim(store, "c", "j", "b", 2, claimed.record.token)
        assert back.leadership is not None
        clock.now = 180.0
        anew = await claim(store, "c", "j", "a", 2)  # another job of that name
        assert anew.leadership is not None and anew.record.token != claimed.record.token

    asyncio.run(check())


def test_what_comes_too_late_does_not_undo_what_came_later(tmp_path: Path) -> None:
    async def check() -> None:
        keeper = Keeper(tmp_path / "b")
        held_up = pb.KeepStoreRequest(leadership=5, number=2, changes=[pb.StoredKey(key="k", value=b"old")])
        keeper.estates.keep_store(pb.KeepStoreRequest(leadership=5, number=1, first=True))
        for order in ((5, 3), (7, 1)):
            newer = pb.KeepStoreRequest(leadership=order[0], number=order[1], first=True)
            newer.changes.add(key="k", value=b"new")
            keeper.estates.keep_store(newer)
            with pytest.raises(NotKept, match="too late"):
                keeper.estates.keep_store(held_up)
        assert await keeper.store.get("k", 0) == b"new"
        jobs = [
            pb.KeepJobRequest(leadership=one, number=two, serial=1, estate=identity)
            for one, two, identity in ((7, 4, ID), (5, 9, OTHER))
        ]
        await keeper.estates.keep_job(stream(jobs[:1]))
        with pytest.raises(NotKept, match="too late"):
            await keeper.estates.keep_job(stream(jobs[1:]))
        assert keeper.estates.get(ID) is not None

    asyncio.run(check())


def test_a_leader_that_comes_back_gives_way_to_its_heir() -> None:
    async def check() -> None:
        clock = Clock()
        store = EmbeddedStore(clock)
        claimed = await claim(store, "c", "j", "a", 2)
        leading = Leading(store, "c", "j", claimed.record)
        told: list[str] = []
        leading.superseded = told.append
        revision = await store.put(HEIR, heir("b"))
        clock.now = 60.0
        assert await claim_as_heir(store, "c", "j", leader("b", claimed.record.token), ID, revision)
        async with asyncio.timeout(10):
            await leading.run()  # ends: it will never lead again
        assert told == ["b"] and not leading.holds.is_set()

    asyncio.run(check())


# ------------------------------------------------------------------ what a store tells
def test_a_store_that_takes_all_changes_of_another_answers_as_that_one(tmp_path: Path) -> None:
    async def check() -> None:
        first, second = Store(Notes(tmp_path / "a")), Store(Notes(tmp_path / "b"))
        await first.set("early", b"1")
        await first.add("count", 5, "request-1")
        for change in first.changes():
            second.take(change)
        told: list[Change] = []
        first.told = told.append
        await first.add("count", 2, "request-2")
        await first.set("gone", b"x", "request-3")
        first.delete("gone")
        first.delete("was never there")
        for change in told:
            second.take(change)
        assert in_order(second) == in_order(first)
        assert await second.add("count", 5, "request-1") == 5  # done before: answered again
        assert await second.add("count", 2, "request-2") == 7
        assert second.done("request-3") is None and not second.holds(["gone"])
        assert Store(Notes(tmp_path / "b")).holds(["early", "count"])

    asyncio.run(check())


# ------------------------------------------------------------------ what an heir keeps
class Keeper:
    """Host b's side."""

    def __init__(self, folder: Path, *, images: bool = True, store: bool = True) -> None:
        self.folder = folder / ".cpu-images" / "b"
        folder.mkdir(exist_ok=True)
        self.store = Store()
        kept = self.store if store else None
        self.estates = Estates(Job("j", None, []), self.folder if images else None, lambda: kept)

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.glob("*/*/*"))

    async def keep_image(self, parts: Iterable[pb.WorkerPart], estate: str = ID, rank: int = 0) -> None:
        requests = [pb.KeepImageRequest(part=part) for part in parts]
        if requests:
            requests[0].estate, requests[0].rank = estate, rank
        await self.estates.keep_image(stream(requests))

    async def keep_job(
        self, estate: str = ID, former: str = "", ranks: Iterable[int] = (0,), *, news: bool = False
    ) -> None:
        first = pb.KeepJobRequest(
            estate=estate,
            former=former,
            serial=3,
            cut=[pb.CutPlace(rank=0, log_offset=7, step=2)],
            number=next(NUMBERS),
            news=news,
        )
        described = [pb.KeepJobRequest(rank=pb.RankDescription(rank=rank)) for rank in ranks]
        await self.estates.keep_job(stream([first, *described]))


async def stream(requests: Iterable[Any]) -> AsyncIterator[Any]:
    for request in requests:
        yield request


def image(folder: Path) -> list[pb.WorkerPart]:
    return some_parts(folder, header(0))


def first_store(*keys: str) -> pb.KeepStoreRequest:
    return pb.KeepStoreRequest(
        number=next(NUMBERS), first=True, changes=[pb.StoredKey(key=key, value=b"v") for key in keys]
    )


def test_an_estate_counts_once_store_images_and_job_are_there_and_goes_when_the_next_one_counts(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        keeper = Keeper(tmp_path / "b")
        parts = image(tmp_path)
        keeper.estates.keep_store(first_store("k"))
        await keeper.keep_image(parts)
        assert keeper.estates.get(ID) is None
        await keeper.keep_job()
        known = keeper.estates.get(ID)
        assert known is not None and known.serial == 3 and known.cut[0].log_offset == 7
        await keeper.keep_image(parts, OTHER)
        await keeper.keep_job(OTHER, former=ID)
        assert keeper.estates.get(ID) is not None and keeper.estates.get(OTHER) is not None
        assert keeper.files() == [f"j.heir/{ID}/rank-0", f"j.heir/{OTHER}/rank-0"]
        await keeper.keep_job(OTHER, former=OTHER, ranks=(), news=True)  # of the one that counts
        known = keeper.estates.get(OTHER)
        assert known is not None and [one.rank for one in known.ranks] == [0]
        assert keeper.files() == [f"j.heir/{OTHER}/rank-0"]
        keeper.estates.keep_store(
            pb.KeepStoreRequest(number=next(NUMBERS), changes=[pb.StoredKey(key="k", deleted=True)])
        )
        assert len(keeper.store) == 0
        keeper.estates.keep_store(first_store("new"))  # a leader that begins anew
        assert keeper.estates.get(OTHER) is None and keeper.files() == []
        keeper.estates.close()
        assert not list(keeper.folder.iterdir())

    asyncio.run(check())


NOT_KEPT: dict[str, tuple[str, Callable[[Keeper, list[pb.WorkerPart]], Any]]] = {
    "a name that leads elsewhere": (
        "no name for it", lambda keeper, parts: keeper.keep_image(parts, "../../../etc/x")
    ),
    "an image that ends early": (
        "a part of it is missing", lambda keeper, parts: keeper.keep_image(parts[:-1])
    ),
    "an image of another rank": (
        "it is of another rank", lambda keeper, parts: keeper.keep_image(parts, rank=1)
    ),
    "parts in disorder": ("not in order", lambda keeper, parts: keeper.keep_image(parts[::-1])),
    "no image at all": ("of no rank", lambda keeper, parts: keeper.keep_image([])),
    "news of what is not there": (
        "nothing that it goes with", lambda keeper, parts: keeper.keep_job(ranks=(), news=True)
    ),
    "a job without its images": ("has not the images", lambda keeper, parts: keeper.keep_job()),
    "a job with too many ranks": (
        "no host has more", lambda keeper, parts: keeper.keep_job(ranks=range(2000))
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", NOT_KEPT)
def test_what_makes_no_sense_is_not_kept_and_leaves_nothing(what: str, tmp_path: Path) -> None:
    async def check() -> None:
        sentence, act = NOT_KEPT[what]
        keeper = Keeper(tmp_path / "b")
        keeper.estates.keep_store(first_store())
        with pytest.raises(NotKept, match=sentence):
            await act(keeper, image(tmp_path))
        assert keeper.files() == [] and keeper.estates.get(ID) is None
        assert not (tmp_path / "etc").exists()

    asyncio.run(check())


def test_a_host_that_cannot_keep_says_why(tmp_path: Path) -> None:
    with pytest.raises(NotKept, match="without --cpu-image-every"):
        Keeper(tmp_path / "b", images=False).estates.keep_store(first_store())
    with pytest.raises(NotKept, match="proxyrun --migratable"):
        Keeper(tmp_path / "b", store=False).estates.keep_store(first_store())
    with pytest.raises(NotKept, match="not copied from the beginning"):
        Keeper(tmp_path / "b").estates.keep_store(pb.KeepStoreRequest(number=1))


# ------------------------------------------------------------------ what a leader leaves
class Stub:
    """Host b as the leader asks it."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper, self.reached = keeper, True
        self.gate = asyncio.Event()
        self.gate.set()

    async def _answered(self, work: Callable[[], Any]) -> pb.KeepReply:
        await self.gate.wait()
        if not self.reached:
            return pb.KeepReply(error="it is not reached")
        try:
            found = work()
            if found is not None:
                await found
        except NotKept as problem:
            return pb.KeepReply(error=str(problem))
        return pb.KeepReply()

    def KeepStore(self, request: Any, timeout: float) -> Any:
        return self._answered(lambda: self.keeper.estates.keep_store(request))

    def KeepImage(self, requests: Any, timeout: float) -> Any:
        return self._answered(lambda: self.keeper.estates.keep_image(requests))

    def KeepJob(self, requests: Any, timeout: float) -> Any:
        return self._answered(lambda: self.keeper.estates.keep_job(requests))


class Away(EmbeddedStore):
    """A cluster's store that is not always there."""

    there = True

    async def get(self, key: str) -> Any:
        if not self.there:
            raise Unreachable("no answer")
        return await super().get(key)

    async def transact(self, conditions: Any, changes: Any) -> int:
        if not self.there:
            raise Unreachable("no answer")
        return await super().transact(conditions, changes)


class LeadersHost:
    """Host a, with rank 0; rank 1 is at b."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = Away(Clock())
        self.keeper = Keeper(folder / "b")
        self.stub = Stub(self.keeper)
        self.store = Store()
        self.lapsed: list[str] = []
        self.known = pb.JournaledJob(name="j")

    async def begin(self) -> Bequest:
        claimed = await claim(self.cluster, "c", "j", "a", 2)
        assert claimed.leadership is not None
        self.leading = Leading(self.cluster, "c", "j", claimed.record, claimed.leadership)
        self.leading.holds.set()
        self.member = SimpleNamespace(
            host="b", lost="", times=1, connected=asyncio.Event(), stub=lambda: self.stub
        )
        self.member.connected.set()
        self.session: Any = SimpleNamespace(rank=0, moving=None, relay="/r", active=True)
        job = Job("j", None, [])
        self.span = Span(2, TOKEN, leading=self.leading)
        lead: Any = SimpleNamespace(
            span=self.span, members={"b": self.member}, of=lambda member: [1],
            credentials=lambda: {"job": "j", "token": TOKEN, "leadership": self.leading.token},
        )  # fmt: skip
        sources = Sources(
            lambda job: self.store, self._image, lambda session: pb.RankDescription(rank=session.rank),
            lambda job: self.known,
        )  # fmt: skip
        made = Bequest(job, lead, self.cluster, HEIR, sources)
        made.lapsed = self.lapsed.append
        return made

    @contextlib.asynccontextmanager
    async def _image(self, session: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(parts=stream(image(self.folder)), paused_s=0.25)

    def pair(self, serial: int) -> Pair:
        places: Any = {rank: SimpleNamespace(log_offset=100 * serial, step=serial) for rank in (0, 1)}
        return Pair(serial, frozenset((0, 1)), places, self.folder)


def test_a_leader_names_its_heir_once_that_has_everything(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        await host.store.set("early", b"1")
        leaving = await host.begin()
        host.stub.gate.clear()
        task = asyncio.ensure_future(leaving.leave(host.pair(1), [host.session]))
        await asyncio.sleep(0)
        assert await named(host.cluster) == ("", "")
        host.stub.gate.set()
        assert await task == 0.25
        name, first = await named(host.cluster)
        assert host.span.heir == name
        estate = host.keeper.estates.get(first)
        assert name == "b" and estate is not None and estate.serial == 1 and sorted(estate.images) == [0]
        assert host.keeper.store.holds(["early"])
        await leaving.leave(host.pair(2), [host.session])
        _, second = await named(host.cluster)
        assert second != first and host.keeper.estates.get(first) is not None  # until it is told again
        host.known = pb.JournaledJob(name="j", generation=5)
        await leaving.look()
        assert host.keeper.estates.get(first) is None
        known = host.keeper.estates.get(second)
        assert known is not None and known.known.generation == 5 and known.serial == 2

    asyncio.run(check())


def test_a_write_to_the_store_is_answered_once_the_heir_has_it(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        workers = WorkerStore(tmp_path)
        host.store = workers.store
        leaving = await host.begin()
        workers.settle = leaving.settle
        await leaving.leave(host.pair(1), [host.session])
        host.stub.gate.clear()
        line = json.dumps({"do": "add", "key": "k", "amount": 3, "id": "request-1"}).encode()
        task = asyncio.ensure_future(workers.answer(line))
        await becomes(lambda: workers.store.holds(["k"]))
        assert not task.done() and not host.keeper.store.holds(["k"])
        host.stub.gate.set()
        assert json.loads(await task) == {"count": 3}
        assert host.keeper.store.done("request-1") == 3
        workers.close()

    asyncio.run(check())


def test_a_write_that_the_heir_does_not_get_is_answered_once_nobody_is_the_heir(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        leaving = await host.begin()
        await leaving.leave(host.pair(1), [host.session])
        host.stub.reached, host.cluster.there = False, False
        await host.store.set("k", b"v")
        task = asyncio.ensure_future(leaving.settle())
        await asyncio.wait({task}, timeout=0.3)
        assert not task.done()  # the cluster's store still names b
        host.cluster.there = True
        await task
        assert await named(host.cluster) == ("", "") and not leaving.heir and not host.span.heir
        assert host.lapsed == ["host b: it is not reached"]
        await host.store.set("more", b"v")  # nobody is told, and nothing piles up
        assert host.store.told is None and not leaving._changes

    asyncio.run(check())


def test_whoever_was_let_go_of_while_it_was_about_to_be_named_is_not_named(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        leaving = await host.begin()
        held_up, go_on = asyncio.Event(), asyncio.Event()
        keep = host.stub.KeepJob

        async def slow(requests: Any, timeout: float) -> pb.KeepReply:
            reply: pb.KeepReply = await keep(requests, timeout)
            held_up.set()
            await go_on.wait()
            return reply

        host.stub.KeepJob = slow  # type: ignore[method-assign]
        task = asyncio.ensure_future(leaving.leave(host.pair(1), [host.session]))
        await held_up.wait()
        host.stub.reached = False
        await host.store.set("k", b"v")
        await leaving.settle()  # answered: nobody is the heir any more
        host.stub.reached = True
        go_on.set()
        with pytest.raises(NotLeft, match="has not got all of the store"):
            await task
        assert (await named(host.cluster))[0] == "" and not leaving.heir

    asyncio.run(check())


def test_what_is_told_meanwhile_does_not_drop_what_is_being_left(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        leaving = await host.begin()
        await leaving.leave(host.pair(1), [host.session])
        host.stub.gate.clear()
        task = asyncio.ensure_future(leaving.leave(host.pair(2), [host.session]))
        await asyncio.sleep(0)
        host.known = pb.JournaledJob(name="j", generation=5)
        told = asyncio.ensure_future(leaving.look())
        host.stub.gate.set()
        await asyncio.gather(task, told)
        name, estate = await named(host.cluster)
        known = host.keeper.estates.get(estate)
        assert name == "b" and known is not None and known.serial == 2

    asyncio.run(check())


def test_an_heir_that_was_started_anew_is_not_named_any_more(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        leaving = await host.begin()
        await leaving.leave(host.pair(1), [host.session])
        host.stub.keeper = Keeper(tmp_path / "b2")
        await leaving.look()
        assert leaving.heir == "b"  # nothing has told us
        host.member.times += 1
        await leaving.look()
        assert await named(host.cluster) == ("", "") and "nothing that it goes with" in host.lapsed[0]

    asyncio.run(check())


def test_a_leader_that_has_claimed_the_job_again_names_its_heir_again(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        leaving = await host.begin()
        await leaving.leave(host.pair(1), [host.session])
        before = await named(host.cluster)
        await host.cluster.delete(LEADER)
        claimed = await claim(host.cluster, "c", "j", "a", 2, host.leading.record.token)
        assert claimed.leadership is not None and await named(host.cluster) == ("", "")
        host.leading.token = claimed.leadership.token
        await leaving.look()
        assert await named(host.cluster) == before

    asyncio.run(check())


def test_a_leader_that_is_none_any_more_names_nobody(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        leaving = await host.begin()
        await leaving.leave(host.pair(1), [host.session])
        entry = await host.cluster.get(HEIR)
        assert entry is not None
        await host.cluster.delete(LEADER)
        assert isinstance(
            await claim_as_heir(host.cluster, "c", "j", leader("b"), ID, entry.revision), Leadership
        )
        task = asyncio.ensure_future(leaving.leave(host.pair(2), [host.session]))
        await asyncio.wait({task}, timeout=0.5)
        assert not task.done() and await named(host.cluster) == ("", ID)
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(check())


def test_without_another_host_that_can_keep_it_a_job_is_left_to_nobody(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        leaving = await host.begin()
        host.stub.keeper = Keeper(tmp_path / "b3", images=False)
        with pytest.raises(NotLeft, match="host b: its proxyd was started without --cpu-image-every"):
            await leaving.leave(host.pair(1), [host.session])
        host.member.lost = "gone"
        with pytest.raises(NotLeft, match="no other host has ranks"):
            await leaving.leave(host.pair(1), [host.session])
        assert await named(host.cluster) == ("", "") and host.lapsed == []

    asyncio.run(check())


def test_what_goes_to_the_heir_goes_in_messages_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        monkeypatch.setattr(bequest, "ENOUGH_BYTES", 1000)
        host = LeadersHost(tmp_path)
        sizes = []
        keep = host.stub.KeepStore

        def keep_store(request: Any, timeout: float) -> Any:
            sizes.append(request.ByteSize())
            return keep(request, timeout)

        host.stub.KeepStore = keep_store  # type: ignore[method-assign]
        for number in range(50):
            await host.store.set(f"key-{number}", b"v" * 100)
        await host.store.set("large", b"v" * 5000)
        leaving = await host.begin()
        await leaving.leave(host.pair(1), [host.session])
        assert in_order(host.keeper.store) == in_order(host.store)
        assert len(sizes) > 5 and max(sizes) < 6000

    asyncio.run(check())


# ------------------------------------------------------------------ when the leader is lost
class Lost:
    """Host b or c of a job whose leader a is lost."""

    def __init__(self, folder: Path, here: str) -> None:
        self.cluster = Away(Clock())
        self.keeper = Keeper(folder / here)
        self.deputy: Any = SimpleNamespace(estates=self.keeper.estates, followed_at=0.0)
        self.job = Job("j", None, [], span=Span(2, TOKEN, "a"))
        self.promoted: list[str] = []
        self.succession = Succession(here, lambda: self.cluster, "c", self._promote)

    async def _promote(self, job: Job) -> Any:
        assert job.span is not None and job.span.leading is not None and not job.span.leader
        self.promoted.append(job.name)
        return SimpleNamespace(
            images=None, run_beside=lambda work: work.close(), span=job.span, job=job,
            lost_hosts=SimpleNamespace(expect_loss=lambda former: former),
        )  # fmt: skip

    async def why_over(self, *lost: str) -> str:
        return await self.succession.why_over(self.job, self.deputy, {"a", *lost}, "its lease has ended")


def test_the_heir_leads_the_job_on_as_the_leader_left_it(tmp_path: Path) -> None:
    async def check() -> None:
        lost = Lost(tmp_path, "b")
        lost.keeper.estates.keep_store(first_store("k"))
        recovery = pb.Recovery(fault="server-died")
        known = pb.JournaledJob(
            name="j", generation=4, recoveries=[recovery], departures=[pb.JournaledDeparture(rank=3)],
            span=pb.JournaledSpan(hosts=2, token=TOKEN, members=["b", "c"], awaited=["b", "c"]),
        )  # fmt: skip
        first = pb.KeepJobRequest(estate=ID, serial=3, known=known, number=next(NUMBERS))
        await lost.keeper.estates.keep_job(stream([first]))
        await lost.cluster.put(HEIR, heir("b"))
        assert await lost.why_over() == "" and lost.promoted == ["j"]
        span = lost.job.span
        assert span is not None and span.members == {"c"} and span.awaited == {"c"}
        assert lost.job.generation == 4 and list(lost.job.recoveries) == [recovery]
        assert lost.job.departed == {3: False}
        [adoption] = lost.job.adoptions
        assert (adoption.former_host, adoption.host) == ("a", "b")
        entry = await lost.cluster.get(LEADER)
        assert entry is not None and read(entry.value, pb.JobLeader).host == "b"

    asyncio.run(check())


def test_an_heir_whose_claim_was_made_unheard_leads_all_the_same(tmp_path: Path) -> None:
    async def check() -> None:
        lost = Lost(tmp_path, "b")
        lost.keeper.estates.keep_store(first_store())
        await lost.keeper.estates.keep_job(stream([pb.KeepJobRequest(estate=ID, serial=3, number=1)]))
        revision = await lost.cluster.put(HEIR, heir("b"))
        assert await claim_as_heir(lost.cluster, "c", "j", leader("b"), ID, revision)
        assert await lost.why_over() == "" and lost.promoted == ["j"]

    asyncio.run(check())


def test_an_heir_without_its_estate_says_so_and_nobody_waits_for_it(tmp_path: Path) -> None:
    async def check() -> None:
        lost, other = Lost(tmp_path, "b"), Lost(tmp_path, "c")
        other.cluster = lost.cluster
        await lost.cluster.put(HEIR, heir("b"))
        assert await other.why_over() == ""
        assert await lost.why_over() == "what it has left to this host is gone" and not lost.promoted
        assert await other.why_over() == "it has left the job to nobody"

    asyncio.run(check())


def test_other_members_wait_for_the_heir_unless_it_is_lost_too_or_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        lost = Lost(tmp_path, "c")
        assert await lost.why_over() == "it has left the job to nobody"
        await lost.cluster.put(HEIR, heir("b"))
        assert await lost.why_over() == ""
        assert "host b, which was to lead it on, is lost, too" in await lost.why_over("b")
        await lost.cluster.put(HEIR, heir("", leads="b"))
        assert await lost.why_over() == ""  # it leads, and will follow us
        monkeypatch.setattr(succession, "FOLLOWS_S", -1.0)
        assert "was to lead it on, and does not" in await lost.why_over()
        await lost.cluster.put(HEIR, b"nonsense")
        assert "cannot be read" in await lost.why_over()
        lost.cluster.there = False
        assert await lost.why_over() == ""  # nobody can tell

    asyncio.run(check())


def test_a_job_of_that_name_that_others_have_started_since_is_not_waited_for(tmp_path: Path) -> None:
    async def check() -> None:
        lost = Lost(tmp_path, "c")
        await lost.cluster.put(HEIR, heir("b", token=b"u" * 32))
        assert await lost.why_over() == "it has left the job to nobody"

    asyncio.run(check())
