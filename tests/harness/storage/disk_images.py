"""What a disk may hold after a crash, from the log of a RecordedDisk; workloads that it must keep."""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, combinations

from area_contents import in_area

from understudy.recovery.snapshots import Contents, StoreError
from understudy.recovery.snapshots._store import RecordedDisk, Store
from understudy.replay import digest

BLOCK = 4096
SECTOR = 512
CHUNK = BLOCK
INCOMPATIBLE = 88  # offset of the feature bits in a superblock

Event = tuple[str, int, int, int, bytes]


@dataclass
class Write:
    number: int
    offset: int
    data: bytes
    done: bool = False
    lost: bool = False  # a sync failed after it was done: no later one makes it durable


@dataclass
class Disk:
    """The durable content after some events, and the writes that may or may not have reached the disk."""

    content: bytearray
    pending: list[Write] = field(default_factory=list)
    durable: list[Write] = field(default_factory=list)  # those that are younger than a pending one
    syncs: dict[int, list[Write]] = field(default_factory=dict)  # what each that has begun would make durable

    def apply(self, event: Event) -> None:
        what, number, offset, size, data = event
        if what == "write":
            self.pending.append(Write(number, offset, data))
        elif what == "done":
            next(write for write in self.pending if write.number == number).done = True
        elif what == "sync":
            inside = (w for w in self.pending if w.done and offset <= w.offset)
            self.syncs[number] = [w for w in inside if w.offset + len(w.data) <= offset + size]
        elif what == "sync-failed":
            self.syncs.pop(number)
            for write in self.pending:
                write.lost = write.lost or write.done
        elif what == "synced":
            for write in self.syncs.pop(number):
                if not write.lost:
                    self.pending.remove(write)
                    self.durable.append(write)
                    self.content[write.offset : write.offset + len(write.data)] = write.data
            oldest = min((write.number for write in self.pending), default=number)
            self.durable = [write for write in self.durable if write.number > oldest]

    def image(self, chosen: list[Write], rng: random.Random, torn: float) -> bytes:
        """With some of the pending writes; a part of these is torn: only some of its sectors were written."""
        image = bytearray(self.content)
        for write in chosen:
            data = memoryview(write.data)
            pieces = [(0, len(data))]
            if rng.random() < torn:
                sectors = range(0, len(data), SECTOR)
                pieces = [(at, at + SECTOR) for at in rng.sample(sectors, rng.randrange(len(sectors) + 1))]
            for begin, end in pieces:
                image[write.offset + begin : write.offset + end] = data[begin:end]
        for write in self.durable:  # never older than what is on the disk already
            if chosen and write.number > chosen[0].number:
                image[write.offset : write.offset + len(write.data)] = write.data
        return bytes(image)


def images(
    log: list[Event], start: bytes, rng: random.Random, at_each: int, exhaustive: int
) -> Iterator[tuple[bytes, int]]:
    """(image, marks seen before it) for crashes at every event.

    `at_each`: random images at each event. `exhaustive`: just before a sync ends, which is when most is
    pending, all subsets of up to so many writes; and once more with some of them torn.
    """
    disk = Disk(bytearray(start))
    marks = 0
    for event in [*log, ("end", 0, 0, 0, b"")]:
        if event[0] == "mark":
            marks += 1
        if event[0] in ("synced", "end") and len(disk.pending) <= exhaustive:
            sizes = range(len(disk.pending) + 1)
            for subset in chain.from_iterable(combinations(disk.pending, size) for size in sizes):
                yield disk.image(list(subset), rng, 0), marks
                yield disk.image(list(subset), rng, 0.5), marks
        for _ in range(at_each):
            share = rng.random()
            chosen = [write for write in disk.pending if rng.random() < share]
            yield disk.image(chosen, rng, rng.choice([0, 0.2, 1])), marks
        disk.apply(event)


def as_of_an_older_release(store: bytes) -> bytes:
    """A new store whose superblocks do not say that newer headers count."""
    content = bytearray(store)
    for at in (0, BLOCK):
        struct.pack_into("<I", content, at + INCOMPATIBLE, 0)
        checksum = digest(bytes(content[at : at + BLOCK - 8]))
        struct.pack_into("<Q", content, at + BLOCK - 8, checksum)
    return bytes(content)


# ---------------------------------------------------------------- workloads
@dataclass
class Promise:
    """persist() has returned, or release_before() is about to be called."""

    floor: int = 0
    sequence: int = 0
    serial: int = 0
    registered: bool = False


@dataclass
class Workload:
    """Snapshots in several threads; `promises[i]` was made at mark i of the disk."""

    rng: random.Random
    slots: int
    slot_bytes: int = 6 * BLOCK
    kind: str = (
        ""  # "ranges": syncs are of ranges, as of a mapped file; "old": of a release without newer headers;
        # "area": written from an area in host memory, with digests that were taken there
    )
    contents: dict[int, list[bytes]] = field(default_factory=dict)  # by serial
    serials: list[int] = field(default_factory=list)  # the next ones
    promises: list[Promise] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    failures: list[OSError] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.kind == "area":
            self.slot_bytes = 10 * BLOCK  # each content may take a page more at either end

    def empty_disk(self) -> RecordedDisk:
        disk = RecordedDisk(bytes(2 * BLOCK + self.slots * (BLOCK + self.slot_bytes)))
        Store.create_on(disk, slots=self.slots, slot_bytes=self.slot_bytes, chunk_bytes=CHUNK)
        content = disk.content()
        return self.disk(as_of_an_older_release(content) if self.kind == "old" else content)

    def disk(self, content: bytes) -> RecordedDisk:
        return RecordedDisk(content, ranges=self.kind == "ranges")

    def promise(self, disk: RecordedDisk, made: Promise) -> None:
        with self.lock:
            disk.mark(len(self.promises))
            self.promises.append(made)

    def new_content(self) -> tuple[int, list[bytes]]:
        """Now and then an older snapshot asks after a newer one."""
        with self.lock:
            if not self.serials:
                first = len(self.contents) + 1
                self.serials = self.rng.choice([[first], [first + 1, first]])
            serial = self.serials.pop(0)
            left = 5 * BLOCK - 512
            sizes = [self.rng.randrange(left // 3) for _ in range(self.rng.randrange(4))]
            self.contents[serial] = [self.rng.randbytes(size) for size in sizes]
            return serial, self.contents[serial]

    def persist(self, store: Store, disk: RecordedDisk) -> None:
        serial, content = self.new_content()
        extents: Contents | list[tuple[int, int, bytes]]
        if self.kind == "area":
            with self.lock:
                extents = in_area(content, self.rng).contents(in_place=serial % 3 != 0)
        else:
            extents = [(1, number, data) for number, data in enumerate(content)]
        try:
            receipt = store.persist(
                job="job",
                rank=0,
                world=1,
                step=serial,
                serial=serial,
                extents=extents,
                threads=1 + serial % 2,
                timeout_s=30,
            )
        except OSError as error:
            self.failures.append(error)
            return
        except StoreError as error:
            if "below the floor" not in str(error):
                raise
            return
        self.promise(disk, Promise(0, receipt.sequence, serial, receipt.registered))

    def release(self, store: Store, disk: RecordedDisk) -> None:
        """At most two snapshots stay, so that there is always a slot to go on with."""
        with self.lock:
            floor = max((p.floor for p in self.promises), default=0)
            kept = sorted(p.serial for p in self.promises if p.registered and p.serial >= floor)
            if len(kept) < 2 or (len(kept) == 2 and self.rng.random() < 0.5):
                return
            released = self.rng.choice(kept[-2:])
        self.promise(disk, Promise(floor=released))
        try:
            store.release_before(released)
        except OSError as error:
            self.failures.append(error)
            store.release_before(released)  # else there would soon be no slot to go on with

    def run(self, disk: RecordedDisk, in_flight: int, rounds: int) -> None:
        store = Store.open_on(disk, pool_bytes=4 * CHUNK)
        errors: list[BaseException] = []
        if self.promises:  # what a crash may have kept from happening
            store.release_before(max((p.floor for p in self.promises), default=0))
            self.release(store, disk)

        def some() -> None:
            try:
                for _ in range(rounds):
                    self.persist(store, disk)
                    self.release(store, disk)
            except StoreError as error:
                errors.append(error)

        threads = [threading.Thread(target=some) for _ in range(in_flight)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.close()
        if errors:
            raise errors[0]

    def violation(self, image: bytes, marks: int) -> str:
        """Empty if a store that is opened from `image` keeps the first `marks` promises."""
        promises = self.promises[:marks]
        floor = max((p.floor for p in promises), default=0)
        newest = max((p.serial for p in promises if p.registered), default=0)
        try:
            with Store.open_on(RecordedDisk(image), writable=False) as store:
                found = {}
                for entry in store.snapshots():
                    if not entry.valid_header:
                        return f"the header of {entry} is damaged"
                    if damaged := store.verify(entry.sequence):
                        return f"chunks {damaged} of {entry} are damaged"
                    contents = self.contents[entry.serial]
                    for index, (_, number, size) in enumerate(store.extents(entry.sequence)):
                        into = bytearray(size)
                        store.read(entry.sequence, index, into)
                        if into != contents[number]:
                            return f"extent {index} of {entry} is another one"
                    found[entry.serial] = entry.sequence
                released = sorted(serial for serial in found if serial < store.floor)
        except StoreError as error:
            return str(error)
        if newest > max(found, default=0):
            return f"serial {newest} was acknowledged, and there are {found}"
        if released:
            return f"serials {released} were released, and there are {found}"
        superfluous = max((p.serial for p in promises if p.sequence and not p.registered), default=0)
        if superfluous >= max(found, default=1):
            return f"serial {superfluous} was dropped, and there are {found}"
        needed = {p.serial for p in promises if p.registered and p.serial >= floor}
        if not needed <= found.keys():
            return f"serials {sorted(needed)} are needed from floor {floor} on, and there are {found}"
        return ""
