"""Who may lead a job on when its leading host is lost, as the cluster's store has it."""

from __future__ import annotations

import asyncio

from standbys import (
    HEIR,
    ID,
    LEADER,
    Clock,
    leader,
    named,
    standby,
)

from understudy.recovery.membership.job_leadership import Leading, claim, claim_as_standby
from understudy.recovery.membership.stores.embedded import EmbeddedStore


def test_an_heir_leads_only_when_the_lease_of_the_lost_leader_has_ended() -> None:
    async def check() -> None:
        clock = Clock()
        store = EmbeddedStore(clock)
        claimed = await claim(store, "c", "j", "a", 2)
        assert claimed.leadership is not None
        revision = await store.put(HEIR, standby("b"))
        assert await claim_as_standby(store, "c", "j", leader("b"), ID, revision) is None
        clock.now = 60.0
        leads = await claim_as_standby(store, "c", "j", leader("b"), ID, revision)
        assert leads is not None and leads.token > claimed.leadership.token
        assert await named(store) == ("", ID)  # its own standby is still to be found

    asyncio.run(check())


def test_whoever_claims_a_job_again_has_no_heir_and_a_former_heir_cannot_lead() -> None:
    async def check() -> None:
        clock = Clock()
        store = EmbeddedStore(clock)
        claimed = await claim(store, "c", "j", "a", 2)
        revision = await store.put(HEIR, standby("b"))
        clock.now = 60.0
        again = await claim(store, "c", "j", "a", 2, claimed.record.token)
        assert again.leadership is not None
        assert await named(store) == ("", "")
        clock.now = 120.0
        assert await claim_as_standby(store, "c", "j", leader("b"), ID, revision) is None
        assert await store.get(LEADER) is None

    asyncio.run(check())


def test_a_leader_that_comes_back_while_its_heir_does_not_lead_for_a_moment_never_leads_again() -> None:
    async def check() -> None:
        clock = Clock()
        store = EmbeddedStore(clock)
        claimed = await claim(store, "c", "j", "a", 2)
        entry = await store.get(HEIR)
        assert entry is not None
        revision = await store.swap(HEIR, entry.revision, standby("b", token=claimed.record.token))
        clock.now = 60.0
        assert await claim_as_standby(store, "c", "j", leader("b", claimed.record.token), ID, revision)
        clock.now = 120.0  # its lease has ended, too
        late = await claim(store, "c", "j", "a", 2, claimed.record.token)
        assert late.leadership is None and late.record.host == "b"
        back = await claim(store, "c", "j", "b", 2, claimed.record.token)
        assert back.leadership is not None
        clock.now = 180.0
        anew = await claim(store, "c", "j", "a", 2)  # another job of that name
        assert anew.leadership is not None and anew.record.token != claimed.record.token

    asyncio.run(check())


def test_a_leader_that_comes_back_gives_way_to_its_heir() -> None:
    async def check() -> None:
        clock = Clock()
        store = EmbeddedStore(clock)
        claimed = await claim(store, "c", "j", "a", 2)
        leading = Leading(store, "c", "j", claimed.record)
        told: list[str] = []
        revision = await store.put(HEIR, standby("b"))
        clock.now = 60.0
        assert await claim_as_standby(store, "c", "j", leader("b", claimed.record.token), ID, revision)
        async with asyncio.timeout(10):
            await leading.run(told.append)  # ends: it will never lead again
        assert told == ["b"] and not leading.holds.is_set()

    asyncio.run(check())
