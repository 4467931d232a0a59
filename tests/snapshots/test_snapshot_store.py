"""The snapshot store as its callers see it, on files."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from kept_snapshots import BLOCK, BUFFER, CLIENT, GENERATOR, LOG, MANIFEST, content_of, keep

from understudy.recovery.snapshots import Receipt, Store, StoreError, StoreFull


def all_content_of(store: Store, sequence: int) -> list[bytes]:
    into = [bytearray(size) for _, _, size in store.extents(sequence)]
    store.read_all(sequence, into)
    return [bytes(content) for content in into]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "snapshots"


def new_store(path: Path, slots: int = 3, slot_bytes: int = 16 * BLOCK, **options: Any) -> Store:
    Store.create(path, slots=slots, slot_bytes=slot_bytes, chunk_bytes=2 * BLOCK)
    return Store.open(path, **options)


def test_any_bytes_come_back_as_they_were(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    Store.create(path, slots=2, slot_bytes=1 << 20, chunk_bytes=3 * BLOCK)
    with Store.open(path, pool_bytes=9 * BLOCK) as store:
        for serial in range(1, 30):
            sizes = [0, 1, 63, 64, 4095, 4096, 4097, 3 * BLOCK, rng.randrange(60_000)]
            contents = [rng.randbytes(rng.choice(sizes)) for _ in range(8)]
            receipt = keep(store, serial, *contents, threads=rng.randrange(1, 5))
            assert receipt.registered and receipt.sequence == serial
            assert content_of(store, serial) == contents
            assert all_content_of(store, serial) == contents
            assert store.verify(serial) == []
            store.release_before(serial)


def test_kinds_ids_and_sizes_of_extents_come_back_in_their_order(path: Path) -> None:
    extents = [(LOG, 2**64 - 1, b"log"), (MANIFEST, 0, b""), (GENERATOR, 7, b"x" * 5000), (CLIENT, 7, b"c")]
    with new_store(path) as store:
        receipt = keep(store, 1, extents=extents)
        described = [(kind, number, len(data)) for kind, number, data in extents]
        assert store.extents(receipt.sequence) == described
        assert content_of(store, receipt.sequence) == [data for _, _, data in extents]


def test_a_snapshot_of_nothing_is_a_snapshot(path: Path) -> None:
    with new_store(path) as store:
        for extents in ([], [(BUFFER, 1, b"")]):
            receipt = keep(store, 1, extents=extents)
            assert store.verify(receipt.sequence) == []
            assert store.extents(receipt.sequence) == [(kind, number, 0) for kind, number, _ in extents]


def test_many_extents_of_a_few_bytes_each(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    contents = [rng.randbytes(rng.randrange(100)) for _ in range(5000)]
    slot_bytes = Store.needed_slot_bytes([len(content) for content in contents], chunk_bytes=2 * BLOCK)
    with new_store(path, slot_bytes=slot_bytes) as store:
        keep(store, 1, *contents)
        assert store.slot_bytes == slot_bytes
        for index in rng.sample(range(5000), 100):
            into = bytearray(len(contents[index]))
            store.read(1, index, into)
            assert into == contents[index]


def test_all_extents_are_read_at_once_only_into_as_many_buffers_of_their_sizes(path: Path) -> None:
    with new_store(path) as store:
        keep(store, 1, b"a" * 100, b"", b"b" * BLOCK)
        with pytest.raises(StoreError, match="has 3 extents, not 2"):
            store.read_all(1, [bytearray(100), bytearray()])
        with pytest.raises(StoreError, match="extent 2 of snapshot 1 has 4096 bytes, and the buffer 100"):
            store.read_all(1, [bytearray(100), bytearray(), bytearray(100)])
        with pytest.raises(BufferError):
            store.read_all(1, [bytes(100), bytearray(), bytearray(BLOCK)])  # type: ignore[list-item]
        with pytest.raises(StoreError, match="there is no snapshot 2"):
            store.read_all(2, [])


def test_a_payload_is_read_part_by_part_as_it_lies_there(path: Path, seed: int) -> None:
    chance = random.Random(seed)
    contents = [chance.randbytes(count) for count in (1, 70, 3 * BLOCK, 0, 500)]
    with new_store(path) as store:
        keep(store, 1, *contents)
        (entry,), layout = store.snapshots(), store.layout(1)
        payload = bytearray(entry.bytes)
        for (_, _, count, offset), content in zip(layout, contents, strict=True):
            assert count == len(content) and offset % 64 == 0
            payload[offset : offset + count] = content
        for _ in range(50):
            stream, end = store.stream(1), 0
            while end < entry.bytes:
                begin, end = end, chance.randrange(end, entry.bytes + 1)
                into = bytearray(end - begin)
                stream.read_into(into)
                assert into == payload[begin:end]
        with pytest.raises(StoreError, match="bytes of payload, and no more"):
            stream.read_into(bytearray(1))


def test_a_payload_that_is_damaged_is_told_of_before_all_of_it_was_read(path: Path) -> None:
    with new_store(path) as store:
        keep(store, 1, b"a" * 100, b"b" * 3 * BLOCK, b"c")
    content = bytearray(path.read_bytes())
    content[content.index(b"bbbb")] ^= 1
    path.write_bytes(content)
    with Store.open(path) as store:
        stream, left = store.stream(1), store.snapshots()[0].bytes
        stream.read_into(bytearray(BLOCK))
        with pytest.raises(StoreError, match=r"extent 1 \(kind 1, id 1\) is not what it was when its digest"):
            stream.read_into(bytearray(left - BLOCK))


def test_nothing_is_read_at_once_from_a_snapshot_with_a_damaged_extent(path: Path) -> None:
    with new_store(path) as store:
        keep(store, 1, b"a" * 100, b"b" * 3 * BLOCK)
    content = bytearray(path.read_bytes())
    content[content.index(b"bbbb")] ^= 1
    path.write_bytes(content)
    with Store.open(path) as store, pytest.raises(StoreError, match=r"extent 1 \(kind 1, id 1\) is not what"):
        all_content_of(store, 1)


def test_needed_slot_bytes_are_enough_and_one_block_less_is_not(path: Path) -> None:
    sizes = [1, 100, 3 * BLOCK]
    contents = [os.urandom(size) for size in sizes]
    needed = Store.needed_slot_bytes(sizes, chunk_bytes=2 * BLOCK)
    with new_store(path, slot_bytes=needed) as store:
        keep(store, 1, *contents)
    with (
        new_store(path.with_name("smaller"), slot_bytes=needed - BLOCK) as store,
        pytest.raises(StoreError, match="does not fit a slot"),
    ):
        keep(store, 1, *contents)


@pytest.mark.parametrize("job", ["", "a", "ü" * 127, "x" * 255, "/../\0\n"])
def test_a_job_may_have_any_name_of_up_to_255_bytes(path: Path, job: str) -> None:
    with new_store(path) as store:
        keep(store, 3, b"content", job=job, rank=5, world=8, step=99)
        [entry] = store.snapshots()
        assert (entry.job, entry.rank, entry.world, entry.step, entry.serial) == (job, 5, 8, 99, 3)
        assert entry.valid_header and entry.sequence == 1 and entry.bytes == 7 and entry.time_ns > 0


def test_requests_that_make_no_sense_are_refused_with_a_sentence(path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"job": "x" * 256}, "at most 255 bytes"),
        ({"rank": 2, "world": 2}, "no rank 2 in a world of 2"),
        ({"threads": 0}, "1 to 256 threads"),
        ({"extents": [(7, 0, b"")]}, "no kind 7"),
        ({"extents": [(BUFFER, 0, bytes(17 * BLOCK))]}, "does not fit a slot"),
        ({"timeout_s": float("nan")}, "a number of seconds"),
    ]
    with new_store(path) as store:
        for changes, match in refused:
            with pytest.raises(StoreError, match=match):
                keep(store, 1, b"content", **changes)
        with pytest.raises(BufferError):
            keep(store, 1, extents=[(BUFFER, 0, memoryview(b"12345678")[::2])])
        assert store.free_slots == 3 and store.snapshots() == []


def test_what_is_kept_and_the_floor_are_the_same_after_a_reopening(path: Path) -> None:
    with new_store(path) as store:
        for serial in range(1, 8):
            keep(store, serial, b"%d" % serial)
            store.release_before(serial)
        assert [entry.serial for entry in store.snapshots()] == [7]
        assert store.free_slots == 2 and store.floor == 7
        epoch = store.epoch
    with Store.open(path) as store:
        assert (store.epoch, store.floor, store.free_slots) == (epoch, 7, 2)
        assert content_of(store, store.snapshots()[0].sequence) == [b"7"]
        assert keep(store, 8, b"8").sequence == 8


def test_snapshots_stay_until_they_are_released(path: Path) -> None:
    with new_store(path, slots=4) as store:
        for serial in (1, 2, 3):
            keep(store, serial, b"%d" % serial)
        assert [entry.serial for entry in store.snapshots()] == [3, 2, 1]
        store.release_before(2)
        assert [entry.serial for entry in store.snapshots()] == [3, 2]
        store.release_before(1)  # a late message: nothing happens
        assert store.floor == 2 and store.free_slots == 2
        with pytest.raises(StoreError, match="below the floor"):
            keep(store, 1, b"1")
        store.release_before(1000)
        assert [entry.serial for entry in store.snapshots()] == [3], "the newest is never dropped"


@pytest.mark.parametrize("order", list(permutations((1, 2, 3))))
def test_the_newest_has_the_largest_serial_in_whatever_order_they_asked(
    path: Path, order: tuple[int, ...]
) -> None:
    with new_store(path, slots=4) as store:
        for serial in order:
            assert keep(store, serial, b"%d" % serial).registered
        assert [entry.serial for entry in store.snapshots()] == [3, 2, 1]
        store.release_before(2)
        assert [entry.serial for entry in store.snapshots()] == [3, 2]
        store.release_before(3)
        assert [entry.serial for entry in store.snapshots()] == [3] and store.free_slots == 3
        store.release_before(1000)
        assert [entry.serial for entry in store.snapshots()] == [3]
    with Store.open(path) as store:
        assert [entry.serial for entry in store.snapshots()] == [3] and store.free_slots == 3
        assert content_of(store, store.snapshots()[0].sequence) == [b"3"]
        assert keep(store, 1000, b"1000").sequence == 4, "no sequence is used again"
        assert [entry.serial for entry in store.snapshots()] == [1000]


def test_of_one_serial_the_last_that_asked_is_the_newest(path: Path) -> None:
    with new_store(path) as store:
        keep(store, 1, b"first")
        keep(store, 1, b"second")
        store.release_before(2)
        assert [content_of(store, entry.sequence) for entry in store.snapshots()] == [[b"second"]]


def test_a_snapshot_that_ends_below_the_floor_is_dropped_and_its_slot_is_free(path: Path) -> None:
    with new_store(path) as store:

        def release() -> bool:
            keep(store, 2, b"newer")
            store.release_before(2)
            return True

        assert not keep(store, 1, b"older", confirm=release).registered
        assert [entry.serial for entry in store.snapshots()] == [2] and store.free_slots == 2


def test_a_full_store_says_so_after_the_time_it_was_given(path: Path) -> None:
    with new_store(path, slots=2) as store:
        keep(store, 1, b"1")
        keep(store, 2, b"2")
        with pytest.raises(StoreFull, match=r"no slot of .* became free in time: 2 slots"):
            keep(store, 3, b"3", timeout_s=0)
        assert [content_of(store, entry.sequence) for entry in store.snapshots()] == [[b"2"], [b"1"]]


def test_a_release_lets_a_waiting_snapshot_go_on(path: Path) -> None:
    with new_store(path, slots=2) as store:
        keep(store, 1, b"1")
        keep(store, 2, b"2")
        receipts = []
        waiting = threading.Thread(target=lambda: receipts.append(keep(store, 3, b"3", timeout_s=60)))
        waiting.start()
        store.release_before(2)
        waiting.join()
        assert receipts[0].registered
        assert [entry.serial for entry in store.snapshots()] == [3, 2]


def test_closing_waits_for_what_is_under_way_and_ends_what_waits(path: Path) -> None:
    store = new_store(path, slots=2)
    keep(store, 1, b"1")
    keep(store, 2, b"2")
    errors = []

    def wait_for_a_slot() -> None:
        try:
            keep(store, 3, b"3", timeout_s=60)
        except StoreError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=wait_for_a_slot)
    waiting.start()
    store.close()
    waiting.join()
    assert errors == ["the store is closed"]
    store.close()
    for call in (store.snapshots, lambda: store.verify(1), lambda: keep(store, 4, b"4")):
        with pytest.raises(StoreError, match="the store is closed"):
            call()


def test_snapshots_in_many_threads_leave_the_newest(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    contents = {serial: rng.randbytes(rng.randrange(14 * BLOCK)) for serial in range(1, 41)}
    receipts: dict[int, Receipt] = {}
    with new_store(path, slots=4, pool_bytes=6 * BLOCK) as store:

        def persist(serials: list[int]) -> None:
            for serial in serials:
                try:
                    receipts[serial] = keep(store, serial, contents[serial], threads=2)
                except StoreError as error:
                    assert "below the floor" in str(error)
                store.release_before(serial)

        threads = [threading.Thread(target=persist, args=(list(range(1 + i, 41, 3)),)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        [entry] = store.snapshots()
        assert receipts[40].registered and (entry.serial, entry.sequence) == (40, receipts[40].sequence)
        assert content_of(store, entry.sequence) == [contents[40]]
        assert store.free_slots == 3


def test_two_writers_of_a_store_are_refused_and_readers_are_not(path: Path) -> None:
    with new_store(path) as store:
        keep(store, 1, b"1")
        with pytest.raises(StoreError, match="being written by another"):
            Store.open(path)
        with Store.open(path, writable=False) as reader:
            keep(store, 2, b"2")
            store.release_before(2)
            assert [content_of(reader, entry.sequence) for entry in reader.snapshots()] == [[b"2"]]
            assert reader.free_slots == 2
            for write in (lambda: keep(reader, 3, b"3"), lambda: reader.release_before(3)):
                with pytest.raises(StoreError, match="opened for reading only"):
                    write()
    with Store.open(path):
        pass


# Another process that lists and reads; all that it gets must be one byte, repeated.
READER = """
import sys
from understudy.recovery.snapshots import Store, StoreError
wrong = right = refused = 0
with Store.open(sys.argv[1], writable=False) as reader:
    print("open", flush=True)
    for _ in range(300):
        for entry in reader.snapshots():
            try:
                [(_, _, size)] = reader.extents(entry.sequence)
                into = bytearray(size)
                reader.read(entry.sequence, 0, into)
                wrong += into != bytes([entry.sequence % 256]) * size
                right += 1
            except StoreError:
                refused += 1
print(wrong, right, refused)
"""


def test_a_reader_beside_a_writer_never_sees_wrong_bytes(path: Path) -> None:
    with new_store(path, slots=2) as store:
        sequence = keep(store, 1, b"\1" * 50_000).sequence
        command = [sys.executable, "-P", "-c", READER, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout and process.stdout.readline() == "open\n"
            while process.poll() is None:
                sequence = keep(store, sequence + 1, bytes([(sequence + 1) % 256]) * 50_000).sequence
                store.release_before(sequence)
            wrong, right, refused = map(int, process.stdout.read().split())
    print(f"{sequence} snapshots written, {right} read, {refused} gone before they were read")
    assert wrong == 0 and right > 0


def test_a_file_that_exists_is_not_made_anew(path: Path) -> None:
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        Store.create(path, slots=2, slot_bytes=BLOCK)
    assert path.read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ({"slots": 1, "slot_bytes": BLOCK}, "2 to 128 slots"),
        ({"slots": 129, "slot_bytes": BLOCK}, "2 to 128 slots"),
        ({"slots": 2, "slot_bytes": 0}, "at least 4096 bytes"),
        ({"slots": 2, "slot_bytes": 1 << 62}, "so large"),
        ({"slots": 2, "slot_bytes": BLOCK, "chunk_bytes": 5000}, "multiples of 4096"),
        ({"slots": 2, "slot_bytes": 1 << 40, "chunk_bytes": BLOCK}, "larger chunks"),
    ],
)
def test_sizes_that_no_store_can_have_are_refused(path: Path, sizes: dict[str, Any], match: str) -> None:
    with pytest.raises(StoreError, match=match):
        Store.create(path, **sizes)
    assert not path.exists()


def test_a_store_belongs_to_its_owner_and_has_all_its_blocks(path: Path) -> None:
    Store.create(path, slots=2, slot_bytes=100 * BLOCK)
    found = path.stat()
    assert found.st_mode & 0o777 == 0o600
    assert found.st_blocks * 512 >= found.st_size == 2 * BLOCK + 2 * 101 * BLOCK


def test_a_pool_smaller_than_a_chunk_is_refused(path: Path) -> None:
    Store.create(path, slots=2, slot_bytes=BLOCK, chunk_bytes=4 << 20)
    with pytest.raises(StoreError, match="raise pool_bytes"):
        Store.open(path, pool_bytes=1 << 20)
    with pytest.raises(StoreError, match='no engine "tape"'):
        Store.open(path, engine="tape")


def test_what_will_never_be_complete_is_discarded_and_its_slot_is_free_at_once(path: Path) -> None:
    with new_store(path, slots=4) as store:
        for serial in (1, 2, 3):
            keep(store, serial, b"content")
            store.release_before(1)
        free = store.free_slots
        store.discard(3)
        assert store.free_slots == free + 1
        assert [entry.serial for entry in store.snapshots()] == [2, 1]
        store.discard(3)  # nothing is left of it
        keep(store, 4, b"content")
        store.discard(1)
    with Store.open(path) as store:
        assert [entry.serial for entry in store.snapshots()] == [4, 2]
        store.discard(2)
        store.discard(4)
        assert store.snapshots() == []
        keep(store, 5, b"content")
    with Store.open(path, writable=False) as store:
        assert [entry.serial for entry in store.snapshots()] == [5]


def test_a_source_that_went_while_it_was_copied_leaves_nothing_in_the_store(path: Path) -> None:
    with new_store(path) as store:
        keep(store, 1, b"content")
        asked: list[int] = []

        def gone() -> bool:
            asked.append(store.free_slots)
            return False

        with pytest.raises(StoreError, match="given up"):
            keep(store, 2, b"content", confirm=gone)
        with pytest.raises(ZeroDivisionError):
            keep(store, 2, b"content", confirm=lambda: bool(1 // 0))
        assert [entry.serial for entry in store.snapshots()] == [1]
        assert store.free_slots == asked[0] + 1
        keep(store, 3, b"content", confirm=lambda: True)
        assert store.snapshots()[0].serial == 3


def test_what_was_discarded_stays_so_though_its_header_is_the_newest(path: Path) -> None:
    with new_store(path, slots=4) as store:
        for serial in (1, 2):
            keep(store, serial, b"content")
        store.discard(2)
    for _ in range(2):
        with Store.open(path) as store:
            assert [entry.serial for entry in store.snapshots()] == [1]
            assert store.free_slots == 3
