"""Snapshots of a device server: copied behind the commit they are of, and exactly that commit."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path
from typing import cast

import pytest
from executor_harness import ALLOCATE, FREE, HOST_TO_DEVICE, OPERATOR, PHASE, SEED, Harness, double, vector

from understudy.replay import Snapshot

LIMIT = 64 << 20


def taken(h: Harness, serial: int) -> Snapshot:
    """Wait for a snapshot."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = [s for s in h.log.snapshots() if s.serial == serial]
        if found:
            return found[0]
        time.sleep(0.001)  # waits for shared memory, which has no event here
    raise AssertionError(f"snapshot {serial} was not taken; there are {h.log.snapshots()}")


def order(h: Harness, serial: int) -> None:
    h.synchronize()  # the order is not for a commit that is still in the log
    h.log.order_snapshot(serial)


def restart(h: Harness, commit: int) -> None:
    h.executor.park()
    h.executor = h.new_executor()
    h.executor.restore_snapshot(commit)
    h.executor.resume()


def payload(length: int, value: float) -> tuple[float, ...]:
    return tuple(struct.unpack("f", struct.pack("f", value))) * length


def send(h: Harness, handle: int, length: int, value: float) -> None:
    words = struct.unpack(f"<{length // 2}Q", struct.pack(f"<{length}f", *payload(length, value)))
    h.writer.append(HOST_TO_DEVICE, handle, [0, 4 * length, *words])


def take(h: Harness, serial: int, value: float) -> None:
    """Snapshot `serial`, in which buffer 1 is full of `value`, becomes the one that counts."""
    send(h, 1, 1 << 18, value)
    order(h, serial)
    h.commit()
    send(h, 1, 2, 0)
    h.synchronize()
    taken(h, serial)
    h.log.snapshot_floor = serial


@pytest.mark.parametrize("protect", [True, False])
def test_snapshot_is_of_its_commit_whatever_is_written_afterwards(protect: bool) -> None:
    """Random programs; every buffer may be written, freed or left alone before it has been copied."""
    seed = 20261121
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(6):
        with Harness(protect=protect, snapshot_bytes=LIMIT, world=2 if protect else 1) as h:
            lengths = {handle: 2 * chance.choice([1, 8, 3000, 400_000]) for handle in range(1, 9)}
            values = {handle: float(handle) for handle in lengths}
            for handle, length in lengths.items():
                h.writer.append(ALLOCATE, handle, [4 * length])
            fill = {n: h.template("aten::fill_.Scalar", [*vector(n), 7], [0]) for n in set(lengths.values())}
            for serial in range(1, 4):
                for handle in values:
                    values[handle] += chance.choice([0, 1])
                    h.writer.append(OPERATOR, fill[lengths[handle]], [handle, double(values[handle])])
                order(h, serial)
                h.log.snapshot_floor = serial - 1
                h.commit()
                h.writer.append(PHASE, 0, [])  # what is freed before anything is done belongs to the commit
                at_commit = dict(values)
                freed: set[int] = set()
                for _ in range(chance.randrange(12)):
                    handle = chance.choice(sorted(set(values) - freed))
                    if chance.random() < 0.2 and len(freed) < 6:
                        h.writer.free_later(handle)
                        h.writer.append(FREE, 0, [])
                        freed.add(handle)
                        continue
                    values[handle] = chance.random()
                    h.writer.append(OPERATOR, fill[lengths[handle]], [handle, double(values[handle])])
                h.synchronize()
                for handle in freed:
                    h.writer.append(ALLOCATE, handle + 100 * serial, [4 * lengths[handle]])
                    lengths[handle + 100 * serial] = lengths.pop(handle)
                    values[handle + 100 * serial] = values.pop(handle)
                h.synchronize()
                commit = taken(h, serial).commit.number
            end = {handle: values.get(handle) for handle in values if handle < 100}
            h.executor.park()
            other = h.new_executor()
            other.restore_snapshot(commit)
            for handle, value in at_commit.items():
                length = other.buffer_bytes(handle) // 4
                content = other.read_state(handle, 0, 4 * length)
                assert content == struct.pack(f"<{length}f", *payload(length, value))
            h.executor = other
            other.resume()
            for handle, last in end.items():
                assert h.read(handle, 2) == payload(2, cast(float, last))
            assert h.log.replies_different == 0


def test_generators_and_the_optimizer_phase_are_part_of_a_snapshot() -> None:
    with Harness(snapshot_bytes=LIMIT, optimizer_preimages=False) as h:
        h.new(1, [0, 0, 0, 0])
        h.writer.append(SEED, 0, [1234])
        uniform = h.template("aten::uniform_", [*vector(), 7, 7, 11])
        draw = [1, double(0.0), double(1.0), 0]
        h.writer.append(OPERATOR, uniform, draw)
        order(h, 1)
        h.commit()
        h.writer.append(PHASE, 1, [])
        h.writer.append(OPERATOR, uniform, draw)
        drawn = h.read(1)
        commit = taken(h, 1).commit
        assert commit.number == 1
        restart(h, 1)
        h.synchronize()
        assert h.read(1) == drawn
        assert (h.log.replies_compared, h.log.replies_different) == (1, 0)


def test_many_minibatches_are_replayed_from_a_snapshot_on_the_same_server() -> None:
    """More than the ring of commits remembers; the server is brought back in place."""
    with Harness(snapshot_bytes=LIMIT) as h:
        h.new(1, [0, 0, 0, 0])
        h.new(2, [1, 1, 1, 1])
        order(h, 1)
        h.commit()
        for step in range(1, 201):
            h.add(1, 2)
            h.commit()
            if step % 20 == 0:
                assert h.read(1) == payload(4, step)
                h.log.floor_commit = h.log.commit_count
        assert taken(h, 1).commit.number == 1
        h.executor.park()
        h.log.floor_commit = 1
        h.executor.restore_snapshot(1)
        assert [commit.number for commit in h.log.commits()] == [1]
        h.executor.resume()
        assert h.read(1) == payload(4, 200)
        assert h.log.commit_count >= 200
        assert (h.log.replies_compared, h.log.replies_different) == (10, 0)
        h.executor.park()
        h.executor.rewind(h.log.commit_count)  # its own commits can be had again
        h.executor.resume()
        h.add(1, 2)
        assert h.read(1) == payload(4, 201)


def test_rank_can_be_rewound_to_the_snapshot_it_was_brought_to() -> None:
    with Harness(snapshot_bytes=LIMIT) as h:
        h.new(1, [1, 1, 1, 1])
        h.writer.append(SEED, 0, [77])
        order(h, 1)
        h.commit()
        h.add(1, 1)
        assert h.read(1) == payload(4, 2)
        taken(h, 1)
        restart(h, 1)
        assert h.read(1) == payload(4, 2)
        h.executor.park()
        h.executor.rewind(1)
        h.executor.resume()
        assert h.read(1) == payload(4, 2)
        assert h.log.replies_different == 0


def test_a_snapshot_from_before_is_not_taken_for_a_commit_that_has_its_number_now() -> None:
    """A replay without pre-images commits before each optimizer step, too; the run before it did not."""
    with Harness(snapshot_bytes=LIMIT, shadow_bytes=1 << 12) as h:
        h.new(1, [0, 0, 0, 0])
        h.new(2, [1, 1, 1, 1])
        for handle in range(3, 40):
            h.new(handle, [0, 0, 0, 0])  # too many for what an area of shadows says of them
        for serial in (1, 2, 3):
            h.add(1, 2)
            h.writer.append(PHASE, 1, [])
            order(h, serial)
            h.commit()
            h.synchronize()
        before = taken(h, 3).commit
        h.executor.park()
        h.options["optimizer_preimages"] = False
        h.executor = h.new_executor()
        h.executor.restore(0)
        h.executor.resume()
        h.run_all()
        now = next(commit for commit in h.log.commits() if commit.number == before.number)
        assert now.record_index < before.record_index and not now.has_manifest
        h.executor.park()
        with pytest.raises(RuntimeError, match="has no manifest"):
            h.executor.rewind(before.number)


def test_buffer_that_did_not_change_is_copied_once() -> None:
    with Harness(snapshot_bytes=LIMIT) as h:
        h.writer.append(ALLOCATE, 1, [4 << 20])
        send(h, 1, 1 << 18, 3)
        h.new(2, [1, 1, 1, 1])
        copied = []
        for serial in range(1, 4):
            h.add(2, 2)
            order(h, serial)
            h.commit()
            h.synchronize()
            copied.append(taken(h, serial).bytes)
            h.log.snapshot_floor = serial
        assert copied == [(4 << 20) + 16, 16, 16]
        restart(h, taken(h, 3).commit.number)
        assert h.read(2) == payload(4, 8)
        assert h.read(1) == payload(4, 3)


def test_log_stays_since_the_snapshot_that_counts_and_goes_when_a_newer_one_does() -> None:
    with Harness(snapshot_bytes=LIMIT) as h:
        h.writer.append(ALLOCATE, 1, [1 << 20])
        freed = []
        for serial in range(1, 5):
            for _ in range(8):  # two segments
                send(h, 1, 1 << 18, serial)
            order(h, serial)
            h.commit()
            send(h, 1, 2, serial)
            h.synchronize()
            taken(h, serial)
            h.log.floor_commit = h.log.commit_count
            h.log.snapshot_floor = serial - 1
            h.commit()
            send(h, 1, 2, serial)
            h.synchronize()
            freed.append(h.log.freed_segments)
        assert freed[0] == 0
        assert freed[1] >= 2
        assert freed[3] >= 6


def test_no_memory_for_a_snapshot_is_noted_and_training_goes_on() -> None:
    with Harness(snapshot_bytes=1 << 20) as h:
        h.writer.append(ALLOCATE, 1, [2 << 20])
        h.new(2, [1, 1, 1, 1])
        order(h, 1)
        h.commit()
        h.add(2, 2)
        assert h.read(2) == payload(4, 2)
        deadline = time.monotonic() + 20
        while h.log.snapshot_failed != 1:
            assert time.monotonic() < deadline
            time.sleep(0.001)  # waits for shared memory, which has no event here
        assert h.log.snapshots() == []
        assert h.log.snapshot_used_bytes <= 1 << 20
        h.add(2, 2)
        h.commit()
        assert h.read(2) == payload(4, 4)


def test_several_orders_may_be_ahead_and_each_is_of_its_own_step() -> None:
    with Harness(snapshot_bytes=LIMIT) as h:
        h.writer.append(ALLOCATE, 1, [1 << 20])
        h.writer.append(ALLOCATE, 2, [1 << 20])
        send(h, 2, 1 << 18, 7)  # never changes again, so nothing but the next snapshot hurries its copy
        h.synchronize()
        h.log.lease_snapshots([1, 2, 3])
        for serial, step in ((1, 2), (2, 3), (3, 5)):
            h.log.order_snapshot(serial, step)
        for step in range(1, 7):
            send(h, 1, 1 << 18, step)
            h.commit()
        found = {serial: taken(h, serial) for serial in (3, 2, 1)}
        assert {serial: one.commit.step for serial, one in found.items()} == {1: 2, 2: 3, 3: 5}
        area = Path(h.directory, "snapshot").read_bytes()
        for serial, one in found.items():
            rows = {handle: (size, at) for handle, size, _, at in h.log.snapshot_contents(serial).buffers}
            for handle, value in ((1, one.commit.step), (2, 7)):
                size, at = rows[handle]
                assert area[at : at + size] == struct.pack("f", value) * (1 << 18)


def test_two_sets_of_a_state_never_need_more_than_the_limit() -> None:
    with Harness(snapshot_bytes=5 << 20) as h:
        h.writer.append(ALLOCATE, 1, [2 << 20])
        for serial in range(1, 9):
            take(h, serial, serial)
            assert h.log.snapshot_used_bytes <= 5 << 20
        assert h.log.snapshot_failed == 0


def test_snapshot_that_a_rewind_overtakes_is_never_published_but_taken_anew() -> None:
    with Harness(snapshot_bytes=LIMIT) as h:
        h.writer.append(ALLOCATE, 1, [8 << 20])
        h.new(2, [1, 1, 1, 1])
        h.commit()
        order(h, 1)
        h.commit()
        h.add(2, 2)
        h.synchronize()
        h.executor.park()
        h.executor.rewind(1)
        before = h.log.snapshots()
        h.executor.resume()
        h.synchronize()
        assert taken(h, 1).commit.number == (before[0].commit.number if before else 2)
        restart(h, taken(h, 1).commit.number)
        assert h.read(2) == payload(4, 2)


def test_damaged_snapshot_is_refused() -> None:
    with Harness(snapshot_bytes=LIMIT) as h:
        h.new(1, [1, 1, 1, 1])
        order(h, 1)
        h.commit()
        h.add(1, 1)
        h.synchronize()
        taken(h, 1)
        h.executor.park()
        h.spoil("snapshot", (1, 1, 1, 1))
        h.executor = h.new_executor()
        with pytest.raises(RuntimeError, match="damaged"):
            h.executor.restore_snapshot(1)


def test_suspended_snapshots_give_their_memory_and_the_log_back() -> None:
    with Harness(snapshot_bytes=LIMIT) as h:
        h.writer.append(ALLOCATE, 1, [1 << 20])
        for _ in range(8):
            send(h, 1, 1 << 18, 1)
        order(h, 1)
        h.commit()
        send(h, 1, 2, 1)
        h.synchronize()
        taken(h, 1)
        h.log.floor_commit = 1
        h.commit()
        send(h, 1, 2, 1)
        h.synchronize()
        assert h.log.freed_segments == 0
        h.log.snapshot_suspended = True
        h.commit()
        send(h, 1, 2, 1)
        h.synchronize()
        assert (h.log.snapshots(), h.log.snapshot_used_bytes) == ([], 0)
        assert h.log.freed_segments >= 1


def test_rank_alone_whose_log_is_full_takes_a_snapshot_and_goes_on() -> None:
    with Harness(protect=False, world=1, snapshot_bytes=LIMIT, segment_count=4) as h:
        h.writer.append(ALLOCATE, 1, [1 << 20])
        for step in range(64):  # 64 MiB through a log of 16
            send(h, 1, 1 << 18, step)
        h.synchronize()
        assert h.log.freed_segments >= 12
        assert h.log.degraded == 0
        restart(h, h.log.snapshots()[-1].commit.number)
        assert h.read(1) == payload(4, 63)


def test_a_freed_buffer_that_a_rewind_brings_back_is_copied_again() -> None:
    """Its copy went with the snapshot that held it, while it was in no table."""
    with Harness(snapshot_bytes=LIMIT) as h:
        h.new(1, [1, 1, 1, 1])
        h.new(2, [2, 2, 2, 2])
        order(h, 1)
        h.commit()
        h.add(1, 2)
        taken(h, 1)
        h.commit()
        h.add(1, 2)
        h.writer.free_later(2)
        h.writer.append(FREE, 0, [])
        for serial in (2, 3):
            order(h, serial)
            h.commit()
            h.add(1, 1)
            taken(h, serial)
            h.log.snapshot_floor = serial
        h.synchronize()
        h.executor.park()
        h.executor.rewind(1)
        h.log.order_snapshot(4)
        h.executor.resume()
        assert h.read(1) == (20, 20, 20, 20)
        snapshot = taken(h, 4)
        restart(h, snapshot.commit.number)
        assert h.read(1) == (20, 20, 20, 20)


def test_newest_snapshot_may_go_while_an_older_one_is_leased() -> None:
    """With --persist-only, when it is on storage first."""
    with Harness(snapshot_bytes=LIMIT) as h:
        h.new(1, [0, 0, 0, 0])
        h.new(2, [1, 1, 1, 1])
        h.log.lease_snapshots([1])
        for serial in (1, 2):
            h.add(1, 2)
            order(h, serial)
            h.commit()
            h.synchronize()
            taken(h, serial)
        h.log.snapshot_floor = 3
        h.wait(lambda: [one.serial for one in h.log.snapshots()] == [1], "kept the newest snapshot")
        order(h, 3)
        h.commit()
        h.synchronize()
        restart(h, taken(h, 3).commit.number)
        assert h.read(1) == payload(4, 2)


@pytest.mark.parametrize("fresh", [True, False])
def test_what_a_rank_has_from_an_older_snapshot_is_copied_again_once_that_one_is_gone(fresh: bool) -> None:
    """The newer one counts as soon as the rank, which was brought to the older one, goes on."""
    with Harness(snapshot_bytes=LIMIT) as h:
        h.new(1, [0, 0, 0, 0])
        h.new(2, [1, 1, 1, 1])
        order(h, 1)
        h.commit()
        h.synchronize()
        older = taken(h, 1).commit.number
        h.log.snapshot_floor = 1
        h.commit()
        h.add(1, 2)
        order(h, 2)
        h.commit()
        h.synchronize()
        taken(h, 2)
        if fresh:
            h.executor.detach()
            h.executor = h.new_executor()
        else:
            h.executor.park()
        h.executor.restore_snapshot(older)
        h.log.snapshot_floor = 2
        h.log.order_snapshot(3)
        h.executor.resume()
        assert h.read(1) == (1, 1, 1, 1)
        restart(h, taken(h, 3).commit.number)
        assert h.read(1) == (1, 1, 1, 1)
