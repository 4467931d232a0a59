"""What the storage engines do when a disk fails or is full, and on block devices."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from opened_storage import (
    CACHED,
    DIRECT,
    ENGINES,
    MIB,
    SIZE,
    aligned,
    opened,
    refused,
)
from small_disks import device_on_a_full_file_system, flakey_device, loop_device, tiny_file_system

from understudy.recovery.snapshots._storage import GroupSync, Storage, create_file

FAILED = (errno.EIO, errno.ENOSPC)  # a loop device on a full file system may answer either


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "storage")
    create_file(path, SIZE)
    return path


# ---- when the disk fails ----


@pytest.fixture(params=["full file system", "dm-flakey"])
def failing_device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A block device of 8 MiB on which every write fails."""
    if request.param == "dm-flakey":
        with flakey_device(tmp_path, SIZE) as device:
            yield device
    else:
        with device_on_a_full_file_system(tmp_path, SIZE) as device:
            yield device


@pytest.mark.parametrize("engine", DIRECT)
def test_a_write_that_the_disk_refuses_raises_and_its_neighbours_are_answered(
    failing_device: str, engine: str
) -> None:
    storage = opened(failing_device, engine)
    block = aligned(64 << 10, 1)
    writer = storage.writer()
    for _ in range(3):
        with refused(FAILED, "cannot write 65536 bytes", failing_device):
            writer.submit(4 * MIB, block, 1)
            writer.wait()
    if writer.depth > 1:
        for token in range(4):
            writer.submit(4 * MIB + token * len(block), block, token)
        for _ in range(4):
            with refused(FAILED, "cannot write"):
                writer.wait()
    with refused(FAILED), contextlib.closing(storage):
        storage.write(4 * MIB, aligned(MIB, 2), 64 << 10, threads=3, depth=4)


@pytest.mark.parametrize("engine", CACHED)
def test_after_a_failed_sync_every_later_one_fails_until_the_storage_is_opened_anew(
    failing_device: str, engine: str
) -> None:
    storage = opened(failing_device, engine)
    storage.write(4 * MIB, aligned(MIB, 1))
    with refused(FAILED, "cannot make durable", failing_device):
        storage.sync()
    for _ in range(3):
        with refused(FAILED, "lost data in an earlier sync"):
            storage.sync_range(0, 4096)
    storage.close()
    opened(failing_device, engine).sync()


def test_the_kernel_tells_of_a_failed_sync_only_once(failing_device: str) -> None:
    """Why the engines remember: were this to change, nothing would be wrong with them."""
    fd = os.open(failing_device, os.O_RDWR)
    try:
        os.pwrite(fd, bytes(MIB), 4 * MIB)
        with refused(FAILED):
            os.fdatasync(fd)
        os.fdatasync(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("engine", ["mmap", "dax"])
def test_mapped_engines_without_space_behind_a_hole_raise_instead_of_dying(
    tmp_path: Path, engine: str
) -> None:
    with tiny_file_system(tmp_path, "64k") as tiny:
        with (tiny / "sparse").open("wb") as file:
            file.truncate(MIB)
        with contextlib.closing(opened(tiny / "sparse", engine)) as storage:
            storage.write(0, aligned(4096, 1))
            with refused(errno.ENOSPC, "cannot write"):
                storage.write(4096, aligned(MIB - 4096, 2))


@pytest.mark.parametrize("engine", [*DIRECT, "buffered"])
def test_a_short_write_is_continued_and_only_its_rest_fails(path: str, engine: str) -> None:
    data = aligned(2 * MIB, 9)
    storage = opened(path, engine)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, hard))
    try:
        with refused(errno.EFBIG, f"cannot write {MIB} bytes at {2 * MIB}"):
            storage.write(MIB, data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    storage.sync()
    assert Path(path).read_bytes() == bytes(MIB) + data[:MIB] + bytes(6 * MIB)


def test_a_write_that_fails_takes_no_other_with_it(path: str) -> None:
    storage = opened(path, "uring")
    block = aligned(64 << 10, 9)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, hard))
    answers: list[int | None] = []
    try:
        writer = storage.writer()
        for token in range(8):
            writer.submit(2 * MIB + (token - 4) * len(block), block, token)
        for _ in range(8):
            try:
                answers.append(writer.wait())
            except OSError as error:
                assert error.errno == errno.EFBIG
                answers.append(None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(token for token in answers if token is not None) == [0, 1, 2, 3]
    assert answers.count(None) == 4


# ---- one flush for many threads ----


def in_threads(*work: Callable[[], None]) -> list[OSError | None]:
    found: list[OSError | None] = [None] * len(work)

    def run(number: int) -> None:
        try:
            work[number]()
        except OSError as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_flushes_never_overlap_and_each_sync_is_covered_by_one_that_began_after_it() -> None:
    inside = threading.Lock()
    state = {"begun": 0}
    flushed: list[tuple[int, int, int]] = []

    def flush(begin: int, end: int) -> int:
        assert inside.acquire(blocking=False), "two flushes at a time"
        state["begun"] += 1
        flushed.append((state["begun"], begin, end))
        inside.release()
        return 0

    group = GroupSync("a storage", flush)

    def some(number: int) -> Callable[[], None]:
        def sync() -> None:
            for i in range(50):
                before = state["begun"]
                group.sync(number * 1000 + i, number * 1000 + i + 1)
                covering = [
                    n for n, begin, end in flushed if begin <= number * 1000 + i and number * 1000 + i < end
                ]
                assert max(covering) > before

        return sync

    assert in_threads(*(some(n) for n in range(8))) == [None] * 8
    assert len(flushed) <= 400


def test_threads_that_come_during_a_flush_share_the_next_one() -> None:
    first_runs = threading.Event()
    flushed: list[tuple[int, int]] = []

    def flush(begin: int, end: int) -> int:
        flushed.append((begin, end))
        first_runs.set()
        while len(flushed) == 1 and group.waiting() < 3:
            os.sched_yield()
        return 0

    group = GroupSync("a storage", flush)

    def later(begin: int) -> Callable[[], None]:
        def sync() -> None:
            assert first_runs.wait(60)
            group.sync(begin, begin + 1)

        return sync

    assert in_threads(lambda: group.sync(0, 1), later(5), later(8), later(6)) == [None] * 4
    assert flushed == [(0, 1), (5, 9)]


def test_a_failed_flush_fails_all_that_waited_and_none_runs_after_it() -> None:
    answers = [0, errno.ENOSPC, 0, 0]
    flushed: list[int] = []

    def flush(begin: int, end: int) -> int:
        flushed.append(begin)
        return answers[len(flushed) - 1]

    group = GroupSync("a storage", flush)
    group.sync(0, 1)
    with refused(errno.ENOSPC, "cannot make durable what was written to a storage"):
        group.sync(1, 2)
    errors = in_threads(*[lambda: group.sync(2, 3)] * 4)
    assert all(error and "opened anew" in str(error) for error in errors)
    assert flushed == [0, 1]


# ---- block devices ----


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sync_empties_the_cache_of_the_device_and_leaves_nothing_to_write(
    tmp_path: Path, engine: str
) -> None:
    create_file(str(tmp_path / "backing"), SIZE)
    with loop_device(tmp_path / "backing") as device, contextlib.closing(opened(device, engine)) as storage:
        statistics = Path(f"/sys/block/{Path(device).name}/stat")

        def sectors_and_flushes() -> tuple[int, int]:
            fields = statistics.read_text().split()
            if len(fields) < 16:
                pytest.skip("this kernel does not count flushes")
            return int(fields[6]), int(fields[15])

        before = sectors_and_flushes()
        storage.write(MIB, aligned(MIB, 1), 128 << 10)
        storage.sync()
        after = sectors_and_flushes()
        assert after[0] - before[0] >= MIB // 512
        assert after[1] > before[1]
        storage.sync()
        assert sectors_and_flushes()[0] == after[0]


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
@pytest.mark.parametrize("sector", [512, 4096])
def test_a_block_device_is_as_large_and_aligned_as_it_says(tmp_path: Path, engine: str, sector: int) -> None:
    create_file(str(tmp_path / "backing"), SIZE)
    data, found = aligned(MIB, 4), aligned(MIB)
    with loop_device(tmp_path / "backing", f"--sector-size={sector}") as device:
        with contextlib.closing(opened(device, engine)) as storage:
            assert storage.bytes == SIZE
            assert storage.alignment == (sector if storage.engine in DIRECT else 1)
            storage.write(2 * MIB, data, 64 << 10, threads=2, depth=4, seed=1)
            storage.sync()
            storage.read(2 * MIB, found)
        with refused(errno.EEXIST):
            create_file(device, SIZE)
    assert found[:] == data[:] == (tmp_path / "backing").read_bytes()[2 * MIB : 3 * MIB]


def test_a_block_device_in_use_is_not_written(tmp_path: Path) -> None:
    create_file(str(tmp_path / "backing"), SIZE)
    with loop_device(tmp_path / "backing") as device:
        user = os.open(device, os.O_RDWR | os.O_EXCL)  # as a mount would
        try:
            with refused(errno.EBUSY, "for writing"):
                Storage(device)
            Storage(device, "auto", False).close()
        finally:
            os.close(user)
