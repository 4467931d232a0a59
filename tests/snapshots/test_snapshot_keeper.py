"""When snapshots are ordered, and when they count: the keeper over ranks that are made up."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from understudy import replay
from understudy.recovery.config.settings import BadInput, parse_interval, parse_share
from understudy.recovery.snapshots.persistence import Persistence
from understudy.recovery.snapshots.settings import PersistenceSettings
from understudy.recovery.snapshots.writing.request import Persist
from understudy.recovery.state.counts import CopyCounts
from understudy.recovery.state.snapshot_leases import SnapshotLeases
from understudy.recovery.upkeep.snapshots import MUCH_LOG, SHORTEST_INTERVAL_S, SnapshotKeeper


class Log(SimpleNamespace):
    """What the keeper sees of a rank's log: each is another one, as those of `replay` are."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class Rank(SimpleNamespace):
    """What the keeper sees of a rank that trains step by step."""

    def train(self, steps: int, seconds: float = 0.001) -> None:
        for _ in range(steps):
            self.log.step += 1
            self.log.commit_count += 1
            due = [serial for serial, wanted in self.log.orders if wanted in (None, self.log.step - 1)]
            if (serial := max(due, default=0)) > self.log.snapshot_begun:
                self.take_snapshot(serial, seconds)

    def validate(self) -> None:
        """A snapshot that its server takes by itself, as nobody ordered one."""
        self.take_snapshot(max(self.log.snapshot_ordered, self.log.snapshot_begun) + 1, 0.001)

    def take_snapshot(self, serial: int, seconds: float) -> None:
        self.log.snapshot_begun = serial
        commit = SimpleNamespace(
            number=self.log.commit_count, record_index=self.log.commit_count,
            step=self.log.step - 1, complete=True, has_manifest=True,
            optimizer=False, step_digest=0, call=0,
            communicators=[(1, 2, self.log.step)], members=[self.world],
        )  # fmt: skip
        self.log.published.append(SimpleNamespace(serial=serial, seconds=seconds, commit=commit))


def some_rank(number: int, world: int) -> Rank:
    log = Log(
        step=1, worker_steps=0, commit_count=0, orders=[], described=[], published=[], snapshot_begun=0,
        snapshot_failed=0, snapshot_floor=0, log_kept_from=0, snapshot_suspended=False, snapshot_ordered=0,
        live_bytes=1 << 20, cursor=0, freed_segments=0, segment_bytes=8 << 20, segment_count=64,
        backpressure=0, floor_commit=0, dictionary_begin=0, dictionary_tail=0, dictionary_bytes=256 << 20,
        final_steps=0, sealed=0,
        commit_rows=lambda: [], started=lambda: [], live=True,
    )  # fmt: skip
    log.snapshots = lambda: log.published[-2:]

    def order_snapshot(serial: int, step: int | None) -> None:
        log.orders = [*log.orders, (serial, step)][-replay.SNAPSHOT_ORDERS :]
        log.snapshot_ordered = serial

    log.order_snapshot = order_snapshot
    log.describe_snapshot = log.described.append
    log.lease_snapshots = lambda serials: None
    server = SimpleNamespace(process=SimpleNamespace(running=True), suspect=False)
    return Rank(
        rank=number, world=world, log=log, snapshot_note="", server=server, lacks_state=False, has_state=True,
        persist_note="", active=True, host="", directory=Path.cwd(),
        generation=0, restored_commit=0, resumed_commit=0, refused_commit=0, phase=None,
        refused_snapshots=set(), durable=[], destination=None, destination_host="", restores_from_image=0,
        unread=Counter(),
    )  # fmt: skip


class Images:
    """Keeps each log from some place on, and remembers which sets it was offered."""

    def __init__(self) -> None:
        self.offered: list[tuple[int, bool]] = []

    def kept_from(self, session: Any) -> int:
        return 1000 + int(session.rank)

    def offer(self, serial: int, sessions: Any, commits: Any, *, pressed: bool) -> None:
        assert {rank: commit.step for rank, commit in commits.items()} == {
            s.rank: s.log.step - 1 for s in sessions
        }
        self.offered.append((serial, pressed))


def a_job(
    world: int,
    overhead: float = 0.01,
    every_steps: int = 0,
    storage: Storage | None = None,
    images: Images | None = None,
) -> tuple[SnapshotKeeper, list[Rank]]:
    ranks = [some_rank(number, world) for number in range(world)]
    job = SimpleNamespace(
        name="job",
        persist=CopyCounts(),
        active_sessions=lambda: ranks,
        departed={},
        span=None,
        leases=SnapshotLeases(),
    )
    settings = PersistenceSettings(Path("/x"), 0.0, every_steps, slots=5)
    persistence = Persistence(cast(Any, job), settings) if every_steps else storage
    keeper = SnapshotKeeper(cast(Any, job), cast(Any, None), overhead, cast(Any, persistence), images)
    return keeper, ranks


class Storage:
    """Takes a set whenever it is pressed, and else only when it is told that one is due."""

    stays_in_memory = False

    def __init__(self) -> None:
        self.wanted = True
        self.offered: list[int] = []

    def due(self, sessions: Any, now: float, pressed: bool) -> bool:
        return self.wanted or pressed

    def next_step(self, after: int, sessions: Any, now: float) -> None:
        return None

    def announce(self, serial: int, step: int | None, sessions: Any) -> None:
        pass

    def offer(self, serial: int, sessions: Any, commits: Any, now: float) -> None:
        self.offered.append(serial)


def test_snapshot_is_ordered_for_all_ranks_at_a_step_that_none_has_reached() -> None:
    keeper, ranks = a_job(2)
    ranks[0].train(5)
    ranks[1].train(3)
    keeper.look(1.0)
    assert ranks[0].log.orders == ranks[1].log.orders == [(1, 7)]
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
    ranks[0].log.orders = []  # it reads the order only after it has passed that step
    for r in ranks:
        r.train(6)
    ranks[0].log.orders = ranks[1].log.orders
    keeper.look(1.001)
    serial, step = ranks[0].log.orders[-1]
    assert serial == 2
    assert step >= 14
    for r in ranks:
        r.train(step)
    keeper.look(5.0)
    assert [r.log.snapshot_floor for r in ranks] == [2, 2]


@pytest.mark.parametrize("why", ["it fits no consistent cut", "a server refused it"])
def test_a_set_of_no_use_does_not_count_and_the_next_is_ordered(why: str) -> None:
    keeper, ranks = a_job(2)
    for r in ranks:
        r.train(5)
    keeper.look(1.0)
    for r in ranks:
        r.train(3)
    if why == "a server refused it":
        ranks[1].refused_snapshots.add(1)
    else:
        ranks[1].log.published[0].commit.communicators = [(1, 2, 99)]
    keeper.look(1.1)
    assert [r.log.snapshot_floor for r in ranks] == [0, 0]
    assert ranks[0].log.orders[-1][0] == 2
    for r in ranks:
        r.train(20)
    keeper.look(1.2)
    assert [r.log.snapshot_floor for r in ranks] == [2, 2]


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


def test_images_of_workers_are_offered_each_set_and_told_when_a_log_fills_up_however_quickly_sets_come() -> (
    None
):
    keeper, ranks = a_job(1, images=(images := Images()))
    ranks[0].train(1)
    keeper.look(1.0)
    ranks[0].train(1)
    keeper.look(1.01)
    assert ranks[0].log.log_kept_from == 1000 and images.offered == [(1, False)]
    ranks[0].log.cursor = 335544320  # of 512 MiB
    keeper.look(2.0)
    ranks[0].train(1)
    keeper.look(2.01)
    assert images.offered == [(1, False), (2, True)]


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


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("every", [1, 3, 10])
def test_sets_for_storage_are_taken_at_every_nth_step_and_none_is_missed(world: int, every: int) -> None:
    keeper, ranks = a_job(world, every_steps=every)
    persistence = cast(Any, keeper._persistence)
    steps, now = [], 0.0
    for _ in range(50):
        for r in ranks:
            r.train(1)
        now += 0.1
        keeper.look(now)
        for request in persistence.writer._unsent:
            if isinstance(request, Persist):
                assert all(request.serial in r.log.described for r in ranks)
                kept = {k.serial: k.commit.step for r in ranks for k in r.log.published}
                steps.append(kept[request.serial])
        persistence.writer._unsent.clear()
        persistence._sets.clear()
    first = steps[0]
    assert first <= 2 * every + 4
    assert steps == list(range(first, 51, every)) and first % every == 0


def test_orders_for_storage_leave_a_place_for_one_that_makes_room_in_a_log() -> None:
    keeper, ranks = a_job(2, every_steps=1)
    for r in ranks:
        r.train(5)
    keeper.look(1.0)
    planned = {serial for serial, _ in ranks[0].log.orders}
    assert len(planned) == replay.SNAPSHOT_ORDERS - 1
    ranks[0].log.cursor = ranks[0].log.segment_bytes * ranks[0].log.segment_count
    keeper.look(3.0)
    keeper.look(6.0)
    serial, step = ranks[0].log.orders[-1]
    assert serial not in planned and step is None
    for r in ranks:
        r.train(1)
    keeper.look(6.1)
    assert [r.log.snapshot_floor for r in ranks] == [serial] * 2


@pytest.mark.parametrize(
    ("text", "interval"),
    [("30", (30.0, 0)), ("2.5s", (2.5, 0)), ("10steps", (0.0, 10)), ("1 step", (0.0, 1))],
)
def test_interval_is_given_in_seconds_or_steps(text: str, interval: tuple[float, int]) -> None:
    assert parse_interval(text, "--persist-every") == interval


@pytest.mark.parametrize("text", ["", "0", "0steps", "10 stops", "-1steps", "1.5steps", "9" * 11 + "steps"])
def test_interval_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"--persist-every .*steps"):
        parse_interval(text, "--persist-every")


@pytest.mark.parametrize(("text", "share"), [("1%", 0.01), ("0.5", 0.005), ("0", 0.0), ("50 %", 0.5)])
def test_share_of_the_time_is_given_in_per_cent(text: str, share: float) -> None:
    assert parse_share(text, "--snapshot-overhead") == share


@pytest.mark.parametrize("text", ["", "-1", "51", "a lot", "1%%", "1e-2"])
def test_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="--snapshot-overhead"):
        parse_share(text, "--snapshot-overhead")


def test_storage_gets_its_sets_however_often_a_server_takes_some_for_its_validations() -> None:
    storage = Storage()
    storage.stays_in_memory = True
    keeper, ranks = a_job(1, storage=storage)
    log = ranks[0].log
    for look in range(20):
        ranks[0].train(1)
        if look % 4 == 0 and log.snapshot_ordered <= log.snapshot_begun:  # else it waits for what was ordered
            ranks[0].validate()
        keeper.look(1.0 + 0.1 * look)
    assert {serial for serial, _ in log.orders} & set(storage.offered)


def test_sets_that_leave_memory_are_taken_when_storage_wants_one_or_a_log_fills_up() -> None:
    storage = Storage()
    keeper, ranks = a_job(1, storage=storage)
    log = ranks[0].log
    ranks[0].train(1)
    keeper.look(1.0)
    ranks[0].train(5)
    keeper.look(2.0)
    assert (storage.offered, log.snapshot_floor) == ([1], 1)
    storage.wanted = False
    log.snapshot_floor, log.log_kept_from = 2, 5000  # it is durable
    for now in (10.0, 11.0, 12.0):
        keeper.look(now)
    assert log.snapshot_ordered == 1
    log.cursor = 40 * (8 << 20)
    keeper.look(13.0)
    assert log.snapshot_ordered == 3, "2 would count as durable before it is taken"
    assert log.log_kept_from == 5000
    ranks[0].train(5)
    keeper.look(14.0)
    assert (storage.offered, log.snapshot_floor) == ([1, 3], 3)
    assert log.log_kept_from == 0, "memory holds a newer one, and the log is needed for records to come"
