"""Times are handed down (recovery/base/timing.py), not written over in a module."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from places import ROOT, TESTS

from understudy.recovery.base.timing import Timing

WRITTEN_OVER = re.compile(r"""setattr\([^)]*["'](?:[\w.]*\.)?[A-Z_]+_S["']""")


def test_no_test_writes_over_a_time_of_a_module() -> None:
    found = [
        f"{path.name}: {match[0]}"
        for path in sorted(TESTS.rglob("*.py"))
        if path.name != Path(__file__).name
        for match in WRITTEN_OVER.finditer(path.read_text())
    ]
    assert not found, "a field of Timing, or an argument, instead"


@pytest.mark.parametrize(
    "line", ['setattr(floors, "IDLE_S", 0)', "setattr('understudy.recovery.upkeep.floors.IDLE_S', 0)"]
)
def test_a_time_that_is_written_over_is_noticed(line: str) -> None:
    assert WRITTEN_OVER.search(line)


def test_every_time_is_in_seconds_and_read_somewhere() -> None:
    code = "".join(path.read_text() for path in (ROOT / "recovery").rglob("*.py"))
    for time in fields(Timing):
        assert time.name.endswith("_s") and isinstance(time.default, float) and time.default > 0
        assert f"iming.{time.name}" in code, time.name
