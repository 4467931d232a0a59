"""The log: many writers, growth, recycling, back-pressure, and what a reader refuses."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from understudy.recovery.machine.runtime_directory import SHARED_MEMORY
from understudy.replay import Log, LogError, LogWriter, RemoteError, create_log

KIND_SEED, KIND_FREE, KIND_SYNCHRONIZE = 8, 3, 18


@pytest.fixture
def directory() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="understudy-test-", dir=SHARED_MEMORY)
    yield path
    shutil.rmtree(path)


def make(directory: str, segments: int = 4, segment_bytes: int = 4 << 20) -> tuple[Log, LogWriter]:
    create_log(
        directory,
        segment_bytes=segment_bytes,
        segment_count=segments,
        dictionary_bytes=1 << 20,
        reply_bytes=1 << 16,
        shadow_bytes=1 << 20,
        proxyd_pid=os.getpid(),
    )
    return Log(directory), LogWriter(directory)


def test_files_belong_to_their_owner_alone(directory: str) -> None:
    make(directory)
    modes = {file.name: oct(file.stat().st_mode & 0o777) for file in Path(directory).iterdir()}
    assert modes == dict.fromkeys(
        ["control", "dictionary", "marks", "segments", "shadow", "snapshot"], "0o600"
    )


def test_records_of_many_threads_are_whole_and_in_one_order(directory: str) -> None:
    log, writer = make(directory)

    def write(thread: int) -> None:
        for i in range(2000):
            writer.append(KIND_SEED, thread, [thread, i, *range(i % 7)])

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = log.dump()
    assert [r["index"] for r in records] == list(range(8000))
    for n in range(4):
        mine = [r["words"] for r in records if r["aux"] == n]
        assert mine == [[n, i, *range(i % 7)] for i in range(2000)]


def test_frees_ride_on_the_next_record(directory: str) -> None:
    log, writer = make(directory)
    for handle in (5, 6, 7):
        writer.free_later(handle)
    writer.append(KIND_SEED, 0, [1])
    writer.append(KIND_SEED, 0, [2])
    assert [r["frees"] for r in log.dump()] == [[5, 6, 7], []]


def test_the_log_grows_by_segments_and_never_splits_a_record(directory: str) -> None:
    log, writer = make(directory)
    for i in range(60):
        writer.append(KIND_SEED, i, [i] * 25_000)  # 200 kB each: about 20 to a segment
    records = log.dump()
    assert [r["aux"] for r in records] == list(range(60))
    for r in records:
        offset, size = int(str(r["offset"])), int(str(r["bytes"]))
        assert offset // log.segment_bytes == (offset + size - 1) // log.segment_bytes


def test_a_record_larger_than_half_a_segment_is_refused(directory: str) -> None:
    _, writer = make(directory)
    with pytest.raises(LogError, match="too large"):
        writer.append(KIND_SEED, 0, [0] * (3 << 18))


def test_a_full_log_blocks_the_writer_until_the_session_ends_with_a_sentence(directory: str) -> None:
    log, writer = make(directory, segments=1)
    seen: list[str] = []

    def fill() -> None:
        try:
            while True:
                writer.append(KIND_SEED, 0, [0] * 25_000)
        except RemoteError as error:
            seen.append(str(error))

    thread = threading.Thread(target=fill)
    thread.start()
    while not log.backpressure:
        thread.join(0.001)
    log.lose("rank 0 cannot go on: the test says so")
    thread.join(10)
    assert seen == ["rank 0 cannot go on: the test says so"]


def test_a_waiting_call_ends_when_the_session_is_lost(directory: str) -> None:
    log, writer = make(directory)
    seen: list[str] = []

    def wait() -> None:
        try:
            writer.call(KIND_SYNCHRONIZE, 0, [])
        except RemoteError as error:
            seen.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while log.tail_index == 0:
        thread.join(0.001)
    log.lose("gone")
    thread.join(10)
    assert seen == ["gone"]


def test_a_waiting_call_ends_when_proxyd_dies(directory: str) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    create_log(directory, segment_count=1, shadow_bytes=1 << 20, proxyd_pid=dead.pid)
    with pytest.raises(RemoteError, match=r"proxyd .* is gone"):
        LogWriter(directory).call(KIND_SYNCHRONIZE, 0, [])


def test_a_forked_child_cannot_write_into_its_parents_log(directory: str) -> None:
    create_log(directory, segment_count=4, shadow_bytes=1 << 20, proxyd_pid=os.getpid())
    code = (  # in a process of its own: this one may have threads of gRPC, which do not survive a fork
        "import os, sys\n"
        "from understudy.replay import Log, LogError, LogWriter\n"
        "log, writer = Log(sys.argv[1]), LogWriter(sys.argv[1])\n"
        f"writer.append({KIND_SEED}, 0, [1])\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        f"        writer.append({KIND_SEED}, 0, [2])\n"
        "    except LogError:\n"
        "        os._exit(0)\n"
        "    os._exit(1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), log.tail_index)\n"
        f"writer.append({KIND_SEED}, 0, [3])\n"
        "print(log.tail_index)\n"
    )
    command = [sys.executable, "-P", "-c", code, directory]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["0", "1", "2"]


def test_a_log_has_one_writer(directory: str) -> None:
    _, writer = make(directory)
    writer.append(KIND_SEED, 0, [1])
    with pytest.raises(LogError, match="already has a writer"):
        LogWriter(directory)


def test_a_directory_without_a_log_of_this_version_is_refused(directory: str) -> None:
    make(directory)
    control = Path(directory) / "control"
    content = bytearray(control.read_bytes())
    content[8] = 99
    control.write_bytes(content)
    with pytest.raises(LogError, match="version 99"):
        Log(directory)
    control.write_bytes(b"\0" * len(content))
    with pytest.raises(LogError, match="no log of ours"):
        Log(directory)
    control.write_bytes(b"short")
    with pytest.raises(LogError, match="too short"):
        Log(directory)


def test_a_full_dev_shm_is_an_error_and_not_a_killed_process(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small tmpfs needs privileges")
    try:
        _, writer = make(str(small), segments=64)
        # Later on it waits until the server has let go of records: tests/scripts/test_odd_programs.py.
        with pytest.raises(LogError, match="no room for a segment"):
            writer.append(KIND_SEED, 0, [0])
        crowded = small / "second"
        crowded.mkdir()
        with contextlib.suppress(OSError), (small / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(1 << 16))
        with pytest.raises(LogError, match="no shared memory"):
            create_log(str(crowded), reply_bytes=64 << 20)
    finally:
        del writer
        subprocess.run(["umount", "--lazy", str(small)], check=True)


def test_a_log_of_an_earlier_version_is_refused_for_its_version(directory: str) -> None:
    """Not for the files that it lacks."""
    make(directory)
    with open(f"{directory}/control", "r+b") as control:
        control.seek(8)
        control.write((9).to_bytes(4, "little"))
    os.unlink(f"{directory}/marks")
    with pytest.raises(LogError, match="has log version 9, this build reads version"):
        Log(directory)
