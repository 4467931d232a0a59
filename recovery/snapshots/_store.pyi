"""The snapshot store (docs/snapshot-format.md). Every call may come from any thread and lets other threads
run.

Trouble of the storage is an OSError with its number (ENOSPC, EIO, EROFS, …); all else is a StoreError.
"""

from collections.abc import Callable, Sequence
from os import PathLike
from types import TracebackType
from typing import Self

from typing_extensions import Buffer

Extent = tuple[int, int, Buffer] | tuple[int, int, Buffer, int]

class StoreError(ValueError):
    """What is wrong with a store, or with what was asked of it, in a sentence that says what to do."""

class StoreFull(StoreError):
    """No slot became free in time."""

class Receipt:
    """A snapshot that is durable, or no longer wanted (see `registered`)."""

    @property
    def sequence(self) -> int:
        """Its name in this store; rises in the order in which they got their slots."""
    @property
    def slot(self) -> int: ...
    @property
    def bytes(self) -> int:
        """Of payload: all extents, each padded to 64 bytes."""
    @property
    def seconds(self) -> float: ...
    @property
    def stalled_seconds(self) -> float:
        """Of `seconds`, those spent waiting for a slot and for memory of the pool."""
    @property
    def registered(self) -> bool:
        """False: while this one was written, the floor rose above it, and it was dropped."""

class Entry:
    """A snapshot that the superblock registers. With a damaged header only sequence, serial and slot are
    known.
    """

    @property
    def sequence(self) -> int: ...
    @property
    def job(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def serial(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def time_ns(self) -> int:
        """Wall clock, when it was whole."""
    @property
    def slot(self) -> int: ...
    @property
    def valid_header(self) -> bool: ...

class Contents:
    """What a snapshot consists of, laid out: made once, and held as long as something writes it."""

    def __init__(
        self,
        loose: Sequence[Extent],
        *,
        area: Buffer | None = None,
        manifest: Buffer | None = None,
        elsewhere: Sequence[int] = (),
        in_place: bool = False,
        shortest_run: int = 64 << 10,
    ) -> None:
        """`loose`: (kind, id, content) of each, and its XXH3-64 if that is known. `area`: memory that begins
        a page, in which the generators and buffers of `manifest` (of a snapshot) lie, with their digests; but
        for those handles that are `elsewhere`. `in_place`: written from there as it lies there, which is fast
        if it has huge pages, but for runs of fewer bytes than `shortest_run`, which are copied. StoreError: a
        manifest that makes no sense.
        """
    @property
    def bytes(self) -> int:
        """Of payload."""
    def needed_slot_bytes(self, *, chunk_bytes: int = 4 << 20) -> int:
        """As Store.needed_slot_bytes()."""

class Stream:
    """A payload that is read from its beginning to its end."""

    def read_into(self, into: Buffer) -> None:
        """The next bytes, zeros between extents. What is damaged raises StoreError at the latest with its
        last byte, so nothing counts before the last byte of all was read.
        """

class Store:
    @staticmethod
    def create(path: str | PathLike[str], *, slots: int, slot_bytes: int, chunk_bytes: int = 4 << 20) -> None:
        """Makes a file (owner-only, all blocks allocated) with an empty store, or one on a raw partition that
        begins with 8192 zeros.

        `slots`: for all that is under way or kept at a time, 2 to 128. `slot_bytes`: what the largest
        snapshot takes (needed_slot_bytes), rounded up to 4096. `chunk_bytes`: unit of writes,
        4096 bytes to 256 MiB, a multiple of 4096. FileExistsError where there is a file.
        """
    @staticmethod
    def open(
        path: str | PathLike[str],
        *,
        engine: str = "auto",
        writable: bool = True,
        pool_bytes: int = 64 << 20,
    ) -> Store:
        """Opens a store; writes nothing yet. One writer at a time; any number of readers, also beside a
        writer.

        `engine`: auto, uring, direct, buffered, mmap or dax. `pool_bytes`: memory for chunks under way,
        shared by all snapshots. The store keeps all from the floor on, until release_before() raises it.
        """
    @staticmethod
    def needed_slot_bytes(extents: Sequence[int], *, chunk_bytes: int = 4 << 20) -> int:
        """The `slot_bytes` that a snapshot with extents of these sizes takes."""
    def persist(
        self,
        *,
        job: str,
        rank: int,
        world: int,
        step: int,
        serial: int,
        extents: Sequence[Extent] | Contents,
        threads: int = 2,
        timeout_s: float,
        confirm: Callable[[], bool] | None = None,
    ) -> Receipt:
        """Writes a snapshot; it is durable when this returns. Several may be under way, in threads of the
        caller.

        `extents`: as Contents has them, kinds as docs/snapshot-format.md has them, 1 to 6. Their memory must
        not change meanwhile. A digest that Contents were given is written as it is: if it is wrong, whoever
        reads or verifies the snapshot is told. `job`: at most 255 bytes of UTF-8. `threads` write, the
        caller's among them.
        `confirm` is asked once all is copied, before it counts: False cancels (StoreError). `timeout_s`
        bounds the wait for a free slot: StoreFull after it. OSError: the snapshot is cancelled, those before
        it are as they were, and the store goes on; if a sync failed, then all snapshots under way at that
        moment fail.
        """
    def release_before(self, serial: int) -> None:
        """`serial` is complete on all ranks: slots below it are free once this is durable, except that of
        the largest serial.

        OSError: slots are not used again, but a reopened store may have released them.
        """
    def discard(self, serial: int) -> None:
        """`serial` will not be complete on all ranks: its slot is free once this is durable."""
    def snapshots(self) -> list[Entry]:
        """What the superblock registers, newest first: by serial."""
    def extents(self, sequence: int) -> list[tuple[int, int, int]]:
        """(kind, id, bytes) of each extent. StoreError if there is no such snapshot, or its tables are
        damaged.
        """
    def read(self, sequence: int, index_of_extent: int, into: Buffer) -> None:
        """Fills `into`, which must have the extent's size. All that this touches is checked;
        StoreError if it is damaged, and then `into` holds anything.
        """
    def read_all(self, sequence: int, into: Sequence[Buffer]) -> None:
        """Fills a buffer per extent, in their order, each of the extent's size. Much faster than as many
        read()s, each of which reads and checks the tables, too. Errors as read().
        """
    def layout(self, sequence: int) -> list[tuple[int, int, int, int]]:
        """(kind, id, bytes, offset in the payload) of each extent. Errors as extents()."""
    def read_into(
        self, sequence: int, extents: Sequence[tuple[int, int]], area: Buffer, *, in_place: bool = False
    ) -> None:
        """Some extents to offsets in `area`: (index, offset). `in_place`: without a copy, which is fast if it
        has huge pages; what lies between those that follow one another there as in the payload is anything
        afterwards. Errors as read().
        """
    def digests(self, sequence: int) -> list[int]:
        """Of each extent's content, which reading it checks; 0 in stores of releases before this was kept."""
    def stream(self, sequence: int) -> Stream:
        """All of the payload, one part after another. Errors as extents()."""
    def verify(self, sequence: int) -> list[int]:
        """Numbers of the extents that are not what they were when their digests were taken; of chunks, in
        stores of releases before extents had digests. StoreError as extents().
        """
    def close(self) -> None:
        """Waits for calls under way; those that wait for a slot fail, and so does everything after it."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    @property
    def capacity(self) -> int:
        """Slots."""
    @property
    def slot_bytes(self) -> int: ...
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def free_slots(self) -> int:
        """A moment's view."""
    @property
    def epoch(self) -> int:
        """Rises with each superblock that is written."""
    @property
    def floor(self) -> int:
        """Serials below it are released."""
    @property
    def engine(self) -> str: ...
    @property
    def notes(self) -> str:
        """What kept faster engines from being used, and a superblock that was damaged: a sentence each."""
    @property
    def uuid(self) -> bytes: ...

    # ---- for tests
    @staticmethod
    def create_on(disk: RecordedDisk, *, slots: int, slot_bytes: int, chunk_bytes: int) -> None: ...
    @staticmethod
    def open_on(
        disk: RecordedDisk,
        *,
        writable: bool = True,
        pool_bytes: int = 64 << 20,
        depth: int = 3,
    ) -> Store: ...

class RecordedDisk:
    """A disk in memory for tests: notes writes and syncs, writes late and in any order, fails on demand."""

    def __init__(self, content: Buffer, *, ranges: bool = False) -> None:
        """`ranges`: a sync of a range makes no more durable than that, as of a mapped file."""
    def fail(self, operation: int, error: int, forever: bool = False) -> None:
        """The operation of this number fails with this error number, and all after it if `forever`."""
    def ignore_syncs(self, begin: int, end: int) -> None:
        """Syncs of ranges inside [begin, end) do nothing: a store that commits in a wrong order."""
    def mark(self, number: int) -> None:
        """Puts a mark into the log."""
    def keep_log(self, on: bool) -> None: ...
    @property
    def operations(self) -> int: ...
    def content(self) -> bytes: ...
    def log(self) -> list[tuple[str, int, int, int, bytes]]:
        """(write | done | sync | synced | sync-failed | mark, number, offset, bytes, data), in order."""
