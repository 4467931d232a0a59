"""What outlives the host that leads a job: written before it has consequences, and read by who leads next."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from led_job import TOKEN, becomes
from standbys import LEADER, Away, Clock, claim_now, image_set, in_order

from understudy.protos import control_pb2 as pb
from understudy.recovery.membership.job_leadership import Leading, claim
from understudy.recovery.membership.records import BadRecord
from understudy.recovery.membership.stores.store import Put
from understudy.recovery.record import job_record
from understudy.recovery.record import log as record_log
from understudy.recovery.record.job_record import JobRecord, NoRecord
from understudy.recovery.record.log import Recorded, RecordLog
from understudy.recovery.rendezvous.store import Store
from understudy.recovery.rendezvous.worker_store import WorkerStore

PREFIX = "understudy/c/jobs/j/record/"


class Host:
    """Host a, which leads job j."""

    def __init__(self) -> None:
        self.cluster = Away(Clock())
        self.store: Store | None = Store()
        self.known = pb.JournaledJob(name="j")

    async def begin(self) -> JobRecord:
        claimed = await claim(self.cluster, "c", "j", "a", 2)
        self.token = claimed.record.token
        self.leading = Leading(self.cluster, "c", "j", claimed.record, claimed.leadership)
        self.leading.holds.set()
        self.record = self.anew()
        await self.record.begin()
        return self.record

    def anew(self) -> JobRecord:
        """As a proxyd has it that was just started."""
        log = RecordLog(self.cluster, "c", "j", self.token)
        return JobRecord("j", log, self.leading, lambda: self.store, lambda: self.known)

    async def read(self) -> Recorded:
        return await RecordLog(self.cluster, "c", "j", self.token).read()

    async def store_as_read(self) -> Store:
        """What whoever leads next has."""
        made = Store()
        for change in (await self.read()).changes:
            made.take(change)
        return made


def test_whoever_reads_a_record_has_the_store_the_job_and_its_images_as_they_were() -> None:
    async def check() -> None:
        host = Host()
        assert host.store is not None
        await host.store.set("early", b"1")
        record = await host.begin()
        await host.store.add("count", 5, "request-1")
        host.known = pb.JournaledJob(name="j", generation=7)
        images = image_set({0: ("a", "b")})
        await record.name(images)
        host.store.delete("early", "request-2")
        await record.settle()
        read = await host.read()
        assert read.kept and not read.over and read.known == host.known and read.images == images
        assert in_order(await host.store_as_read()) == in_order(host.store)

    asyncio.run(check())


def test_a_request_of_a_worker_is_answered_once_the_record_has_what_it_changed(tmp_path: Path) -> None:
    async def check() -> None:
        host = Host()
        workers = WorkerStore(tmp_path, settle=lambda: host.record.settle())
        host.store = workers.store
        await host.begin()
        host.cluster.there = False
        line = json.dumps({"do": "add", "key": "k", "amount": 3, "id": "request-1"}).encode()
        add = asyncio.ensure_future(workers.answer(line))
        await becomes(lambda: workers.store.holds(["k"]))
        get = asyncio.ensure_future(workers.answer(json.dumps({"do": "get", "key": "k"}).encode()))
        await asyncio.wait({add, get}, timeout=0.3)
        assert not add.done() and not get.done()  # who sees it would act by it
        host.cluster.there = True
        assert json.loads(await add) == {"count": 3} and "value" in json.loads(await get)
        assert (await host.store_as_read()).done("request-1") == 3
        workers.close()

    asyncio.run(check())


def test_a_write_whose_answer_is_lost_is_made_once() -> None:
    async def check() -> None:
        host = Host()
        record = await host.begin()
        assert host.store is not None
        host.cluster.unheard = True
        await host.store.add("k", 1, "request-1")
        settled = asyncio.ensure_future(record.settle())
        await becomes(lambda: not host.cluster.there)
        await host.store.add("k", 1, "request-2")  # goes with the next one
        host.cluster.there = True
        await settled
        await record.settle()
        before = (await host.read()).next
        assert before == 4 and in_order(await host.store_as_read()) == in_order(host.store)
        await record.settle()
        assert (await host.read()).next == before  # nothing has changed

    asyncio.run(check())


def test_writes_that_come_while_one_is_under_way_go_together_as_the_next_one() -> None:
    """And nobody writes for others what he does not wait for himself: a thousand workers may ask at once."""

    class Slow(Away):
        async def transact(self, conditions: Any, changes: Any) -> int:
            await asyncio.sleep(0.002)
            return await super().transact(conditions, changes)

    async def check() -> None:
        host = Host()
        host.cluster = Slow(Clock())
        record = await host.begin()
        before, store = (await host.read()).next, host.store
        assert store is not None

        async def work(worker: int) -> None:
            for number in range(4):
                await store.add(f"k{worker}", 1, f"{worker}-{number}")
                await record.settle()

        await asyncio.gather(*(work(worker) for worker in range(100)))
        assert (await host.read()).next <= before + 10  # and not 400
        assert in_order(await host.store_as_read()) == in_order(store)

    asyncio.run(check())


def test_who_is_cancelled_amid_a_write_leaves_it_to_the_next_one() -> None:
    async def check() -> None:
        host = Host()
        record = await host.begin()
        assert host.store is not None
        host.cluster.there = False
        await host.store.set("k", b"v")
        task = asyncio.ensure_future(record.settle())
        await asyncio.wait({task}, timeout=0.1)
        task.cancel()
        await asyncio.wait({task})
        host.cluster.there = True
        await record.settle()
        assert (await host.store_as_read()).holds(["k"])

    asyncio.run(check())


def test_a_former_leader_writes_nothing_any_more() -> None:
    async def check() -> None:
        host = Host()
        record = await host.begin()
        assert host.store is not None
        await host.cluster.delete(LEADER)  # its lease has ended
        assert await claim_now(host.cluster, "b", host.token)
        before = (await host.read()).next
        await host.store.set("k", b"v")
        task = asyncio.ensure_future(record.settle())
        await asyncio.wait({task}, timeout=0.5)
        assert not task.done() and (await host.read()).next == before
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(check())


def test_a_leader_that_claims_its_job_again_goes_on_where_it_was() -> None:
    async def check() -> None:
        host = Host()
        record = await host.begin()
        assert host.store is not None
        await host.cluster.delete(LEADER)
        await host.store.set("k", b"v")
        task = asyncio.ensure_future(record.settle())
        await asyncio.wait({task}, timeout=0.3)
        assert not task.done()
        claimed = await claim(host.cluster, "c", "j", "a", 2, host.token)
        assert claimed.leadership is not None
        host.leading.token = claimed.leadership.token
        await task
        assert (await host.store_as_read()).holds(["k"])

    asyncio.run(check())


def test_by_the_record_of_a_proxyd_that_died_nobody_leads_once_its_successor_answers() -> None:
    async def check() -> None:
        host = Host()
        await (await host.begin()).name(image_set({0: ("a", "b")}))
        successor = host.anew()
        successor.follow_predecessor(None)
        host.cluster.there = False
        task = asyncio.ensure_future(successor.settle())
        await asyncio.wait({task}, timeout=0.3)
        assert not task.done()
        host.cluster.there = True
        await task
        assert "started anew" in (await host.read()).over and not successor.kept
        await successor.begin()  # with its next images
        await successor.name(image_set({0: ("a", "c")}, "c"))
        read = await host.read()
        assert not read.over and read.images is not None and list(read.images.standbys) == ["c"]

    asyncio.run(check())


def test_the_record_of_a_proxyd_that_died_goes_on_with_the_images_that_it_names() -> None:
    """Both before its successor has written anything and afterwards whoever leads next knows all of it."""

    async def check() -> None:
        host, named = Host(), image_set({0: ("a", "b")})
        await (await host.begin()).name(named)
        assert host.store is not None
        await host.store.set("before", b"1")
        successor = host.anew()
        successor.follow_predecessor(named)
        assert not (await host.read()).over
        await host.store.set("k", b"v")
        await successor.settle_known()
        read = await host.read()
        assert not read.over and read.images == named
        assert (await host.store_as_read()).holds(["before", "k"])

    asyncio.run(check())


def test_a_record_ends_and_begins_again() -> None:
    async def check() -> None:
        host = Host()
        record = await host.begin()
        assert host.store is not None
        await record.end("no host keeps images")
        assert not record.kept and (await host.read()).over == "no host keeps images"
        host.cluster.there = False
        await host.store.set("k", b"v")
        await record.settle()  # waits for nobody
        assert host.store._told is None
        host.cluster.there = True
        await record.begin()
        assert not (await host.read()).over and (await host.store_as_read()).holds(["k"])

    asyncio.run(check())


def test_a_record_that_has_grown_long_is_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        monkeypatch.setattr(record_log, "PIECE_BYTES", 1000)
        monkeypatch.setattr(job_record, "SPARE_BYTES", 4000)
        host = Host()
        record = await host.begin()
        assert host.store is not None
        most = 0
        for number in range(200):
            await host.store.add("count", 1, f"request-{number % 7}-{number}")
            await host.store.set(f"key-{number % 5}", b"v" * 300)
            await record.settle()
            entries = (await host.cluster.list(PREFIX)).entries
            assert max(len(entry.value) for entry in entries) <= 1001
            most = max(most, len(entries))
        assert in_order(await host.store_as_read()) == in_order(host.store)
        assert most < 60  # of some 200 batches
        host.known = pb.JournaledJob(name="j", not_replayable="x" * 10_000)
        await record.settle_known()
        assert (await host.read()).known == host.known

    asyncio.run(check())


def test_a_store_that_is_too_large_for_the_cluster_s_has_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        monkeypatch.setattr(job_record, "MOST_STORE_BYTES", 1000)
        host = Host()
        record = await host.begin()
        assert host.store is not None
        await host.store.set("large", b"v" * 2000)
        await record.settle()
        assert not record.kept and "store of its workers has more" in (await host.read()).over
        with pytest.raises(NoRecord, match="store of its workers has more"):
            await record.begin()
        host.store = None
        with pytest.raises(NoRecord, match="proxyrun --migratable"):
            await record.begin()

    asyncio.run(check())


def test_of_who_died_amid_a_batch_what_was_before_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        monkeypatch.setattr(record_log, "PIECE_BYTES", 100)
        host = Host()
        await host.begin()
        log = RecordLog(host.cluster, "c", "j", host.token)
        read = await host.read()
        batch = pb.JobRecordBatch(version=record_log.VERSION, first=True, over="x" * 250)
        pieces = list(log.pieces(batch, read.next))
        for piece in pieces[:2]:
            assert await log.write(piece, ())
        half = await host.read()
        assert half.kept and not half.over and half.next == read.next + 2
        for piece in log.pieces(batch, half.next):
            assert await log.write(piece, ())
        assert (await host.read()).over == "x" * 250
        assert len((await host.cluster.list(PREFIX)).entries) == len(pieces)

    asyncio.run(check())


def _flip(value: bytes) -> bytes:
    return value[:1] + b"\xff" * 20 + value[1:]


SPOILT: dict[str, tuple[str, Callable[[str, bytes], list[Put]]]] = {
    "a piece that is gone": ("a piece of it is missing", lambda key, value: [Put(key[:-1] + "9", value)]),
    "a key of another form": ("another form", lambda key, value: [Put(key[:-1] + "x", value)]),
    "bytes of another kind": ("cannot be decoded", lambda key, value: [Put(key, _flip(value))]),
    "another version": (
        "has version 9",
        lambda key, value: [Put(key, b"\x03" + pb.JobRecordBatch(version=9).SerializeToString())],
    ),
    "nothing": ("a piece of it is missing", lambda key, value: [Put(key, b"")]),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_record_that_makes_no_sense_is_not_believed_and_its_leader_writes_it_anew(what: str) -> None:
    async def check() -> None:
        sentence, spoil = SPOILT[what]
        host = Host()
        await host.begin()
        (entry,) = (await host.cluster.list(PREFIX)).entries
        await host.cluster.transact((), spoil(entry.key, entry.value))
        with pytest.raises(BadRecord, match=sentence):
            await host.read()
        successor = host.anew()
        await successor.begin()
        if what != "a key of another form":  # which is nobody's: it stays
            assert (await host.read()).kept

    asyncio.run(check())


def test_another_run_of_the_job_has_another_record() -> None:
    async def check() -> None:
        host = Host()
        await host.begin()
        assert not (await RecordLog(host.cluster, "c", "j", TOKEN).read()).kept

    asyncio.run(check())
