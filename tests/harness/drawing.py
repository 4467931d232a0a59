"""Tests of which each run has its share: `@pytest.mark.drawn(3)`, one in three, drawn anew for each run.

What the mark stands on is the family that is drawn from: a function's parameters, or (`pytestmark`) the
tests of a file.  It is for families whose members are much alike and dear: each run sees some, many runs all
of them, and `make test-long` has all.  So has whoever names a file or a test, or selects by `-k` or `-m`.

The number that the draw goes by is printed; UNDERSTUDY_TEST_DRAW repeats one.
"""

from __future__ import annotations

import os
import random
import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import durations
import pytest

MARK = "drawn"
VARIABLE = "UNDERSTUDY_TEST_DRAW"
SEED = pytest.StashKey[str]()
"""Empty: all tests run that are selected."""


def drawn(members: Sequence[str], one_in: int, seed: str) -> set[str]:
    """Of a family, as many as its share is, rounded up."""
    most = -(-len(members) // one_in)
    return set(random.Random(f"{seed} {min(members)}").sample(sorted(members), most))


def families(items: Iterable[pytest.Item]) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Family -> the ids of its tests; family -> one in how many.  The closest mark counts."""
    members: dict[str, list[str]] = defaultdict(list)
    shares: dict[str, int] = {}
    for item in items:
        for node, mark in item.iter_markers_with_node(MARK):
            family = node.nodeid.partition("[")[0]
            members[family].append(item.nodeid)
            shares[family] = mark.args[0]
            break
    return members, shares


def left_out(members: Mapping[str, Sequence[str]], shares: Mapping[str, int], seed: str) -> set[str]:
    """The ids of tests that are for other runs."""
    return {one for family, ids in members.items() for one in set(ids) - drawn(ids, shares[family], seed)}


# ------------------------------------------------------------------ the plugin
def pytest_configure(config: pytest.Config) -> None:
    """Whoever hands tests out draws the number, and tells those that run them."""
    told = getattr(config, "workerinput", None)
    if told is not None:
        config.stash[SEED] = told[MARK]
    else:
        number = os.environ.get(VARIABLE) or str(secrets.randbelow(10**6))
        config.stash[SEED] = number if durations.is_of_the_whole(config) else ""


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput[MARK] = node.config.stash[SEED]


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [f"drawn by {VARIABLE}={seed}"] if (seed := config.stash[SEED]) else []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not (seed := config.stash[SEED]):
        return
    left = left_out(*families(items), seed)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
    items[:] = [item for item in items if item.nodeid not in left]
