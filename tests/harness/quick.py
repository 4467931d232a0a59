"""`pytest --quick SECONDS`: the mission, and then the files that cost least, as long as they fit.

What a file costs is its budget (tests/durations.json), so the choice follows the suite by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import durations
import pytest

MISSION = (
    "tests/client/test_worker.py",
    "tests/scripts/test_training.py",
    "tests/recovery/test_corruption.py",
    "tests/suite/test_zygotes.py",
)
"""A script sees nothing of us, its losses are right, and state that breaks is repaired."""


def chosen(files: Iterable[str], budgets: Mapping[str, int], seconds: float) -> set[str]:
    """Of `files`, in this order: the mission's, and others by what they cost; without a budget: none."""
    known = [file for file in files if file in budgets]
    found: set[str] = set()
    for file in sorted(known, key=lambda file: (file not in MISSION, budgets[file], file)):
        seconds -= budgets[file]
        if seconds < 0 and file not in MISSION:
            break
        found.add(file)
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", type=float, metavar="SECONDS", help="the files that cost least, so long in sum"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seconds = config.getoption("quick")
    if not seconds:
        return
    files = {durations.file_of(item.nodeid) for item in items}
    found = chosen(files, durations.read_budgets(), seconds)
    config.hook.pytest_deselected(
        items=[item for item in items if durations.file_of(item.nodeid) not in found]
    )
    items[:] = [item for item in items if durations.file_of(item.nodeid) in found]
