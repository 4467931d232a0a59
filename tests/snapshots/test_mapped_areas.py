"""The writer's view of ranks' snapshot areas: mapped once, and not for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from understudy.recovery.snapshots.writing.mapped import MappedAreas

PATIENCE_S = 20.0
LONG_S, SHORT_S = 600.0, 0.05


def mapped(directory: Path) -> int:
    """Mappings of its area in this process."""
    return Path("/proc/self/maps").read_text().count(f"{directory}/snapshot")


def wait(over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not over():
        assert time.monotonic() < deadline
        time.sleep(0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "snapshot").write_bytes(b"a" * 4096)
    return tmp_path


def test_an_area_is_mapped_once_for_all_its_snapshots(directory: Path) -> None:
    areas = MappedAreas(LONG_S)
    first = areas.area(directory)
    with open(directory / "snapshot", "r+b") as file:
        file.write(b"b")
    assert areas.area(directory) is first and mapped(directory) == 1
    assert first[:2] == b"ba"


def test_the_area_of_another_session_at_the_same_place_is_another(directory: Path) -> None:
    areas = MappedAreas(LONG_S)
    areas.area(directory)
    (directory / "other").write_bytes(b"c" * 8192)
    (directory / "other").rename(directory / "snapshot")
    area = areas.area(directory)
    assert (area.nbytes, area[:1]) == (8192, b"c")
    assert mapped(directory) == 1, "the former one's memory would not be given back"


def test_an_area_that_is_not_read_any_more_is_given_up(directory: Path) -> None:
    areas = MappedAreas(SHORT_S)
    areas.area(directory)
    wait(lambda: mapped(directory) == 0)


def test_who_still_reads_an_area_that_was_given_up_keeps_it(directory: Path) -> None:
    areas = MappedAreas(SHORT_S)
    held = areas.area(directory)
    (directory / "second").mkdir()
    (directory / "second" / "snapshot").write_bytes(b"d" * 4096)
    areas.area(directory / "second")
    wait(lambda: mapped(directory / "second") == 0)
    assert held[:1] == b"a" and mapped(directory) == 1
    with pytest.raises(FileNotFoundError):
        areas.area(directory / "third")
