"""One leader at a time, its decisions written first: as a library, and through many rough schedules."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from etcd_server import EtcdServer, running_etcd
from leader_simulation import simulate

from recovery.membership.decisions import KEPT, DecisionLog, Fence, Undone
from recovery.membership.election import Deposed, campaign, lead, resign
from recovery.membership.embedded import EmbeddedStore
from recovery.membership.etcd import EtcdStore
from recovery.membership.options import parse_endpoints
from recovery.membership.store import ClusterStore, ClusterStoreError

SCHEDULES = int(os.environ.get("UNDERSTUDY_TEST_SCHEDULES") or 250)
Checks = Callable[[Callable[[ClusterStore], Awaitable[None]]], None]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(params=["embedded", "etcd"])
def check(request: pytest.FixtureRequest, tmp_path: Path) -> Checks:
    """Runs a test's checks; they must be over in time."""

    def run(checks: Callable[[ClusterStore], Awaitable[None]]) -> None:
        async def main() -> None:
            store: ClusterStore = EmbeddedStore()
            if request.param == "etcd":
                store = EtcdStore(parse_endpoints(request.getfixturevalue("etcd").url))
            try:
                await asyncio.wait_for(checks(store), 60)
            finally:
                await store.close()

        asyncio.run(main())

    return run


def test_the_next_leader_has_a_greater_token_and_finds_what_the_last_one_left_undone(check: Checks) -> None:
    async def checks(store: ClusterStore) -> None:
        log = DecisionLog(store, "c", "handover")
        first = await campaign(store, log.leader_key, "a", 30)
        assert await log.newest() is None
        left = await log.decide(first, "a", "move", "rank 1 to host b", 5)
        waiting = asyncio.ensure_future(campaign(store, log.leader_key, "b", 30))
        await resign(store, first)
        second = await waiting
        assert second.token > first.token
        found = await log.newest()
        assert found == left and found.decision.plan == "rank 1 to host b" and not found.decision.done
        with pytest.raises(Undone, match=r"decision 1 \(move\) is not done yet"):
            await log.decide(second, "b", "move", "something else", 6)
        for late in (log.finish(first, left, "by a leader that was"), log.finish(first, found, "again")):
            with pytest.raises(Deposed):
                await late
        await log.finish(second, found, "done")
        with pytest.raises(Deposed):
            await log.decide(first, "a", "move", "by a leader that was", 7)
        assert (await log.decide(second, "b", "move", "rank 2", 8)).decision.number == 2

    check(checks)


def test_leader_whose_lease_ends_is_told_and_another_one_follows(check: Checks) -> None:
    async def checks(store: ClusterStore) -> None:
        log = DecisionLog(store, "c", "lease")
        first = await campaign(store, log.leader_key, "a", 2)
        leading = asyncio.ensure_future(lead(store, first))
        waiting = asyncio.ensure_future(campaign(store, log.leader_key, "b", 2))
        done, _ = await asyncio.wait({waiting, leading}, timeout=3)
        assert not done  # it is kept for longer than its time
        await store.revoke(first.lease)
        second = await waiting
        assert second.token > first.token
        with pytest.raises(Deposed):
            await leading

    check(checks)


def test_of_many_candidates_one_leads_at_a_time(check: Checks) -> None:
    async def checks(store: ClusterStore) -> None:
        tokens: list[int] = []

        async def candidate(name: str) -> None:
            leadership = await campaign(store, "understudy/c/jobs/many/leader", name, 30)
            tokens.append(leadership.token)
            entry = await store.get(leadership.key)
            assert entry is not None and entry.value == name.encode()
            await resign(store, leadership)

        await asyncio.gather(*(candidate(name) for name in "abcdef"))
        assert len(tokens) == 6 and tokens == sorted(set(tokens))

    check(checks)


def test_done_decisions_go_when_enough_newer_ones_are_there() -> None:
    async def main() -> None:
        store = EmbeddedStore()
        log = DecisionLog(store, "c", "job")
        leadership = await campaign(store, log.leader_key, "a", 30)
        for number in range(KEPT + 5):
            await log.finish(leadership, await log.decide(leadership, "a", "k", str(number), 0), "done")
        assert len((await store.list("understudy/c/jobs/job/decisions/")).entries) == KEPT

    asyncio.run(main())


def test_decision_that_cannot_be_read_lets_nobody_decide() -> None:
    async def main() -> None:
        store = EmbeddedStore()
        log = DecisionLog(store, "c", "job")
        leadership = await campaign(store, log.leader_key, "a", 30)
        await log.finish(leadership, await log.decide(leadership, "a", "k", "p", 0), "done")
        (entry,) = (await store.list("understudy/c/jobs/job/decisions/")).entries
        for raw in (b"", b"{}", entry.value.replace(b'"1"', b'"2"'), b'{"version": 1, "number": "7"}'):
            await store.put(entry.key, raw)
            with pytest.raises(ClusterStoreError, match="cannot be read"):
                await log.decide(leadership, "a", "k", "p", 0)

    asyncio.run(main())


def test_fence_follows_the_newest_leader_and_its_newest_decision_only() -> None:
    fence = Fence()
    assert [fence.admit(*order) for order in ((5, 1), (5, 1), (5, 2), (5, 1), (9, 1), (5, 3), (9, 2))] == [
        True, True, True, False, True, False, True,
    ]  # fmt: skip


# ------------------------------------------------------------------ rough schedules
def run_schedules(seeds: range) -> None:
    outcomes = {seed: simulate(seed) for seed in seeds}
    assert not {seed: outcome.violations[0] for seed, outcome in outcomes.items() if outcome.violations}
    counts = {
        counted: sum(getattr(outcome, counted) for outcome in outcomes.values())
        for counted in ("elections", "decisions", "fenced", "redone")
    }
    print(f"{len(seeds)} schedules: {counts}")
    assert min(counts.values()) > len(seeds) / 20  # none of it was spared


def test_no_two_leaders_act_and_no_decision_is_lost_in_any_schedule() -> None:
    run_schedules(range(SCHEDULES))


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
def test_no_two_leaders_act_and_no_decision_is_lost_in_many_more_schedules(part: int) -> None:
    run_schedules(range(10_000 + 500 * part, 10_000 + 500 * (part + 1)))


def test_a_seed_repeats_itself() -> None:
    assert simulate(7) == simulate(7)


class Anybody(DecisionLog):
    """Writes whether or not the writer leads."""

    def __init__(self, store: ClusterStore) -> None:
        super().__init__(store, "c", "job")

    async def _write(self, leadership, decision, conditions, changes):  # type: ignore[no-untyped-def]
        others = [one for one in conditions if one != leadership.holds]
        return await super()._write(leadership, decision, others, changes)


class Unwritten(DecisionLog):
    """Acts on what it has decided, and writes it down only when it is done."""

    def __init__(self, store: ClusterStore) -> None:
        super().__init__(store, "c", "job")

    async def decide(self, leadership, leader, kind, plan, now_ms):  # type: ignore[no-untyped-def]
        with_plan = await super().decide(leadership, leader, kind, plan, now_ms)
        with_plan.decision.plan = plan + ", and more"
        return with_plan


@pytest.mark.parametrize(
    ("mistake", "found"), [(Anybody, "does not lead"), (Unwritten, "is not written down")]
)
def test_the_simulation_finds_what_would_be_a_mistake(mistake: type[DecisionLog], found: str) -> None:
    assert any(found in told for seed in range(50) for told in simulate(seed, mistake).violations)


def test_the_simulation_finds_devices_without_a_fence() -> None:
    violations = [told for seed in range(40) for told in simulate(seed, fences_hold=False).violations]
    assert any("followed a former leader" in told for told in violations)
