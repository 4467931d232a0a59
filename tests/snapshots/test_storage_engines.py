"""The storage engines below the persistent snapshot store: what they write, where, and what they refuse."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from opened_storage import (
    CACHED,
    DIRECT,
    ENGINES,
    MIB,
    SIZE,
    aligned,
    descriptors_of,
    mappings_of,
    opened,
    refused,
)
from small_disks import tiny_file_system

from understudy.recovery.snapshots._storage import Storage, create_file, raw_loop, stream_copy, stream_kinds

pytestmark = pytest.mark.drawn(5)


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "storage")
    create_file(path, SIZE)
    return path


# ---- what is written is there ----


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("threads", "depth", "block"), [(1, 1, MIB), (4, 8, 64 << 10), (3, 32, 4096), (2, 4, 1280 << 10)]
)
def test_what_threads_write_out_of_order_is_read_back_bit_for_bit(
    path: str, engine: str, threads: int, depth: int, block: int
) -> None:
    seed = random.randrange(1, 1 << 30)
    print("seed", seed)
    data, found = aligned(6 * MIB, seed), aligned(6 * MIB)
    storage = opened(path, engine)
    storage.write(MIB, data, block, threads, depth, seed)
    storage.sync()
    storage.read(MIB, found, block, threads)
    assert found[:] == data[:]
    storage.close()
    assert Path(path).read_bytes() == bytes(MIB) + data[:] + bytes(MIB)


@pytest.mark.parametrize("engine", ENGINES)
def test_random_writes_over_each_other_leave_what_the_last_one_wrote(path: str, engine: str) -> None:
    seed = random.randrange(1, 1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    storage = opened(path, engine)
    expected = bytearray(SIZE)
    for _ in range(100):
        at, count = chance.randrange(0, SIZE - MIB, 4096), chance.randrange(4096, MIB, 4096)
        data = aligned(count, chance.randrange(1, 1 << 30))
        storage.write(at, data, 128 << 10, chance.randint(1, 3), chance.randint(1, 8), chance.randint(0, 5))
        expected[at : at + count] = data[:]
    storage.sync()
    found = aligned(SIZE)
    storage.read(0, found)
    assert found[:] == expected


@pytest.mark.parametrize("engine", CACHED)
@pytest.mark.parametrize(
    ("at", "count"), [(0, 1), (1, 7), (4095, 2), (63, 66), (12345, 67891), (SIZE - 3, 3)]
)
def test_engines_over_cached_pages_write_any_length_anywhere(
    path: str, engine: str, at: int, count: int
) -> None:
    data = random.Random(at).randbytes(count)
    storage = opened(path, engine)
    assert storage.alignment == 1
    storage.write(at, data)
    storage.sync_range(at, count)
    assert Path(path).read_bytes() == bytes(at) + data + bytes(SIZE - at - count)


@pytest.mark.parametrize("kind", ["sse2", "avx512"])
def test_a_streaming_copy_of_any_length_and_place_touches_nothing_else(kind: str) -> None:
    if not stream_kinds()[kind]:
        pytest.skip(f"this processor has no {kind}")
    source, target = random.Random(7).randbytes(1024), aligned(1024)
    for at in [*range(0, 66), 127]:
        for count in [*range(0, 70), 127, 128, 129, 191, 500]:
            target[:] = b"\xee" * 1024
            stream_copy(kind, target, at, source, count % 5, count)
            expected = b"\xee" * at + source[count % 5 : count % 5 + count]
            assert target[:] == expected + b"\xee" * (1024 - len(expected)), (at, count)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_reads_what_another_one_has_made_durable(path: str, engine: str) -> None:
    for number, other in enumerate(ENGINES, start=1):
        data, found = aligned(MIB, number), aligned(MIB)
        writer = opened(path, other)
        writer.write(number * MIB, data, 64 << 10)
        writer.sync_range(number * MIB, MIB)
        opened(path, engine, writable=False).read(number * MIB, found)
        assert found[:] == data[:]


@pytest.mark.parametrize("engine", ENGINES)
def test_signals_do_not_disturb_writes(path: str, engine: str) -> None:
    data, found = aligned(4 * MIB, 3), aligned(4 * MIB)
    storage = opened(path, engine)
    old = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    try:
        writer = storage.writer()
        view = memoryview(data)
        for _ in range(10):
            for first in range(0, 64, min(64, writer.depth)):
                several = range(first, first + min(64, writer.depth))
                for i in several:
                    writer.submit(i << 16, view[i << 16 : (i + 1) << 16], i)
                assert sorted(writer.wait() for _ in several) == list(several)
            storage.sync()
        storage.read(0, found, 64 << 10)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert found[:] == data[:]


def test_the_raw_loop_writes_and_reads_the_same_bytes(path: str) -> None:
    data, found = aligned(SIZE, 5), aligned(SIZE)
    opened(path, "direct")
    raw_loop(path, True, data, MIB, 2, 3)
    raw_loop(path, False, found, MIB, 3, 2)
    assert found[:] == data[:] == Path(path).read_bytes()


# ---- what is refused ----


@pytest.mark.parametrize("engine", DIRECT)
def test_direct_engines_refuse_what_is_not_aligned(path: str, engine: str) -> None:
    storage = opened(path, engine)
    memory = memoryview(aligned(2 * MIB))
    assert storage.alignment in (512, 1024, 2048, 4096)
    half = storage.alignment // 2
    for at, data in ((half, memory[:4096]), (0, memory[:half]), (0, memory[half : half + 4096])):
        for transfer in (storage.write, storage.read):
            with refused(errno.EINVAL, f"must be multiples of {storage.alignment}", path):
                transfer(at, data)


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_read_or_written_beyond_the_end(path: str, engine: str) -> None:
    storage = opened(path, engine)
    memory = aligned(4096)
    for at in (SIZE, SIZE - 4096 + storage.alignment, 1 << 63, (1 << 64) - 4096):
        for transfer in (storage.write, storage.read):
            with refused(errno.EINVAL, f"which ends at {SIZE}"):
                transfer(at, memory)
    assert os.stat(path).st_size == SIZE == storage.bytes


@pytest.mark.parametrize("engine", ENGINES)
def test_a_read_of_a_file_that_was_cut_short_raises(path: str, engine: str) -> None:
    storage = opened(path, engine)
    os.truncate(path, MIB)
    with refused(errno.EIO, "cannot read"):
        storage.read(MIB, aligned(4096))


@pytest.mark.parametrize("engine", ENGINES)
def test_read_only_storage_never_writes(path: str, engine: str) -> None:
    before = os.stat(path).st_mtime_ns
    storage = opened(path, engine, writable=False)
    storage.read(0, aligned(MIB))
    for action in (storage.writer, storage.sync, lambda: storage.write(0, aligned(4096))):
        with refused(errno.EROFS, "read only"):
            action()
    assert os.stat(path).st_mtime_ns == before
    flags = [
        int(line.split()[1], 8)
        for n in descriptors_of(path)
        for line in Path(f"/proc/self/fdinfo/{n}").read_text().splitlines()
        if line.startswith("flags:")
    ]
    assert flags
    assert all(flag & os.O_ACCMODE == os.O_RDONLY for flag in flags)
    assert not any("w" in line.split()[1] for line in mappings_of(path))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_writer_takes_as_many_writes_as_it_says_and_answers_each_once(path: str, engine: str) -> None:
    storage = opened(path, engine)
    writer, block = storage.writer(), aligned(4096)
    with refused(errno.EINVAL, "none is under way"):
        writer.wait()
    for token in range(writer.depth):
        writer.submit(token * 4096, block, token + 100)
    with refused(errno.EBUSY, "wait()"):
        writer.submit(0, block, 1)
    assert sorted(writer.wait() for _ in range(writer.depth)) == [100 + n for n in range(writer.depth)]
    with refused(errno.EINVAL, "none is under way"):
        writer.wait()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_end_of_a_writer_waits_for_its_writes_so_that_their_memory_can_be_used_anew(
    path: str, engine: str
) -> None:
    storage = opened(path, engine)
    data = aligned(SIZE, 11)
    expected, view = data[:], memoryview(data)
    writer = storage.writer()
    block = SIZE // writer.depth
    for token in range(writer.depth):
        writer.submit(token * block, view[token * block : (token + 1) * block], token)
    del writer
    data[:] = bytes(SIZE)
    storage.sync()
    assert Path(path).read_bytes() == expected


def test_what_is_no_file_and_no_device_is_refused_without_being_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    for name in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with refused(errno.EINVAL, "neither a file nor a block device"):
            Storage(str(name), "auto", False)
    with refused(errno.EINVAL, "0 bytes"):
        Storage(str(tmp_path / "empty"))
    with refused(errno.ENOENT, "cannot inspect"):
        Storage(str(tmp_path / "absent"))
    with refused(errno.EINVAL, "no engine called tape"):
        Storage(str(tmp_path / "empty"), "tape")


# ---- making a file ----


@pytest.mark.parametrize("mask", [0o000, 0o277])
def test_a_new_file_has_all_its_blocks_and_belongs_to_its_owner_alone(tmp_path: Path, mask: int) -> None:
    old = os.umask(mask)
    try:
        create_file(str(tmp_path / "new"), SIZE)
    finally:
        os.umask(old)
    status = os.stat(tmp_path / "new")
    assert status.st_blocks * 512 >= SIZE == status.st_size
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert (tmp_path / "new").read_bytes() == bytes(SIZE)


def test_a_file_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("old", "link"):
        with refused(errno.EEXIST, "cannot create"):
            create_file(str(tmp_path / name), SIZE)
    assert (tmp_path / "old").read_bytes() == b"mine"
    assert not (tmp_path / "nowhere").exists()


def test_a_file_that_does_not_fit_is_refused_and_not_left_behind(tmp_path: Path) -> None:
    with refused(errno.EINVAL, "0 bytes"):
        create_file(str(tmp_path / "nothing"), 0)
    with refused(errno.EFBIG):
        create_file(str(tmp_path / "endless"), 1 << 63)
    with tiny_file_system(tmp_path, "1m") as tiny:
        with refused(errno.ENOSPC, "cannot allocate 8388608 bytes"):
            create_file(str(tiny / "storage"), SIZE)
        assert list(tiny.iterdir()) == []
        create_file(str(tiny / "storage"), 512 << 10)
    assert list(tmp_path.iterdir()) == []


# ---- choosing an engine ----


def test_the_best_engine_is_chosen_and_notes_say_why_no_better_one(path: str) -> None:
    storage = Storage(path)
    assert storage.engine == "dax" or "Not dax: " in storage.notes
    assert storage.engine in ("dax", "uring") or "Not uring: " in storage.notes
    assert storage.notes == "" or storage.notes.endswith(".")


def test_emulated_persistent_memory_is_called_so(path: str) -> None:
    storage = opened(path, "dax")
    if storage.engine == "dax":
        pytest.skip("this folder is on persistent memory")
    assert storage.engine == "dax (emulated)"
    assert "not on persistent memory" in storage.notes


FORBID_IO_URING = """
    import ctypes, struct
    libc = ctypes.CDLL(None, use_errno=True)
    def instruction(code, on_true, on_false, value):
        return struct.pack("HBBI", code, on_true, on_false, value)
    load_number = instruction(0x20, 0, 0, 0)
    is_setup = instruction(0x15, 0, 1, 425)  # io_uring_setup, the same number on every architecture
    answer_error = instruction(0x06, 0, 0, 0x00050000 | {number})
    allow = instruction(0x06, 0, 0, 0x7FFF0000)
    program = ctypes.create_string_buffer(load_number + is_setup + answer_error + allow)
    class Filter(ctypes.Structure):
        _fields_ = [("count", ctypes.c_ushort), ("program", ctypes.c_void_p)]
    rules = Filter(4, ctypes.cast(program, ctypes.c_void_p))
    PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(rules), 0, 0) == 0
"""


@pytest.mark.parametrize(
    ("number", "words"), [(errno.EPERM, "forbidden to this process"), (errno.ENOSYS, "no io_uring")]
)
def test_where_io_uring_is_refused_plain_direct_writes_take_over_and_say_why(
    path: str, number: int, words: str
) -> None:
    opened(path, "direct")
    script = textwrap.dedent(FORBID_IO_URING.replace("{number}", str(number))) + textwrap.dedent("""
        import mmap, sys
        from understudy.recovery.snapshots._storage import Storage
        storage = Storage(sys.argv[1])
        storage.write(0, mmap.mmap(-1, 1 << 20), block=4096, threads=2)
        storage.sync()
        print(storage.engine, storage.notes)
        try:
            Storage(sys.argv[1], "uring")
        except OSError as error:
            print(error)
    """)
    done = subprocess.run([sys.executable, "-P", "-c", script, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    chosen, explicit = done.stdout.splitlines()
    assert chosen.startswith("direct ") and "Not uring: " in chosen and words in chosen
    assert words in explicit


# ---- nothing is left behind ----


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
@pytest.mark.parametrize("writable", [True, False])
def test_a_hundred_openings_leave_no_descriptor_and_no_mapping(
    path: str, engine: str, writable: bool
) -> None:
    block = aligned(4096)
    opened(path, engine, writable).close()
    gc.collect()  # storages of other tests that their exceptions still hold
    before = len(os.listdir("/proc/self/fd")), mappings_of(path)
    for _ in range(100):
        storage = Storage(path, engine, writable)
        if writable:
            writer = storage.writer()
            writer.submit(0, block, 1)  # left under way: the writer's end waits for it
            del writer
        storage.close()
        with pytest.raises(OSError):
            Storage(path + "-absent", engine, writable)
    assert (len(os.listdir("/proc/self/fd")), mappings_of(path)) == before
    assert descriptors_of(path) == []
