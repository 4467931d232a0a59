"""When snapshots are ordered, and when they count: the keeper over ranks that are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from recovery.settings import BadInput, parse_share
from recovery.snapshots import MUCH_LOG, SHORTEST_INTERVAL_S, SnapshotKeeper


class Rank(SimpleNamespace):
    """What the keeper sees of a rank that trains step by step."""

    def train(self, steps: int, seconds: float = 0.001) -> None:
        for _ in range(steps):
            self.log.step += 1
            self.log.commit_count += 1
            serial, wanted = self.log.order
            if serial > self.log.snapshot_begun and wanted in (None, self.log.step - 1):
                self.log.snapshot_begun = serial
                commit = SimpleNamespace(
                    number=self.log.commit_count, step=self.log.step - 1, complete=True, has_manifest=True,
                    optimizer=False, call=0,
                    communicators=[(1, 2, self.log.step)], members=[self.world],
                )  # fmt: skip
                self.log.published.append(SimpleNamespace(serial=serial, seconds=seconds, commit=commit))


def some_rank(number: int, world: int) -> Rank:
    log = SimpleNamespace(
        step=1, commit_count=0, order=(0, None), published=[], snapshot_begun=0, snapshot_failed=0,
        snapshot_floor=0, snapshot_suspended=False, snapshot_ordered=0, live_bytes=1 << 20, cursor=0,
        freed_segments=0, segment_bytes=8 << 20, segment_count=64, backpressure=0, floor_commit=0,
        dictionary_begin=0, dictionary_tail=0, dictionary_bytes=256 << 20,
        commits=lambda: [], live=True,
    )  # fmt: skip
    log.snapshots = lambda: log.published[-2:]

    def order_snapshot(serial: int, step: int | None) -> None:
        log.order, log.snapshot_ordered = (serial, step), serial

    log.order_snapshot = order_snapshot
    server = SimpleNamespace(process=SimpleNamespace(running=True), suspect=False)
    return Rank(
        rank=number, world=world, log=log, snapshot_note="", server=server, hollow=False, has_state=True,
        generation=0, restored_commit=0, resumed_commit=0, refused_commit=0, phase=None,
    )  # fmt: skip


def a_job(world: int, overhead: float = 0.01) -> tuple[SnapshotKeeper, list[Rank]]:
    ranks = [some_rank(number, world) for number in range(world)]
    job = SimpleNamespace(name="job", active_sessions=lambda: ranks, departed={})
    return SnapshotKeeper(cast(Any, job), cast(Any, None), overhead), ranks


def test_snapshot_is_ordered_for_all_ranks_at_a_step_that_none_has_reached() -> None:
    keeper, ranks = a_job(2)
    ranks[0].train(5)
    ranks[1].train(3)
    keeper.look(1.0)
    assert ranks[0].log.order == ranks[1].log.order == (1, 7)
    ranks[0].train(6)
    keeper.look(1.1)
    assert [r.log.snapshot_floor for r in ranks] == [0, 0], "one of them has not taken its own"
    ranks[1].train(6)
    keeper.look(1.2)
    assert [r.log.snapshot_floor for r in ranks] == [1, 1]
    assert {r.log.published[0].commit.step for r in ranks} == {7}


def test_snapshots_follow_one_another_as_seldom_as_they_cost() -> None:
    for cost, pause in ((0.02, 2.0), (0.0001, SHORTEST_INTERVAL_S)):
        keeper, ranks = a_job(1)
        ranks[0].train(1)
        keeper.look(1.0)
        ranks[0].train(1, seconds=cost)
        keeper.look(2.0)
        assert ranks[0].log.snapshot_floor == 1
        keeper.look(2.0 + 0.98 * pause)
        assert ranks[0].log.snapshot_ordered == 1
        keeper.look(2.0 + 1.02 * pause)
        assert ranks[0].log.snapshot_ordered == 2


def test_snapshot_that_costs_little_is_taken_early_when_much_log_has_come_together() -> None:
    keeper, ranks = a_job(1)
    ranks[0].train(1)
    keeper.look(1.0)
    ranks[0].train(1, seconds=0.001)
    keeper.look(2.0)
    ranks[0].log.cursor = MUCH_LOG + 1
    keeper.look(2.05)
    assert ranks[0].log.snapshot_ordered == 1, "it would cost too much of the time"
    keeper.look(2.15)
    assert ranks[0].log.snapshot_ordered == 2


def test_order_that_came_too_late_is_given_again_further_ahead() -> None:
    keeper, ranks = a_job(2)
    for r in ranks:
        r.train(5)
    keeper.look(1.0)
    ranks[0].log.order = (0, None)  # it reads the order only after it has passed that step
    for r in ranks:
        r.train(6)
    ranks[0].log.order = ranks[1].log.order
    keeper.look(1.001)
    serial, step = ranks[0].log.order
    assert serial == 2
    assert step >= 14
    for r in ranks:
        r.train(step)
    keeper.look(5.0)
    assert [r.log.snapshot_floor for r in ranks] == [2, 2]


def test_snapshots_that_fit_no_consistent_cut_do_not_count() -> None:
    keeper, ranks = a_job(2)
    for r in ranks:
        r.train(5)
    keeper.look(1.0)
    for r in ranks:
        r.train(3)
    ranks[1].log.published[0].commit.communicators = [(1, 2, 99)]
    keeper.look(1.1)
    assert [r.log.snapshot_floor for r in ranks] == [0, 0]
    assert ranks[0].log.order[0] == 2


@pytest.mark.parametrize(("field", "filled"), [("cursor", 40 * (8 << 20)), ("dictionary_tail", 200 << 20)])
def test_log_that_fills_up_makes_a_snapshot_due(field: str, filled: int) -> None:
    keeper, ranks = a_job(1)
    ranks[0].train(1)
    keeper.look(1.0)
    ranks[0].train(1, seconds=10)
    keeper.look(2.0)
    keeper.look(10.0)
    assert ranks[0].log.snapshot_ordered == 1
    setattr(ranks[0].log, field, filled)
    keeper.look(11.0)
    assert ranks[0].log.snapshot_ordered == 2


def test_snapshots_that_find_no_memory_are_suspended_and_the_status_says_so() -> None:
    keeper, ranks = a_job(2)
    for r in ranks:
        r.train(5)
    keeper.look(1.0)
    ranks[1].log.snapshot_failed = 1
    keeper.look(2.0)
    assert all(r.log.snapshot_suspended for r in ranks)
    assert all("no snapshots: there was no memory" in r.snapshot_note for r in ranks)
    ordered = ranks[0].log.snapshot_ordered
    keeper.look(100.0)
    assert ranks[0].log.snapshot_ordered == ordered


def test_state_that_would_fill_shared_memory_is_not_snapshotted() -> None:
    keeper, ranks = a_job(2)
    for r in ranks:
        r.train(5)
        r.log.live_bytes = 1 << 45
    keeper.look(1.0)
    assert all(r.log.snapshot_suspended for r in ranks)
    assert "/dev/shm" in ranks[0].snapshot_note


def test_worker_that_waits_for_room_gets_what_only_snapshots_need() -> None:
    keeper, ranks = a_job(2)
    for r in ranks:
        r.train(5)
    keeper.look(1.0)
    for r in ranks:
        r.train(4)
    keeper.look(1.1)
    assert ranks[0].log.snapshot_floor == 1
    ranks[1].log.backpressure = 1
    keeper.look(1.2)
    keeper.look(1.3)
    assert all(r.log.snapshot_suspended for r in ranks)
    assert "was cut" in ranks[0].snapshot_note
    for r in ranks:
        r.log.published.clear()
        r.log.backpressure = 0
    keeper.look(1.4)
    assert not any(r.log.snapshot_suspended for r in ranks)
    keeper.look(1.5)
    for r in ranks:
        r.train(10)
    keeper.look(1.6)
    assert [r.log.snapshot_floor for r in ranks] == [2, 2]
    assert ranks[0].snapshot_note == ""


@pytest.mark.parametrize(("text", "share"), [("1%", 0.01), ("0.5", 0.005), ("0", 0.0), ("50 %", 0.5)])
def test_share_of_the_time_is_given_in_per_cent(text: str, share: float) -> None:
    assert parse_share(text, "--snapshot-overhead") == share


@pytest.mark.parametrize("text", ["", "-1", "51", "a lot", "1%%", "1e-2"])
def test_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="--snapshot-overhead"):
        parse_share(text, "--snapshot-overhead")
