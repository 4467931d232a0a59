"""Damaged and hostile stores: no wrong bytes, no crash, no memory without bound."""

from __future__ import annotations

import random
import struct
from collections import Counter
from pathlib import Path

import pytest
from disk_images import BLOCK, as_of_an_older_release

from understudy.recovery.snapshots import Store, StoreError
from understudy.recovery.snapshots._store import RecordedDisk
from understudy.replay import digest

SLOTS = 4
SLOT_BYTES = 6 * BLOCK
STRIDE = BLOCK + SLOT_BYTES
SUPERBLOCKS = 2 * BLOCK
CHUNK = 2 * BLOCK
ROW = 40  # of an extent
EPOCH, LATEST, SLOT_OF_LATEST, REGISTERED = 136, 144, 152, 168
CHECKSUM = BLOCK - 8


def contents(serial: int) -> list[bytes]:
    rng = random.Random(serial)
    return [rng.randbytes(size) for size in (9000, 0, 77, 6000)]


def persist(store: Store, serial: int) -> None:
    extents = [(1, number, content) for number, content in enumerate(contents(serial))]
    store.persist(job="job", rank=0, world=1, step=0, serial=serial, extents=extents, threads=1, timeout_s=0)


def flipped(image: bytes, at: int, bit: int = 0) -> bytes:
    """With one bit changed."""
    changed = bytearray(image)
    changed[at] ^= 1 << bit
    return bytes(changed)


def whole_image(old: bool = False) -> bytes:
    """Three snapshots that all count, of serials 1 to 3 in slots 0 to 2; slot 3 is free."""
    disk = RecordedDisk(bytes(SUPERBLOCKS + SLOTS * STRIDE))
    Store.create_on(disk, slots=SLOTS, slot_bytes=SLOT_BYTES, chunk_bytes=CHUNK)
    if old:
        disk = RecordedDisk(as_of_an_older_release(disk.content()))
    with Store.open_on(disk) as store:
        for serial in (1, 2, 3):
            persist(store, serial)
    return disk.content()


IMAGE = whole_image()


def look(image: bytes) -> dict[int, str]:
    """What a reader makes of each serial: "whole" or a sentence. Wrong bytes fail the test."""
    found = {}
    with Store.open_on(RecordedDisk(image), writable=False) as store:
        for entry in store.snapshots():
            try:
                damaged = store.verify(entry.sequence)
                for index, (_, _, size) in enumerate(store.extents(entry.sequence)):
                    into = bytearray(size)
                    store.read(entry.sequence, index, into)
                    assert into == contents(entry.serial)[index], f"wrong bytes in extent {index} of {entry}"
                assert damaged == [] and entry.valid_header
                found[entry.serial] = "whole"
            except StoreError as error:
                found[entry.serial] = str(error)
    return found


def try_flips(seed: int, flips: int) -> None:
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for _ in range(flips):
        # Half of them where all hangs on few bytes.
        blocks = [0, BLOCK, *(SUPERBLOCKS + slot * STRIDE for slot in range(SLOTS))]
        tables = [start + BLOCK + 4 * BLOCK for start in blocks[2:]]
        at = rng.randrange(len(IMAGE))
        if rng.random() < 0.5:
            at = rng.choice(blocks + tables) + rng.choice([rng.randrange(512), rng.randrange(BLOCK)])
        found = look(flipped(IMAGE, at, rng.randrange(8)))
        slot = (at - SUPERBLOCKS) // STRIDE
        for serial in (1, 2, 3):
            if at < SUPERBLOCKS or serial != slot + 1:
                assert found.get(serial) == "whole", f"bit at {at}: {found}"
        if at < SUPERBLOCKS:
            outcomes["in a superblock, the other one served"] += 1
        elif slot >= 3:
            outcomes["in a free slot"] += 1
        elif found[slot + 1] == "whole":
            within = (at - SUPERBLOCKS) % STRIDE
            assert within >= BLOCK, "a header is covered whole"
            outcomes["in padding"] += 1
        else:
            assert "damaged" in found[slot + 1]
            outcomes["found"] += 1
    print(f"{flips} flips: {dict(outcomes)}")
    assert outcomes["found"] > flips // 10


def test_a_flipped_bit_anywhere_is_found_or_harmless(seed: int) -> None:
    try_flips(seed, 2000)


@pytest.mark.long
def test_a_flipped_bit_anywhere_is_found_or_harmless_in_many_more_places(seed: int) -> None:
    try_flips(seed, 20_000)


@pytest.mark.parametrize("old", [False, True])
def test_verify_names_what_was_hit_and_nothing_else(old: bool) -> None:
    """Extents; chunks in a store of an older release."""
    payload = SUPERBLOCKS + BLOCK
    for chunk, extent, size in ((0, 0, 9000), (1, 3, 6000)):
        image = flipped(whole_image(old), payload + chunk * CHUNK + 5000)
        with Store.open_on(RecordedDisk(image), writable=False) as store:
            assert store.verify(1) == [chunk if old else extent]
            assert store.verify(2) == store.verify(3) == []
            named = f"chunk {chunk}" if old else rf"extent {extent} \(kind 1, id {extent}\)"
            with pytest.raises(StoreError, match=f"snapshot 1 .*{named} is not what it was"):
                store.read(1, extent, bytearray(size))
            if not old:  # a chunk has parts of both
                other = bytearray(6000 if extent == 0 else 9000)
                store.read(1, 3 - extent, other)
                assert other == contents(1)[3 - extent]


def test_what_was_released_stays_so_when_a_superblock_is_damaged() -> None:
    """Though it was the last to ask, and lies there whole."""
    disk = RecordedDisk(bytes(SUPERBLOCKS + SLOTS * STRIDE))
    Store.create_on(disk, slots=SLOTS, slot_bytes=SLOT_BYTES, chunk_bytes=CHUNK)
    with Store.open_on(disk) as store:
        for serial in (3, 2):
            persist(store, serial)
        assert list(look(disk.content())) == [3, 2]
        store.release_before(3)
    image = disk.content()
    assert look(image) == {3: "whole"}
    epochs = {at: struct.unpack_from("<Q", image, at + EPOCH)[0] for at in (0, BLOCK)}
    older, newer = sorted(epochs, key=lambda at: epochs[at])
    assert look(flipped(image, older)) == {3: "whole"}
    assert look(flipped(image, newer)) == {3: "whole", 2: "whole"}, "as it was before the release"


# ---------------------------------------------------------------- files that nobody of ours wrote
def sealed(image: bytes | bytearray, *blocks: int) -> bytes:
    """With right checksums in the blocks at these offsets."""
    changed = bytearray(image)
    for at in blocks:
        changed[at + CHECKSUM : at + BLOCK] = struct.pack("<Q", digest(bytes(changed[at : at + CHECKSUM])))
    return bytes(changed)


def patched(at: int, form: str, *values: int, seal: tuple[int, ...]) -> bytes:
    image = bytearray(IMAGE)
    for offset in {at} if at >= SUPERBLOCKS else {at, at % BLOCK, at % BLOCK + BLOCK}:
        struct.pack_into(form, image, offset, *values)
    return sealed(image, *seal)


BOTH = (0, BLOCK)


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        (b"", "too few for a snapshot store"),
        (IMAGE[:5000], "too few for a snapshot store"),
        (IMAGE[:8192], r"has 8192 bytes, and the store in it \d+.*migrate"),
        (IMAGE[:-BLOCK], "cut off or not copied whole"),
        (IMAGE + bytes(BLOCK), "cut off or not copied whole"),
        (bytes(len(IMAGE)), "no snapshot store.*another magic"),
        (b"\x7fELF" * (len(IMAGE) // 4), "no snapshot store"),
        (patched(8, "<I", 2, seal=BOTH), "version 2 of the format.*to migrate"),
        (patched(8, "<I", 2, seal=()), "version 2 of the format.*to migrate"),
        (patched(100, "<I", 1 << 31, seal=()), "damaged: superblock A does not count: its checksum is wrong"),
        (patched(80, "<I", 0, seal=BOTH), "2 to 128 slots"),
        (patched(80, "<I", 2**32 - 1, seal=BOTH), "2 to 128 slots"),
        (patched(56, "<Q", 2**64 - BLOCK, seal=BOTH), "an exbibyte"),
        (patched(64, "<Q", 0, seal=BOTH), "multiples of 4096"),
        (patched(64, "<Q", 1 << 62, seal=BOTH), "multiples of 4096"),
        (patched(48, "<Q", 1, seal=BOTH), "do not lie where they belong"),
        (patched(88, "<I", 8, seal=BOTH), r"features that this release does not know \(bits 8\).*to migrate"),
        (
            patched(88, "<I", 3, seal=BOTH),
            "an older release, whose digests of contents are other ones.*to migrate",
        ),
        (patched(EPOCH, "<Q", 2**64 - 1, seal=BOTH), "counters are out of range"),
        (patched(LATEST, "<Q", 2**63, seal=BOTH), "counters are out of range"),
        (patched(SLOT_OF_LATEST, "<Q", 2**40, seal=BOTH), "its latest snapshot is in no slot"),
        (patched(REGISTERED + 16 * 3, "<Q", 99, seal=BOTH), "never taken"),
        (patched(REGISTERED + 16 * 99, "<Q", 1, seal=BOTH), "never taken"),
    ],
)
def test_what_is_not_a_store_of_ours_is_refused_with_a_sentence_and_not_changed(
    image: bytes, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "store"
    path.write_bytes(image)
    for writable in (True, False):
        with pytest.raises(StoreError, match=sentence):
            Store.open(path, writable=writable)
    assert path.read_bytes() == image


HEADER = SUPERBLOCKS  # of slot 0
PAYLOAD_BYTES, CHUNK_BYTES, EXTENTS, CHUNKS, TABLES_DIGEST, JOB_BYTES = 72, 80, 88, 96, 104, 112


@pytest.mark.parametrize("value", [2**64 - 1, 2**63, 2**40, 2**32, SLOT_BYTES + 1])
@pytest.mark.parametrize("field", [PAYLOAD_BYTES, CHUNK_BYTES, EXTENTS, CHUNKS])
def test_a_header_that_claims_more_than_its_slot_holds_does_not_count(field: int, value: int) -> None:
    found = look(patched(HEADER + field, "<Q", value, seal=(HEADER,)))
    assert found == {1: found[1], 2: "whole", 3: "whole"}
    assert "slot 0 has no header of it" in found[1]


def test_a_header_with_a_job_name_too_long_or_of_another_slot_does_not_count() -> None:
    for image in (
        patched(HEADER + JOB_BYTES, "<I", 257, seal=(HEADER,)),
        patched(HEADER + 12, "<I", 1, seal=(HEADER,)),
        patched(HEADER + 16, "<Q", 1, seal=(HEADER,)),
        IMAGE[:HEADER] + IMAGE[HEADER + STRIDE :][:BLOCK] + IMAGE[HEADER + BLOCK :],
    ):
        assert "slot 0 has no header of it" in look(image)[1]


def test_extents_outside_the_payload_are_refused_though_all_checksums_are_right() -> None:
    tables = HEADER + BLOCK + 4 * BLOCK
    size = 4 * ROW
    for row, column, value in [
        (0, 24, 2**64 - 64),
        (0, 16, 2**64 - 1),
        (3, 24, 1 << 40),
        (1, 24, 0),
        (3, 16, 6001),
    ]:
        image = bytearray(IMAGE)
        struct.pack_into("<Q", image, tables + ROW * row + column, value)
        struct.pack_into("<Q", image, HEADER + TABLES_DIGEST, digest(bytes(image[tables : tables + size])))
        assert "an extent lies outside its payload" in look(sealed(image, HEADER))[1]


def try_mutations(seed: int, rounds: int) -> None:
    """Anything may be refused; nothing may crash, and nothing may be larger than the slots are."""
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    places = [0, BLOCK, *(SUPERBLOCKS + slot * STRIDE for slot in range(SLOTS))]
    for _ in range(rounds):
        image = bytearray(IMAGE)
        for _ in range(rng.randrange(1, 6)):
            at = rng.choice(places) + 8 * rng.randrange(40)
            value = rng.choice([0, 1, BLOCK, 2**31, 2**32 - 1, 2**63, 2**64 - 1, rng.getrandbits(64)])
            if rng.random() < 0.3:
                at = rng.randrange(len(image) - 8)
            struct.pack_into("<Q", image, at, value)
        changed = sealed(image, *(at for at in places if rng.random() < 0.9))
        if rng.random() < 0.1:
            changed = changed[: rng.randrange(len(changed))]
        try:
            with Store.open_on(RecordedDisk(changed), writable=bool(rng.getrandbits(1))) as store:
                for entry in store.snapshots():
                    outcomes["listed"] += 1
                    try:
                        store.verify(entry.sequence)
                        for index, (_, _, size) in enumerate(store.extents(entry.sequence)):
                            assert size <= SLOT_BYTES
                            store.read(entry.sequence, index, bytearray(size))
                        outcomes["read"] += 1
                    except StoreError:
                        outcomes["found damaged"] += 1
        except StoreError:
            outcomes["refused"] += 1
    print(f"{rounds} hostile stores: {dict(outcomes)}")
    assert outcomes["read"] and outcomes["found damaged"] and outcomes["refused"]


def test_a_hostile_store_crashes_nothing(seed: int) -> None:
    try_mutations(seed, 2000)


@pytest.mark.long
def test_many_more_hostile_stores_crash_nothing(seed: int) -> None:
    try_mutations(seed, 50_000)
