"""Snapshots that somebody copies to storage stay as they are, and cost nothing once nobody does."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import test_snapshots
from executor_harness import ALLOCATE, Harness
from test_snapshots import LIMIT, payload, send

from understudy import replay


def content(h: Harness, serial: int, handle: int) -> bytes:
    """As a reader of the file finds it; LogError if that was not the snapshot's content."""
    contents = h.log.snapshot_contents(serial)
    ((_, count, digest, offset),) = [row for row in contents.buffers if row[0] == handle]
    with open(f"{h.directory}/snapshot", "rb") as area:
        area.seek(offset)
        found = area.read(count)
    if not h.log.snapshot_holds(serial):
        raise replay.LogError("it went meanwhile")
    assert replay.content_digest(found) == digest
    return found


def take(h: Harness, serial: int, value: float) -> None:
    """As there, and the server has let go of what does not count any more."""
    test_snapshots.take(h, serial, value)
    settle(h)


def settle(h: Harness) -> None:
    """The server has seen what proxyd wrote."""
    h.commit()
    send(h, 1, 2, 0)
    h.synchronize()


def test_a_leased_snapshot_stays_until_the_lease_ends_whatever_counts() -> None:
    with Harness(snapshot_bytes=LIMIT) as h:
        h.writer.append(ALLOCATE, 1, [1 << 20])
        take(h, 1, 1)
        h.log.lease_snapshots([1])
        for serial in range(2, 7):
            take(h, serial, serial)
            assert content(h, 1, 1) == struct.pack("<f", 1) * (1 << 18)
            assert content(h, serial, 1) == struct.pack("<f", serial) * (1 << 18)
        assert [s.serial for s in h.log.snapshots()] == [1, 6]
        assert h.log.snapshot_used_bytes < 3.5 * (1 << 20)  # those between do not stay
        h.log.lease_snapshots([])
        settle(h)
        assert [s.serial for s in h.log.snapshots()] == [6]
        assert h.log.snapshot_used_bytes < 1.5 * (1 << 20)
        with pytest.raises(replay.LogError, match="not there any more"):
            content(h, 1, 1)


def test_as_many_as_there_are_leases_stay_beside_the_one_that_counts(seed: int) -> None:
    chance = random.Random(seed)
    with Harness(snapshot_bytes=LIMIT) as h:
        h.writer.append(ALLOCATE, 1, [1 << 20])
        leased: list[int] = []
        for serial in range(1, 40):
            take(h, serial, serial)
            if len(leased) == replay.SNAPSHOT_LEASES or (leased and chance.random() < 0.3):
                leased.remove(chance.choice(leased))
            leased.append(serial)
            h.log.lease_snapshots(leased)
            settle(h)
            for kept in leased:
                assert content(h, kept, 1) == struct.pack("<f", kept) * (1 << 18)
            assert {s.serial for s in h.log.snapshots()} == {*leased, serial}
            assert h.log.snapshot_used_bytes < (len({*leased, serial}) + 0.5) * (1 << 20)
        assert h.log.snapshot_failed == 0
        with pytest.raises(replay.LogError, match="too many"):
            h.log.lease_snapshots(list(range(1, replay.SNAPSHOT_LEASES + 2)))


def test_a_lease_outlives_the_server_and_keeps_no_log() -> None:
    with Harness(snapshot_bytes=LIMIT) as h:
        h.writer.append(ALLOCATE, 1, [1 << 20])
        take(h, 1, 1)
        h.log.lease_snapshots([1])
        take(h, 2, 2)
        h.executor.park()
        h.executor = h.new_executor()
        h.executor.restore_snapshot(next(s for s in h.log.snapshots() if s.serial == 2).commit.number)
        h.executor.resume()
        for serial in range(3, 6):
            for _ in range(8):  # two segments
                send(h, 1, 1 << 18, serial)
            take(h, serial, serial)
            h.log.floor_commit = h.log.commit_count
            settle(h)
            assert content(h, 1, 1) == struct.pack("<f", 1) * (1 << 18)
        counts = next(s for s in h.log.snapshots() if s.serial == 5)
        assert h.log.freed_segments == counts.commit.log_offset // h.log.segment_bytes
        assert h.read(1)[:2] == payload(2, 0)


def test_what_is_suspended_is_gone_for_whoever_reads_it() -> None:
    with Harness(snapshot_bytes=LIMIT) as h:
        h.writer.append(ALLOCATE, 1, [1 << 20])
        take(h, 1, 1)
        h.log.lease_snapshots([1])
        assert h.log.snapshot_holds(1)
        h.log.snapshot_suspended = True
        settle(h)
        assert not h.log.snapshot_holds(1)
        assert not h.log.snapshot_holds(0)


def test_memory_of_a_snapshot_on_storage_is_given_back_and_the_log_behind_it_stays() -> None:
    with Harness(snapshot_bytes=LIMIT) as h:
        h.writer.append(ALLOCATE, 1, [1 << 20])
        h.writer.append(ALLOCATE, 2, [1 << 20])  # does not change from one to the next
        take(h, 1, 1)
        for serial in (2, 4):
            take(h, serial, serial)
            kept = next(s.commit for s in h.log.snapshots() if s.serial == serial)
            area = Path(h.directory) / "snapshot"
            assert area.stat().st_blocks * 512 >= 2 << 20
            h.log.log_kept_from, h.log.snapshot_floor = kept.log_offset, serial + 1
            for value in range(12):
                send(h, 1, 1 << 18, value)
                h.log.floor_commit = h.log.commit_count
                settle(h)
            assert h.log.snapshots() == [] and h.log.snapshot_used_bytes == 0
            assert area.stat().st_blocks == 0
            assert h.log.freed_segments == kept.log_offset // h.log.segment_bytes
        h.log.log_kept_from = 0
        settle(h)
        assert h.log.freed_segments > kept.log_offset // h.log.segment_bytes
