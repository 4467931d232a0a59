"""When proxyd sends a set of snapshots to storage, and what becomes of trouble there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from recovery.jobs import Session
from recovery.persistence import Store
from recovery.persistence.layout import stores_of
from recovery.persistence.persistence import RETRY_S, Persistence
from recovery.persistence.request import (
    Discard,
    Persist,
    Release,
    Written,
    decode_answer,
    decode_request,
    encode,
)
from recovery.persistence.settings import PersistenceSettings
from recovery.persistence.writer import RankStores


class Rig:
    """Two ranks whose leases are noted, and a writer that only takes notes."""

    def __init__(self, slots: int = 3, every_s: float = 10.0) -> None:
        self.leases: list[list[int]] = [[], []]
        self.sessions = [self.session(rank) for rank in (0, 1)]
        job = SimpleNamespace(name="job", active_sessions=lambda: self.sessions)
        self.persistence = Persistence(cast(Any, job), PersistenceSettings(Path("/x"), every_s, slots))

    def session(self, rank: int) -> Session:
        def lease(serials: list[int]) -> None:
            self.leases[rank] = serials

        log = SimpleNamespace(lease_snapshots=lease, describe_snapshot=lambda serial: None)
        return cast(
            Session,
            SimpleNamespace(
                rank=rank, log=log, active=True, directory=Path(f"/dev/shm/understudy-1/job/rank-{rank}"),
                persisted_step=0, persist_note="",
            ),
        )  # fmt: skip

    def sent(self) -> list[Any]:
        found = list(self.persistence._unsent)
        self.persistence._unsent.clear()
        return found

    def offer(self, serial: int, now: float) -> None:
        """Ordered and, at once, complete in host memory."""
        self.persistence.announce(serial, self.sessions, now)
        self.persistence.offer(serial, self.sessions, now)

    def written(self, serial: int, now: float, *errors: str) -> None:
        for rank in (0, 1):
            error = errors[rank] if errors else ""
            self.persistence.take(Written(serial, rank, step=10 * serial, bytes=1, error=error), now)


def test_a_set_is_leased_until_all_ranks_have_written_it_and_then_older_ones_may_go() -> None:
    rig = Rig()
    rig.offer(4, 100.0)
    (request,) = rig.sent()
    assert isinstance(request, Persist) and (request.serial, request.run) == (4, "understudy-1.rank-0")
    assert request.directories == ("/dev/shm/understudy-1/job/rank-0", "/dev/shm/understudy-1/job/rank-1")
    assert rig.leases == [[4], [4]]
    rig.persistence.take(Written(4, 0, step=40), 101.0)
    assert rig.leases == [[4], [4]] and rig.sent() == []
    rig.persistence.take(Written(4, 1, step=40), 102.0)
    assert rig.leases == [[], []]
    assert rig.sent() == [Release(4, "understudy-1.rank-0")]
    assert [session.persisted_step for session in rig.sessions] == [40, 40]


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
    assert rig.sent() == [Discard(1, "understudy-1.rank-0")]
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


def test_workers_that_were_started_again_write_a_run_of_their_own() -> None:
    rig = Rig(every_s=10.0)
    rig.offer(7, 0.0)
    for session in rig.sessions:
        session.directory = Path(f"{session.directory}-1")
    rig.offer(1, 0.1)
    first, second = rig.sent()
    assert (first.run, second.run) == ("understudy-1.rank-0", "understudy-1.rank-0-1")
    rig.written(7, 1.0)  # of the former run: nobody waits for it
    assert rig.sent() == []


def test_messages_arrive_as_they_were_sent_and_others_are_refused() -> None:
    for request in (Persist(3, "run", ("/a", "/b")), Release(4, "run"), Discard(5, "run")):
        assert decode_request(encode(request)) == request
    written = Written(3, 1, 10, 1 << 40, 0.5, "a sentence")
    assert decode_answer(encode(written)) == written
    for line in (b"", b"[]", b"{}", b'{"persist": 3}', b'{"run": {}}', b'{"release": {}, "persist": {}}'):
        with pytest.raises((ValueError, KeyError)):
            decode_request(line)


def test_a_snapshot_that_outgrows_its_store_gets_a_larger_one_and_the_old_one_goes(tmp_path: Path) -> None:
    run = tmp_path / "job" / "run"
    stores = RankStores(run, 0, slots=3, agreed=True)
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


def test_a_writer_of_the_same_run_goes_on_where_another_one_was_killed(tmp_path: Path) -> None:
    run = tmp_path / "job" / "run"
    first = RankStores(run, 0, slots=3, agreed=True)
    write(first.fitting([1000], serial=1), 1, 1000)
    write(first.fitting([1 << 20], serial=2), 2, 1 << 20)
    for open_store in (first._current, *(former for _, former in first._outgrown.values())):
        assert open_store is not None
        open_store.close()
    (run / "rank-0.2.new").write_bytes(b"half")  # it was making a larger one
    second = RankStores(run, 0, slots=3, agreed=True)
    store = second.fitting([1000], serial=3)
    assert [entry.serial for entry in store.snapshots()] == [2]
    write(store, 3, 1000)
    second.release(3)
    assert [found.growth for found in stores_of(run)] == [1]


def test_a_store_that_cannot_be_opened_again_is_left_and_another_one_begun(tmp_path: Path) -> None:
    run = tmp_path / "job" / "run"
    first = RankStores(run, 0, slots=3, agreed=True)
    write(first.fitting([1000], serial=1), 1, 1000)
    second = RankStores(run, 0, slots=3, agreed=True)  # while the first one still has its lock
    store = second.fitting([1000], serial=2)
    assert [found.growth for found in stores_of(run)] == [0, 1]
    write(store, 2, 1000)
    second.release(2)
    assert [found.growth for found in stores_of(run)] == [1]


def write(store: Store, serial: int, size: int) -> None:
    store.persist(
        job="job", rank=0, world=2, step=serial, serial=serial, extents=[(1, 1, bytes(size))], timeout_s=5
    )
