"""Who may lead a job on when its leading host is lost, as the cluster's store has it."""

from __future__ import annotations

import asyncio

from standbys import LEADER, OWNER, Clock, claim_now, leader, record, whose

from understudy.protos import control_pb2 as pb
from understudy.recovery.membership.job_leadership import Leading, claim, claim_lost
from understudy.recovery.membership.stores.embedded import EmbeddedStore
from understudy.recovery.membership.stores.store import Unchanged
from understudy.recovery.record.log import RecordLog


def test_a_standby_leads_only_when_the_lease_of_the_lost_leader_has_ended() -> None:
    async def check() -> None:
        clock = Clock()
        store = EmbeddedStore(clock)
        claimed = await claim(store, "c", "j", "a", 2)
        assert claimed.leadership is not None and await whose(store) == "a"
        assert await claim_now(store, "b") is None
        clock.now = 60.0
        leads = await claim_now(store, "b")
        assert leads is not None and leads.token > claimed.leadership.token
        assert await whose(store) == "b"

    asyncio.run(check())


def test_who_has_read_an_older_record_or_an_older_owner_does_not_lead() -> None:
    async def check() -> None:
        clock = Clock()
        store = EmbeddedStore(clock)
        claimed = await claim(store, "c", "j", "a", 2)
        token = claimed.record.token
        records = RecordLog(store, "c", "j", token)
        entry, read = await store.get(OWNER), await records.read()
        assert entry is not None
        as_read = [Unchanged(OWNER, entry.revision), records.as_read(read)]
        await record(store, pb.JobRecordBatch(over="it has gone on meanwhile"), token=token)
        clock.now = 60.0
        assert await claim_lost(store, "c", "j", leader("b", token), as_read) is None
        again = await claim(store, "c", "j", "a", 2, token)
        assert again.leadership is not None and (await records.read()).over  # it is still the same job
        clock.now = 120.0
        as_read = [Unchanged(OWNER, entry.revision), records.as_read(await records.read())]
        assert await claim_lost(store, "c", "j", leader("b", token), as_read) is None
        assert await store.get(LEADER) is None

    asyncio.run(check())


def test_a_new_job_of_a_name_begins_without_the_records_of_those_before_it() -> None:
    async def check() -> None:
        clock = Clock()
        store = EmbeddedStore(clock)
        first = await claim(store, "c", "j", "a", 2)
        await record(store, pb.JobRecordBatch(over="of old"), token=first.record.token)
        clock.now = 60.0
        await claim(store, "c", "j", "a", 2)
        assert not (await store.list("understudy/c/jobs/j/record/")).entries

    asyncio.run(check())


def test_a_leader_that_comes_back_while_its_standby_does_not_lead_for_a_moment_never_leads_again() -> None:
    async def check() -> None:
        clock = Clock()
        store = EmbeddedStore(clock)
        claimed = await claim(store, "c", "j", "a", 2)
        clock.now = 60.0
        assert await claim_now(store, "b", claimed.record.token)
        clock.now = 120.0  # its lease has ended, too
        late = await claim(store, "c", "j", "a", 2, claimed.record.token)
        assert late.leadership is None and late.record.host == "b"
        back = await claim(store, "c", "j", "b", 2, claimed.record.token)
        assert back.leadership is not None
        clock.now = 180.0
        anew = await claim(store, "c", "j", "a", 2)  # another job of that name
        assert anew.leadership is not None and anew.record.token != claimed.record.token

    asyncio.run(check())


def test_a_leader_that_comes_back_gives_way_to_its_standby() -> None:
    async def check() -> None:
        clock = Clock()
        store = EmbeddedStore(clock)
        claimed = await claim(store, "c", "j", "a", 2)
        leading = Leading(store, "c", "j", claimed.record)
        told: list[str] = []
        clock.now = 60.0
        assert await claim_now(store, "b", claimed.record.token)
        async with asyncio.timeout(10):
            await leading.run(told.append)  # ends: it will never lead again
        assert told == ["b"] and not leading.holds.is_set()

    asyncio.run(check())


def test_a_job_that_is_over_leaves_nothing_in_the_cluster_s_store() -> None:
    async def check() -> None:
        store = EmbeddedStore(Clock())
        claimed = await claim(store, "c", "j", "a", 2)
        await record(store, pb.JobRecordBatch(), pb.JobRecordBatch(over="x"), token=claimed.record.token)
        leading = Leading(store, "c", "j", claimed.record, claimed.leadership)
        await leading.resign()
        assert not (await store.list("understudy/c/jobs/")).entries

    asyncio.run(check())
