"""When proxyd sends a set of snapshots to storage, and what becomes of trouble there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from understudy.recovery.snapshots import Store, StoreError
from understudy.recovery.snapshots.persistence import RETRY_S, Persistence
from understudy.recovery.snapshots.settings import PersistenceSettings
from understudy.recovery.snapshots.stores.layout import stores_of
from understudy.recovery.snapshots.writing.part_writer import PartsWith, here_alone
from understudy.recovery.snapshots.writing.request import (
    Discard,
    Persist,
    Release,
    Written,
    decode_answer,
    decode_request,
)
from understudy.recovery.snapshots.writing.writer import RankStores, RunStores
from understudy.recovery.state.counts import CopyCounts
from understudy.recovery.state.jobs import Session
from understudy.recovery.state.snapshot_leases import SnapshotLeases

RUN, OTHER_RUN = "understudy-1.rank-0", "understudy-1.rank-0-1"


def made_up_commit(serial: int, step: int) -> Any:
    """That a snapshot of this serial is of."""
    return SimpleNamespace(
        number=100 * serial, record_index=100 * serial, step=step, call=0, log_offset=1000 * serial,
        complete=True, has_manifest=True, optimizer=False, step_digest=0, communicators=[], members=[],
    )  # fmt: skip


class Rig:
    """Two ranks whose leases are noted, and a writer that only takes notes."""

    def __init__(
        self, slots: int = 3, every_s: float = 10.0, every_steps: int = 0, stays: bool = True,
        note: Callable[[], None] | None = None, parts: PartsWith = here_alone,
    ) -> None:  # fmt: skip
        self.leases: list[list[int]] = [[], []]
        self.sessions = [self.session(rank) for rank in (0, 1)]
        self.counts = CopyCounts()
        job = SimpleNamespace(
            name="job",
            persist=self.counts,
            active_sessions=lambda: self.sessions,
            span=None,
            leases=SnapshotLeases(),
        )
        settings = PersistenceSettings(Path("/x"), every_s, every_steps, slots, stays)
        self.noted: list[list[tuple[int, int]]] = []
        """The floors when it was written down what is durable."""
        note = note or (lambda: self.noted.append(self.floors()))
        self.persistence = Persistence(cast(Any, job), settings, note, parts=parts)

    def floors(self) -> list[tuple[int, int]]:
        """Of each rank's log: the snapshot that must be in memory, and where records must stay from."""
        return [(session.log.snapshot_floor, session.log.log_kept_from) for session in self.sessions]

    def session(self, rank: int) -> Session:
        def lease(serials: list[int]) -> None:
            self.leases[rank] = serials

        log = SimpleNamespace(
            lease_snapshots=lease, describe_snapshot=lambda serial: None, log_kept_from=0, snapshot_floor=0
        )
        return cast(
            Session,
            SimpleNamespace(
                rank=rank, log=log, active=True, directory=Path(f"/dev/shm/understudy-1/job/rank-{rank}"),
                durable=[], persist_note="", host="", world=2,
            ),
        )  # fmt: skip

    def sent(self) -> list[Any]:
        found = list(self.persistence.writer._unsent)
        self.persistence.writer._unsent.clear()
        return found

    def offer(self, serial: int, now: float) -> None:
        """Ordered and, at once, complete in host memory."""
        if self.persistence.due(self.sessions, now):
            self.persistence.announce(serial, None, self.sessions)
        self.complete(serial, 10 * serial, now)

    def complete(self, serial: int, step: int, now: float) -> None:
        """In host memory, on all ranks."""
        commit = made_up_commit(serial, step)
        self.persistence.offer(serial, self.sessions, {0: commit, 1: commit}, now)

    def steps(self) -> list[list[int]]:
        """Of the durable snapshots of each rank."""
        return [[durable.commit.step for durable in session.durable] for session in self.sessions]

    def written(self, serial: int, now: float, *errors: str) -> None:
        for rank in (0, 1):
            error = errors[rank] if errors else ""
            answer = Written(serial, RUN, rank, step=10 * serial, bytes=1, error=error)
            self.persistence.take(answer, now)
            self.persistence.writer.heard(answer)


def test_a_set_is_leased_until_all_ranks_have_written_it_and_then_older_ones_may_go() -> None:
    rig = Rig()
    rig.offer(4, 100.0)
    (request,) = rig.sent()
    assert isinstance(request, Persist) and (request.serial, request.run) == (4, RUN)
    assert request.world == 2 and request.directories == {
        0: "/dev/shm/understudy-1/job/rank-0", 1: "/dev/shm/understudy-1/job/rank-1"
    }  # fmt: skip
    assert rig.leases == [[4], [4]]
    rig.persistence.take(Written(4, RUN, 0, step=40), 101.0)
    assert rig.leases == [[4], [4]] and rig.sent() == []
    rig.persistence.take(Written(4, RUN, 1, step=40), 102.0)
    assert rig.leases == [[], []]
    assert rig.sent() == [Release(4, RUN)]
    assert rig.steps() == [[40], [40]]


def test_no_set_is_sent_before_it_is_due_and_no_more_than_there_are_slots_for() -> None:
    rig = Rig(slots=3, every_s=10.0)
    for serial, now in ((1, 0.0), (2, 5.0), (3, 10.0), (4, 20.0), (5, 30.0)):
        rig.offer(serial, now)
    assert [request.serial for request in rig.sent()] == [1, 3]
    assert rig.leases[0] == [1, 3]
    rig.written(3, 31.0)
    assert rig.leases[0] == [1]
    rig.offer(6, 40.0)
    assert [(type(request), request.serial) for request in rig.sent()] == [(Release, 3), (Persist, 6)]


def test_trouble_of_one_rank_discards_the_set_is_told_and_tried_again_later() -> None:
    rig = Rig(every_s=1.0)
    rig.offer(1, 0.0)
    rig.sent()
    rig.written(1, 0.5, "", "No space left on device")
    assert rig.sent() == [Discard(1, RUN)]
    assert rig.leases == [[], []]
    assert all("No space left" in session.persist_note for session in rig.sessions)
    rig.offer(2, 1.5)
    assert rig.sent() == []
    rig.offer(3, 0.5 + RETRY_S)
    assert [request.serial for request in rig.sent()] == [3]
    rig.written(3, 12.0)
    assert all(session.persist_note == "" for session in rig.sessions)


def test_a_disk_that_hangs_is_told_of_and_holds_up_nothing_else() -> None:
    rig = Rig(slots=2, every_s=1.0)
    rig.offer(1, 0.0)
    rig.offer(2, 30.0)
    assert all(session.persist_note == "" for session in rig.sessions)
    rig.offer(3, 61.0)
    assert [request.serial for request in rig.sent()] == [1]
    assert all("storage is slow" in session.persist_note for session in rig.sessions)
    rig.written(1, 62.0)
    assert all(session.persist_note == "" for session in rig.sessions)
    rig.offer(4, 63.0)
    assert rig.leases[0] == [4]


def test_a_set_that_a_newer_one_has_overtaken_is_no_trouble() -> None:
    rig = Rig(every_s=1.0)
    rig.offer(1, 0.0)
    rig.offer(2, 1.0)
    rig.written(2, 2.0)
    rig.sent()
    rig.written(1, 3.0, "serial 1 lies below the floor", "")
    assert rig.sent() == [] and rig.leases == [[], []]
    assert all(session.persist_note == "" for session in rig.sessions)
    assert rig.steps() == [[20], [20]]


def test_sets_of_certain_steps_are_persisted_and_others_not_and_none_waits_for_a_slot() -> None:
    rig = Rig(slots=3, every_s=0.0, every_steps=20)
    assert not rig.persistence.due(rig.sessions, 0.0)
    assert [rig.persistence.next_step(step, rig.sessions, 0.0) for step in (0, 19, 20)] == [20, 20, 40]
    for serial, step in ((1, 20), (2, 30), (3, 40), (4, 60)):
        rig.persistence.announce(serial, 20 * ((step + 19) // 20), rig.sessions)
        rig.complete(serial, step, float(serial))
    assert [request.serial for request in rig.sent()] == [1, 3], "the second one is of another step"
    assert rig.counts == CopyCounts(skipped=1)
    rig.written(1, 6.0, "No space left on device", "")
    assert rig.persistence.next_step(60, rig.sessions, 7.0) is None, "it is tried again after a while"
    assert rig.persistence.next_step(60, rig.sessions, 17.0) == 80


def test_a_durable_set_leaves_memory_only_once_that_is_written_down_and_its_log_is_kept() -> None:
    rig = Rig(stays=False)
    rig.offer(4, 100.0)
    assert rig.floors() == [(0, 0), (0, 0)]
    rig.written(4, 101.0, "", "No space left on device")
    assert rig.floors() == [(0, 0), (0, 0)] and rig.noted == []
    rig.offer(6, 120.0)
    rig.written(6, 121.0)
    assert rig.noted == [[(0, 0), (0, 0)]]
    assert rig.floors() == [(7, 6000), (7, 6000)]


def test_a_set_that_stays_in_memory_needs_no_other_log() -> None:
    rig = Rig()
    rig.offer(4, 100.0)
    rig.written(4, 101.0)
    assert rig.floors() == [(0, 0), (0, 0)]


def test_what_is_under_way_is_let_go_of_before_its_memory_changes() -> None:
    rig = Rig()
    rig.offer(4, 100.0)
    rig.persistence.break_off()
    assert rig.leases == [[], []] and rig.sent() == []
    rig.written(4, 101.0)
    assert rig.steps() == [[], []]


def test_workers_that_were_started_again_write_a_run_of_their_own() -> None:
    rig = Rig(every_s=10.0)
    rig.offer(7, 0.0)
    for session in rig.sessions:
        session.directory = Path(f"{session.directory}-1")
    rig.offer(1, 0.1)
    first, second = rig.sent()
    assert (first.run, second.run) == (RUN, OTHER_RUN)
    rig.written(7, 1.0)  # of the former run: nobody waits for it
    assert rig.sent() == []


def test_a_set_that_left_memory_before_it_was_read_is_left_out_and_no_trouble_with_storage() -> None:
    rig = Rig(every_s=1.0)
    rig.offer(1, 0.0)
    rig.sent()
    rig.persistence.take(Written(1, RUN, 0, step=10), 0.5)
    rig.persistence.take(Written(1, RUN, 1, step=10, error="it is not there any more", gone=True), 0.5)
    assert rig.sent() == [Discard(1, RUN)]
    assert rig.counts == CopyCounts(skipped=1)
    assert all(session.persist_note == "" for session in rig.sessions)
    assert rig.persistence.due(rig.sessions, 1.1)


def test_a_late_answer_of_a_former_run_does_not_count_for_the_present_one() -> None:
    rig = Rig(every_s=10.0)
    rig.offer(1, 0.0)
    for session in rig.sessions:
        session.directory = Path(f"{session.directory}-1")
    rig.offer(1, 0.1)  # serials begin anew
    rig.sent()
    rig.written(1, 1.0)
    assert rig.sent() == [] and rig.steps() == [[], []]
    for rank in (0, 1):
        rig.persistence.take(Written(1, OTHER_RUN, rank, step=10), 2.0)
    assert rig.sent() == [Release(1, OTHER_RUN)] and rig.steps() == [[10], [10]]


def test_messages_arrive_as_they_were_sent_and_others_are_refused() -> None:
    for request in (Persist(3, "run", 4, {1: "/a", 2: "/b"}, (1, 2)), Release(4, "run"), Discard(5, "run")):
        assert decode_request(request.encode()) == request
    written = Written(3, RUN, 1, 10, 1 << 40, 0.5, "a sentence")
    assert decode_answer(written.encode()) == written
    for line in (b"", b"[]", b"{}", b'{"persist": 3}', b'{"run": {}}', b'{"release": {}, "persist": {}}'):
        with pytest.raises((ValueError, KeyError)):
            decode_request(line)


def test_a_snapshot_that_outgrows_its_store_gets_a_larger_one_and_the_old_one_goes(tmp_path: Path) -> None:
    run = tmp_path / "job" / "run"
    stores = RankStores(run, 0, slots=3)
    small = stores.fitting([1000], serial=1)
    assert stores.fitting([1100], serial=2) is small
    write(small, 2, 1000)
    large = stores.fitting([1 << 20], serial=3)
    assert large is not small
    assert [store.growth for store in stores_of(run)] == [0, 1]
    stores.release(2)  # an older one that became complete now
    assert [store.growth for store in stores_of(run)] == [0, 1]
    write(large, 3, 1 << 20)
    stores.release(3)
    assert [store.growth for store in stores_of(run)] == [1]


def test_stores_let_go_of_a_set_only_after_it_is_written_down_which_one_has_taken_its_place() -> None:
    """Whoever follows a proxyd that dies in between looks for what is written down."""
    orders: list[str] = []
    parts: Any = SimpleNamespace(
        persist=lambda *_: None, tell=lambda request, _=0: orders.append(type(request).__name__)
    )
    rig = Rig(stays=False, note=lambda: orders.append("noted"), parts=lambda writer, take: parts)
    rig.offer(4, 100.0)
    for rank in (0, 1):
        rig.persistence.take(Written(4, RUN, rank, step=40, bytes=1), 101.0)
    assert orders == ["noted", "Release"]


@pytest.mark.parametrize("order", [(2, 3), (3, 2)])
def test_a_store_of_a_rank_alone_lets_go_of_no_snapshot_before_it_is_told_to(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    """Its state was lost: the older of two that were under way was the later one to ask for its place."""
    (stores,) = RunStores(tmp_path / "job" / "run", [0], 1, slots=3).of_rank.values()
    for serial in order:
        write(stores.fitting([1000], serial=serial), serial, 1000)
    assert stores.serials == {2, 3}
    stores.release(3)
    assert stores.serials == {3}
    write(stores.fitting([1000], serial=4), 4, 1000)
    stores.release(4)
    assert stores.serials == {4}


def test_an_old_set_that_comes_late_and_outgrows_the_store_leaves_a_newer_one_in_it(tmp_path: Path) -> None:
    """The newest complete set went with its store: seen under load, in 1 of 30 runs."""
    run = tmp_path / "job" / "run"
    stores = RankStores(run, 0, slots=3)
    write(stores.fitting([1000], serial=3), 3, 1000)
    large = stores.fitting([1 << 20], serial=1)  # it waited for a thread of the writer
    stores.release(3)
    assert stores.serials == {3}
    with pytest.raises(StoreError, match="below the floor"):
        write(large, 1, 1 << 20)
    write(large, 4, 1 << 20)
    stores.release(4)
    assert stores.serials == {4} and [store.growth for store in stores_of(run)] == [1]


def test_a_writer_of_the_same_run_goes_on_where_another_one_was_killed(tmp_path: Path) -> None:
    run = tmp_path / "job" / "run"
    first = RankStores(run, 0, slots=3)
    write(first.fitting([1000], serial=1), 1, 1000)
    write(first.fitting([1 << 20], serial=2), 2, 1 << 20)
    for open_store in (first._current, *(former for _, former in first._outgrown.values())):
        assert open_store is not None
        open_store.close()
    (run / "rank-0.2.new").write_bytes(b"half")  # it was making a larger one
    second = RankStores(run, 0, slots=3)
    store = second.fitting([1000], serial=3)
    assert [entry.serial for entry in store.snapshots()] == [2]
    write(store, 3, 1000)
    second.release(3)
    assert [found.growth for found in stores_of(run)] == [1]


def test_a_store_that_cannot_be_opened_again_is_left_and_another_one_begun(tmp_path: Path) -> None:
    run = tmp_path / "job" / "run"
    first = RankStores(run, 0, slots=3)
    write(first.fitting([1000], serial=1), 1, 1000)
    second = RankStores(run, 0, slots=3)  # while the first one still has its lock
    store = second.fitting([1000], serial=2)
    assert [found.growth for found in stores_of(run)] == [0, 1]
    write(store, 2, 1000)
    second.release(2)
    assert [found.growth for found in stores_of(run)] == [1]


def test_parts_that_a_killed_writer_left_on_some_ranks_hold_no_slots(tmp_path: Path) -> None:
    run = tmp_path / "job" / "run"
    former = RunStores(run, range(2), 2, slots=2)
    for serial in (1, 2):
        for rank in (0, 1) if serial == 1 else (0,):  # it was killed before rank 1 had the second one
            write(former.of_rank[rank].fitting([1000], serial), serial, 1000)
        former.release(1)
    for stores in former.of_rank.values():
        assert stores._current is not None
        stores._current.close()
    successor = RunStores(run, range(2), 2, slots=2)
    assert [stores.serials for stores in successor.of_rank.values()] == [{1}, {1}]
    for rank in (0, 1):
        write(successor.of_rank[rank].fitting([1000], 3), 3, 1000)
    successor.release(3)
    assert [stores.serials for stores in successor.of_rank.values()] == [{3}, {3}]


def test_what_is_complete_with_a_part_in_an_outgrown_store_is_kept(tmp_path: Path) -> None:
    run = tmp_path / "job" / "run"
    former = RunStores(run, range(2), 2, slots=3)
    for rank in (0, 1):
        write(former.of_rank[rank].fitting([1000], 1), 1, 1000)
    former.release(1)
    write(former.of_rank[0].fitting([1 << 20], 2), 2, 1 << 20)  # rank 0 grew, then it was killed
    for stores in former.of_rank.values():
        for store in (stores._current, *(open_one for _, open_one in stores._outgrown.values())):
            assert store is not None
            store.close()
    successor = RunStores(run, range(2), 2, slots=3)
    assert [stores.serials for stores in successor.of_rank.values()] == [{1}, {1}]
    successor.release(1)  # said once more, as a second tier does when it has copied it
    assert [stores.serials for stores in successor.of_rank.values()] == [{1}, {1}]
    write(successor.of_rank[0].fitting([1 << 20], 3), 3, 1 << 20)
    write(successor.of_rank[1].fitting([1000], 3), 3, 1000)
    successor.release(3)
    assert [stores.serials for stores in successor.of_rank.values()] == [{3}, {3}]


def test_the_name_of_a_new_store_is_durable_before_anything_is_written_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []
    run = tmp_path / "job" / "run"

    def fsync(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), (run / "rank-0.store").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    RankStores(run, 0, slots=2).fitting([1000], serial=1)
    assert synced == [(str(folder), True) for folder in (run, tmp_path / "job", tmp_path)]


def write(store: Store, serial: int, size: int) -> None:
    store.persist(
        job="job", rank=0, world=2, step=serial, serial=serial, extents=[(1, 1, bytes(size))], timeout_s=5
    )


class Pipe:
    """To a writer that takes notes."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.closed = False

    def write(self, line: bytes) -> None:
        assert not self.closed
        self.told.append(decode_request(line))

    def close(self) -> None:
        self.closed = True


def test_a_writer_that_had_trouble_ends_once_nothing_is_under_way_and_is_given_nothing_more() -> None:
    rig, pipe = Rig(slots=3, every_s=1.0), Pipe()
    rig.persistence.writer._pipe = cast(Any, pipe)
    rig.offer(1, 0.0)
    rig.offer(2, 2.0)
    rig.written(1, 3.0, "Input/output error", "")
    assert not pipe.closed
    rig.offer(3, 3.0 + RETRY_S)
    rig.written(2, 4.0 + RETRY_S)
    assert pipe.closed and rig.persistence.writer._pipe is None
    assert [type(request) for request in pipe.told] == [Persist, Persist, Discard, Release]
    assert [(type(request), request.serial) for request in rig.sent()] == [(Persist, 3)]


def test_slowness_is_told_after_ten_times_what_the_last_one_took_within_five_seconds_and_a_minute() -> None:
    for took_s, told_s in ((0.1, 5.0), (2.0, 20.0), (30.0, 60.0)):
        rig = Rig(slots=3, every_s=1.0)
        rig.offer(1, 0.0)
        rig.written(1, took_s)
        rig.offer(2, 100.0)
        rig.persistence.due(rig.sessions, 100.0 + told_s)
        assert all(session.persist_note == "" for session in rig.sessions)
        rig.persistence.due(rig.sessions, 100.1 + told_s)
        assert all(f"for {told_s:.0f} s and more" in session.persist_note for session in rig.sessions)
