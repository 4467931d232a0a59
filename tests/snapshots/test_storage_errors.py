"""A storage that fails at any operation: the snapshot fails, the store goes on."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import pytest
from disk_images import BLOCK, CHUNK

from understudy.recovery.snapshots import Receipt, StoreError
from understudy.recovery.snapshots._store import RecordedDisk, Store

SLOTS = 3
SLOT_BYTES = 6 * BLOCK
CONTENTS = {serial: random.Random(serial).randbytes(1000 * serial + 8000) for serial in range(1, 10)}


def new_disk() -> RecordedDisk:
    disk = RecordedDisk(bytes(2 * BLOCK + SLOTS * (BLOCK + SLOT_BYTES)))
    Store.create_on(disk, slots=SLOTS, slot_bytes=SLOT_BYTES, chunk_bytes=CHUNK)
    return RecordedDisk(disk.content())


def keep(store: Store, serial: int, threads: int = 1) -> Receipt:
    extents = [(1, 0, CONTENTS[serial]), (2, 1, b"state")]
    return store.persist(
        job="job", rank=0, world=1, step=0, serial=serial, extents=extents, threads=threads, timeout_s=0
    )


class Run:
    """Snapshots 1 to 4 and what a caller who goes on after an error sees."""

    def __init__(self, disk: RecordedDisk, threads: int) -> None:
        self.disk = disk
        self.threads = threads
        self.errors: list[OSError] = []
        self.kept: dict[int, int] = {}  # serial: sequence
        self.floor = 0

    def attempt(self, call: Callable[[Store, int], None], store: Store, serial: int) -> None:
        try:
            call(store, serial)
        except OSError as error:
            self.errors.append(error)

    def run(self) -> None:
        store = None
        while store is None:
            try:
                store = Store.open_on(self.disk, pool_bytes=3 * CHUNK)
            except OSError as error:
                self.errors.append(error)
                if len(self.errors) > 2:
                    return
        with store:
            for serial in range(1, 5):
                self.attempt(self.persist, store, serial)
                if serial in self.kept:
                    self.attempt(self.release, store, serial)
                self.check(store)

    def persist(self, store: Store, serial: int) -> None:
        self.kept[serial] = keep(store, serial, self.threads).sequence

    def release(self, store: Store, serial: int) -> None:
        self.floor = serial  # even if that fails, it may be what lies on the disk
        store.release_before(serial)

    def check(self, store: Store) -> None:
        """What was kept is there, and no slot is lost, whatever failed."""
        for serial in [serial for serial in self.kept if serial >= self.floor]:
            for attempt in (1, 2):  # a read may be what fails
                try:
                    assert serial in [entry.serial for entry in store.snapshots()]
                    assert store.verify(self.kept[serial]) == []
                    into = bytearray(len(CONTENTS[serial]))
                    store.read(self.kept[serial], 0, into)
                    assert into == CONTENTS[serial]
                    break
                except (OSError, StoreError, AssertionError):
                    if attempt == 2:
                        raise


@pytest.mark.parametrize("threads", [1, 2])
def test_one_failure_at_any_operation_costs_at_most_one_snapshot(threads: int) -> None:
    whole = Run(new_disk(), threads)
    whole.run()
    assert whole.errors == [] and len(whole.kept) == 4
    operations = whole.disk.operations
    for operation in range(operations):
        for error in (errno.ENOSPC, errno.EIO, errno.EROFS):
            disk = new_disk()
            disk.fail(operation, error)
            run = Run(disk, threads)
            run.run()
            assert [failed.errno for failed in run.errors] in ([], [error]), operation
            assert len(run.kept) >= 4 - len(run.errors)
            with Store.open_on(disk) as store:
                run.check(store)
                store.release_before(4)
                assert keep(store, 5).registered
                assert store.free_slots + len(store.snapshots()) == SLOTS, "a slot was lost"
    print(f"{operations} operations, each with three errors")


def test_a_storage_that_dies_at_any_operation_and_comes_back_has_lost_nothing() -> None:
    whole = Run(new_disk(), 1)
    whole.run()
    for operation in range(whole.disk.operations):
        disk = new_disk()
        with Store.open_on(disk, pool_bytes=3 * CHUNK) as store:
            start = disk.operations
            run = Run(disk, 1)
            disk.fail(start + operation, errno.EIO, forever=True)
            for serial in range(1, 5):
                run.attempt(run.persist, store, serial)
                if serial in run.kept:
                    run.attempt(run.release, store, serial)
            disk.fail(2**63, 0)
            run.check(store)
            assert keep(store, 5).registered
            store.release_before(5)
            assert store.free_slots + len(store.snapshots()) == SLOTS, "a slot was lost"
        with Store.open_on(disk, writable=False) as store:
            assert store.snapshots()[0].serial == 5
            assert store.verify(store.snapshots()[0].sequence) == []


def test_a_failed_snapshot_names_the_error_and_leaves_no_trace() -> None:
    disk = new_disk()
    with Store.open_on(disk) as store:
        keep(store, 1)
        disk.fail(disk.operations + 1, errno.ENOSPC)
        with pytest.raises(OSError, match="the recorded disk fails") as failed:
            keep(store, 2)
        assert failed.value.errno == errno.ENOSPC
        assert [entry.serial for entry in store.snapshots()] == [1]
        assert store.free_slots == 2
