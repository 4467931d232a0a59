"""A snapshot is written from the area that holds it, with digests taken there, and read back into one."""

from __future__ import annotations

import mmap
import random
import struct
from itertools import product
from pathlib import Path

import pytest
from area_contents import Area, in_area
from disk_images import BLOCK, images

from understudy.recovery.snapshots import Contents, Store, StoreError
from understudy.recovery.snapshots._store import RecordedDisk
from understudy.replay import content_digest, digest

SIZES = (0, 1, 64, 4095, 4096, 5000, 70_000, 300_000, 5 << 20)


def persist(store: Store, extents: Contents, serial: int) -> int:
    """Answers its sequence."""
    receipt = store.persist(
        job="job", rank=0, world=1, step=0, serial=serial, extents=extents, threads=2, timeout_s=1
    )
    return receipt.sequence


def content_of(store: Store, sequence: int) -> dict[int, bytes]:
    """Each extent by its id, read in every way there is."""
    rows = store.extents(sequence)
    all_at_once = [bytearray(size) for _, _, size in rows]
    store.read_all(sequence, all_at_once)
    for index, (_, _, size) in enumerate(rows):
        alone = bytearray(size)
        store.read(sequence, index, alone)
        assert alone == all_at_once[index]
    assert store.verify(sequence) == []
    return {number: bytes(content) for (_, number, _), content in zip(rows, all_at_once, strict=True)}


def random_contents(chance: random.Random) -> list[bytes]:
    return [chance.randbytes(chance.choice(SIZES)) for _ in range(chance.randrange(1, 12))]


@pytest.mark.parametrize("engine", ["uring", "direct", "buffered", "mmap"])
def test_what_lies_in_an_area_is_stored_whether_written_from_there_or_copied(
    engine: str, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    for serial, in_place in enumerate((True, False, True), start=1):
        contents = random_contents(chance)
        extents = in_area(contents, chance).contents(in_place=in_place)
        path = tmp_path / str(serial)
        Store.create(path, slots=2, slot_bytes=extents.needed_slot_bytes())
        try:
            store = Store.open(path, engine=engine)
        except OSError as problem:
            pytest.skip(str(problem))
        with store:
            assert content_of(store, persist(store, extents, 1)) == dict(enumerate(contents))
            assert sorted(store.digests(1)) == sorted(map(content_digest, contents))


def test_sets_of_other_buffers_follow_one_another_in_one_store(tmp_path: Path, seed: int) -> None:
    """As of a server that makes new ones and frees old ones."""
    chance = random.Random(seed)
    Store.create(tmp_path / "store", slots=4, slot_bytes=64 << 20)
    with Store.open(tmp_path / "store") as store:
        for serial in range(1, 8):
            contents = random_contents(chance)
            sequence = persist(store, in_area(contents, chance).contents(in_place=True), serial)
            assert content_of(store, sequence) == dict(enumerate(contents))
            store.release_before(serial)


def test_extents_are_read_straight_into_an_area_and_nothing_around_them_changes(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    contents = random_contents(chance)
    area = in_area(contents, chance)
    extents = area.contents(in_place=True)
    Store.create(tmp_path / "store", slots=2, slot_bytes=extents.needed_slot_bytes())
    with Store.open(tmp_path / "store") as store:
        persist(store, extents, 1)
        rows = store.extents(1)
        for scattered, in_place in product((False, True), (False, True)):
            places = area.offsets
            if scattered:
                places = in_area(contents, chance, gaps=(64, 4096, 12345 // 64 * 64)).offsets
            into = mmap.mmap(-1, max(places) + (8 << 20))
            into[:] = b"\xaa" * len(into)
            wanted = [(index, places[number]) for index, (_, number, _) in enumerate(rows)]
            store.read_into(1, wanted, into, in_place=in_place)
            for place, content in zip(places, contents, strict=True):
                assert into[place : place + len(content)] == content
            ends = [place + len(content) for place, content in zip(places, contents, strict=True)]
            assert set(into[: min(places)]) <= {0xAA} and set(into[max(ends) :]) <= {0xAA}
        for wrong in ((len(rows), 0), (0, len(into) + 1), (0, 1 << 63)):
            with pytest.raises(StoreError, match=r"has no extent|does not fit the area"):
                store.read_into(1, [wrong], into)


def disk_with(area: Area, slots: int = 3) -> RecordedDisk:
    """An empty store for it, and for the same contents where they lie less well in pages."""
    slot_bytes = area.contents(in_place=True).needed_slot_bytes(chunk_bytes=BLOCK)
    slot_bytes += 2 * BLOCK * len(area.offsets)
    disk = RecordedDisk(bytes(2 * BLOCK + slots * (BLOCK + slot_bytes)))
    Store.create_on(disk, slots=slots, slot_bytes=slot_bytes, chunk_bytes=BLOCK)
    return RecordedDisk(disk.content())


@pytest.mark.parametrize("in_place", [False, True])
def test_a_digest_that_was_handed_over_wrongly_is_found_by_whoever_reads(in_place: bool, seed: int) -> None:
    chance = random.Random(seed)
    contents = [chance.randbytes(size) for size in (6000, 70, 9000)]
    area = in_area(contents, chance, digest_of=lambda n, content: content_digest(content) ^ (n == 2))
    disk = disk_with(area)
    with Store.open_on(disk) as store:
        sequence = persist(store, area.contents(in_place=in_place), 1)
        rows = store.extents(sequence)
        (wrong,) = store.verify(sequence)
        assert rows[wrong][1] == 2
        for index, (_, number, size) in enumerate(rows):
            into = bytearray(size)
            if number == 2:
                with pytest.raises(
                    StoreError, match=r"kind 1, id 2\) is not what it was when its digest was"
                ):
                    store.read(sequence, index, into)
            else:
                store.read(sequence, index, into)
                assert into == contents[number]
        with pytest.raises(StoreError, match="id 2"):
            store.read_into(sequence, [(index, 0) for index in range(3)], bytearray(16384))
        with pytest.raises(StoreError, match="id 2"):
            store.stream(sequence).read_into(bytearray(store.snapshots()[0].bytes))


def test_a_set_with_a_wrong_digest_does_not_count_after_a_crash_before_its_superblock(seed: int) -> None:
    chance = random.Random(seed)
    contents = [chance.randbytes(6000)]
    good = in_area(contents, chance)
    bad = in_area(contents, chance, digest_of=lambda n, content: content_digest(content) ^ 1)
    disk = disk_with(good)
    start = disk.content()
    with Store.open_on(disk) as store:
        persist(store, good.contents(in_place=True), 1)
        persist(store, bad.contents(in_place=True), 2)
    found = set()
    for image, _ in images(disk.log(), start, chance, 4, 5):
        superblocks_of_before = start[: 2 * BLOCK] + image[2 * BLOCK :]
        with Store.open_on(RecordedDisk(superblocks_of_before), writable=False) as store:
            found |= {entry.serial for entry in store.snapshots()}
    assert found == {1}


def test_a_content_without_a_digest_gets_one(seed: int) -> None:
    chance = random.Random(seed)
    contents = [chance.randbytes(size) for size in (6000, 9000)]
    area = in_area(contents, chance, digest_of=lambda n, content: content_digest(content) if n else 0)
    with Store.open_on(disk_with(area)) as store:
        persist(store, area.contents(in_place=True), 1)
        assert sorted(store.digests(1)) == sorted(map(content_digest, contents))
        assert content_of(store, 1) == dict(enumerate(contents))


@pytest.mark.parametrize("in_place", [False, True])
def test_an_area_that_was_given_up_meanwhile_leaves_no_snapshot(in_place: bool, seed: int) -> None:
    chance = random.Random(seed)
    contents = [chance.randbytes(size) for size in (6000, 9000)]
    area = in_area(contents, chance)
    disk = disk_with(area)

    def given_up() -> bool:
        area.memory[:] = bytes(len(area.memory))
        return False

    with Store.open_on(disk) as store:
        free = store.free_slots
        with pytest.raises(StoreError, match="given up in host memory while it was written"):
            store.persist(
                job="job", rank=0, world=1, step=0, serial=1, timeout_s=1, confirm=given_up,
                extents=area.contents(in_place=in_place),
            )  # fmt: skip
        assert store.free_slots == free and store.snapshots() == []
        other = in_area(contents, chance, gaps=(0,))
        assert content_of(store, persist(store, other.contents(in_place=in_place), 2))
    with Store.open_on(RecordedDisk(disk.content())) as store:
        assert [entry.serial for entry in store.snapshots()] == [2]


def test_an_area_that_changes_while_it_is_written_is_never_read_back_as_right(seed: int) -> None:
    """Its digest was taken before: what a hostile worker makes of it meanwhile is found."""
    chance = random.Random(seed)
    area = in_area([chance.randbytes(9000)], chance)
    extents = area.contents(in_place=True)
    area.memory[area.offsets[0] + 5000] ^= 1
    with Store.open_on(disk_with(area)) as store:
        assert store.verify(persist(store, extents, 1)) == [0]


def sealed(manifest: bytearray) -> bytes:
    """With a right digest."""
    struct.pack_into("<Q", manifest, 56, digest(bytes(manifest[64:])))
    return bytes(manifest)


def test_a_manifest_that_says_anything_is_refused_or_means_bytes_of_its_area(seed: int) -> None:
    chance = random.Random(seed)
    contents = [chance.randbytes(size) for size in (6000, 70, 9000)]
    area = in_area(contents, chance)
    counts = {"refused": 0, "stored": 0}
    values = [0, 1, 63, 64, 4096, len(area.memory), 2**31, 2**53, 2**63, 2**64 - 1, 2**64 - 64]
    for _ in range(300):
        manifest = bytearray(area.manifest)
        for _ in range(chance.randrange(1, 4)):
            at = 8 * chance.randrange(len(manifest) // 8)
            struct.pack_into("<Q", manifest, at, chance.choice([*values, chance.getrandbits(14)]))
        memory = area.memory
        try:
            extents = Contents(
                [],
                area=memory,
                manifest=sealed(manifest),
                in_place=bool(chance.getrandbits(1)),
                shortest_run=4096,
            )
            needed = extents.needed_slot_bytes(chunk_bytes=BLOCK)
            assert extents.bytes <= 10 * len(memory)
        except StoreError:
            counts["refused"] += 1
            continue
        disk = RecordedDisk(bytes(2 * BLOCK + 2 * (BLOCK + needed)))
        Store.create_on(disk, slots=2, slot_bytes=needed, chunk_bytes=BLOCK)
        with Store.open_on(disk) as store:
            sequence = persist(store, extents, 1)
            for index, (_, _, size) in enumerate(store.extents(sequence)):
                if index in store.verify(sequence):
                    continue
                into = bytearray(size)
                store.read(sequence, index, into)
                assert bytes(into) in bytes(memory)
        counts["stored"] += 1
    print(counts)
    assert all(counts.values())


def test_contents_that_overlap_in_an_area_are_written_each_by_itself(seed: int) -> None:
    chance = random.Random(seed)
    area = in_area([chance.randbytes(9000), chance.randbytes(9000)], chance, gaps=(0,))
    manifest = bytearray(area.manifest)
    struct.pack_into("<Q", manifest, 64 + 40 + 24, area.offsets[0] + 128)
    whole = bytes(area.memory[area.offsets[0] + 128 :][:9000])
    struct.pack_into("<Q", manifest, 64 + 40 + 16, content_digest(whole))
    extents = Contents([], area=area.memory, manifest=sealed(manifest), in_place=True, shortest_run=4096)
    needed = extents.needed_slot_bytes(chunk_bytes=BLOCK)
    disk = RecordedDisk(bytes(2 * BLOCK + 2 * (BLOCK + needed)))
    Store.create_on(disk, slots=2, slot_bytes=needed, chunk_bytes=BLOCK)
    with Store.open_on(disk) as store:
        found = content_of(store, persist(store, extents, 1))
    assert found[1] == whole and found[0] == area.memory[area.offsets[0] :][:9000]
