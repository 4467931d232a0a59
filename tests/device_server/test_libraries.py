"""Which libraries a device server loads for operators that are not PyTorch's own, and its memory report."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from executor_harness import MEMORY, OPERATOR_SYNC, Harness

from understudy.replay import RemoteError

SCALE = "understudy_nowhere::scale"


def call(h: Harness, name: str) -> None:
    h.new(1, [1.0] * 4)
    h.writer.call(OPERATOR_SYNC, h.template(name, [2], []), [1, 1000])


def refused(tmp_path: Path, what: str) -> Path:
    path = tmp_path / "library.so"
    path.write_bytes(b"\x7fELF, but not really")
    path.chmod(0o755)
    match what:
        case "writable by others":
            path.chmod(0o757)
        case "writable by the group":
            path.chmod(0o775)
        case "a link":
            path.rename(tmp_path / "other.so")
            path.symlink_to(tmp_path / "other.so")
        case "in a folder of everyone":
            tmp_path.chmod(0o777)
        case "a pipe":
            path.unlink()
            os.mkfifo(path)
        case "missing":
            path.unlink()
    return path


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("writable by others", "others could write it"),
        ("writable by the group", "others could write it"),
        ("a link", "not a regular file"),
        ("in a folder of everyone", "others could write it"),
        ("a pipe", "not a regular file"),
        ("missing", "No such file"),
        ("no library", "cannot load the library"),
    ],
)
def test_a_library_is_loaded_only_if_nobody_else_can_have_written_it(
    what: str, message: str, tmp_path: Path
) -> None:
    with Harness() as h, pytest.raises(RemoteError, match=message):
        call(h, f"{SCALE}\0{refused(tmp_path, what)}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (SCALE, "does not run operator understudy_nowhere::scale"),
        ("aten::relu\0/usr/lib/library.so", "does not run operator aten::relu"),
        ("c10d::barrier\0/usr/lib/library.so", r"does not run operator c10d::barrier"),
    ],
    ids=["no library", "PyTorch's own with a library", "another built-in namespace"],
)
def test_operators_and_libraries_belong_together(name: str, message: str) -> None:
    with Harness() as h, pytest.raises(RemoteError, match=message):
        call(h, name)


@pytest.mark.parametrize("path", ["library.so", "", "../library.so"])
def test_a_path_that_is_not_absolute_ends_the_session(path: str) -> None:
    with Harness() as h, pytest.raises(RemoteError, match="not absolute"):
        call(h, f"{SCALE}\0{path}")


def numbers(h: Harness, query: int = 0) -> tuple[int, ...]:
    """bytes, blocks and reserved: current, peak, allocated, freed of each; free and total bytes."""
    return struct.unpack("<14Q", h.writer.call(MEMORY, query, []))


def test_the_memory_report_counts_buffers_and_what_was_freed() -> None:
    with Harness() as h:
        h.new(1, [1.0] * 4)
        h.new(2, [1.0] * 8)
        h.writer.free_later(2)
        seen = numbers(h)
        assert seen[:8] == (16, 48, 48, 32, 1, 2, 2, 1)
        assert seen[8] >= 16
        assert 0 < seen[12] <= seen[13]
        assert numbers(h, 1)[:4] == (16, 16, 48, 32)
        assert numbers(h, 2)[:4] == (16, 16, 0, 0)


def test_a_memory_report_that_differs_in_a_replay_is_no_error() -> None:
    with Harness() as h:
        h.new(1, [1.0] * 4)
        h.commit()
        numbers(h)
        h.new(2, [1.0] * 4)
        numbers(h, 2)
        h.executor.park()
        h.executor.rewind(1)
        h.executor.resume()
        h.synchronize()
        assert h.log.replies_different == 0


def test_an_unknown_memory_query_ends_the_session() -> None:
    with Harness() as h, pytest.raises(RemoteError, match="unknown memory query"):
        numbers(h, 9)
