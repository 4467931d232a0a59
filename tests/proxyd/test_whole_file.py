"""Files that are there whole, or not (recovery/base/whole_file.py)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from understudy.recovery.base.whole_file import read_whole, write_whole


@pytest.mark.parametrize("synced", [False, True])
def test_a_file_is_replaced_and_is_its_owners_alone(tmp_path: Path, *, synced: bool) -> None:
    path = tmp_path / "known"
    for content in (b"first, and longer", b"second", b""):
        write_whole(path, content, synced=synced)
        assert read_whole(path, 100) == content and os.listdir(tmp_path) == ["known"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_reader_has_the_old_content_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "known"
    write_whole(path, b"old")
    with open(path, "rb") as reading:
        write_whole(path, b"new")
        assert (reading.read(), read_whole(path, 3)) == (b"old", b"new")


def test_what_a_writer_that_died_has_left_is_no_obstacle_unless_it_is_a_link(tmp_path: Path) -> None:
    path, victim = tmp_path / "known", tmp_path / "victim"
    (tmp_path / "known.new").write_bytes(b"half of what was to be wr")
    write_whole(path, b"whole")
    assert read_whole(path, 100) == b"whole"
    victim.write_bytes(b"of somebody else")
    (tmp_path / "known.new").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        write_whole(path, b"more")
    assert (victim.read_bytes(), read_whole(path, 100)) == (b"of somebody else", b"whole")


def test_what_is_no_plain_file_or_too_long_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "known"
    with pytest.raises(FileNotFoundError):
        read_whole(path, 10)
    os.mkfifo(path)  # nobody will ever write to it
    with pytest.raises(OSError, match="no regular file of ours"):
        read_whole(path, 10)
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic links"):
        read_whole(path, 1 << 20)
    path.unlink()
    path.write_bytes(bytes(11))
    assert len(read_whole(path, 11)) == 11
    with pytest.raises(OSError, match="more than 10 bytes"):
        read_whole(path, 10)
