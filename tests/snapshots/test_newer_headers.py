"""Headers of snapshots that are newer than the superblock: a snapshot costs one sync, and none is lost."""

from __future__ import annotations

import random

from disk_images import INCOMPATIBLE, as_of_an_older_release
from kept_snapshots import BLOCK, content_of, keep

from understudy.recovery.snapshots import Store
from understudy.recovery.snapshots._store import RecordedDisk


def without_superblocks_since(disk: bytes, before: bytes) -> RecordedDisk:
    """As a power cut may leave it that came before the next sync."""
    return RecordedDisk(before[: 2 * BLOCK] + disk[2 * BLOCK :])


def test_a_snapshot_whose_superblock_was_lost_is_found_by_its_header_and_stays(seed: int) -> None:
    chance = random.Random(seed)
    disk = RecordedDisk(bytes(2 * BLOCK + 4 * 9 * BLOCK))
    Store.create_on(disk, slots=4, slot_bytes=8 * BLOCK, chunk_bytes=2 * BLOCK)
    contents = {serial: chance.randbytes(20_000) for serial in (1, 2, 3)}
    with Store.open_on(disk) as store:
        keep(store, 1, contents[1])
        before = disk.content()
        keep(store, 2, contents[2])
    left = without_superblocks_since(disk.content(), before)
    for writable in (False, True, True):
        with Store.open_on(left, writable=writable) as store:
            assert [content_of(store, entry.sequence) for entry in store.snapshots()] == [
                [contents[2]],
                [contents[1]],
            ]
            assert store.free_slots == 2 and store.notes == ""
    with Store.open_on(left) as store:
        assert keep(store, 3, contents[3]).sequence == 3
        store.release_before(3)
        assert [entry.serial for entry in store.snapshots()] == [3]
    with Store.open_on(left, writable=False) as store:
        assert [content_of(store, entry.sequence) for entry in store.snapshots()] == [[contents[3]]]


def test_a_newer_header_counts_only_if_all_its_chunks_are_right(seed: int) -> None:
    chance = random.Random(seed)
    disk = RecordedDisk(bytes(2 * BLOCK + 4 * 9 * BLOCK))
    Store.create_on(disk, slots=4, slot_bytes=8 * BLOCK, chunk_bytes=2 * BLOCK)
    with Store.open_on(disk) as store:
        keep(store, 1, b"first")
        before = disk.content()
        keep(store, 2, chance.randbytes(20_000))
        slot = store.snapshots()[0].slot
    for at in (100, 5000, 20_000 - 1):  # of the payload, one in each chunk
        image = bytearray(disk.content())
        image[2 * BLOCK + slot * 9 * BLOCK + BLOCK + at] ^= 1
        with Store.open_on(without_superblocks_since(bytes(image), before)) as store:
            assert [entry.serial for entry in store.snapshots()] == [1]
            assert store.free_slots == 3
            assert keep(store, 3, b"third").sequence == 3, "no sequence is used again"


def test_a_store_of_a_release_before_newer_headers_counted_stays_one_that_it_reads() -> None:
    disk = RecordedDisk(bytes(2 * BLOCK + 4 * 9 * BLOCK))
    Store.create_on(disk, slots=4, slot_bytes=8 * BLOCK, chunk_bytes=2 * BLOCK)
    old = RecordedDisk(as_of_an_older_release(disk.content()))
    with Store.open_on(old) as store:
        keep(store, 1, b"first")
        before = old.content()
        keep(store, 2, b"second")
        store.release_before(2)
        assert [entry.serial for entry in store.snapshots()] == [2]
    for at in (0, BLOCK):
        assert old.content()[at + INCOMPATIBLE : at + INCOMPATIBLE + 4] == bytes(4)
    syncs = [event for event in old.log() if event[0] == "synced"]
    assert len(syncs) == 2 * 2 + 1, "payload and superblock of each, and the release"
    with Store.open_on(without_superblocks_since(old.content(), before)) as store:
        assert [entry.serial for entry in store.snapshots()] == [1], "as that release would read it"


def test_a_snapshot_costs_one_sync() -> None:
    disk = RecordedDisk(bytes(2 * BLOCK + 4 * 9 * BLOCK))
    Store.create_on(disk, slots=4, slot_bytes=8 * BLOCK, chunk_bytes=2 * BLOCK)
    with Store.open_on(disk) as store:
        keep(store, 1, bytes(20_000))  # and one for what was there when it was opened
        before = len(disk.log())
        keep(store, 2, bytes(20_000))
        assert [event[0] for event in disk.log()[before:]].count("synced") == 1
