"""Tests of which each run has its share: `@pytest.mark.drawn(3)`, one in three, drawn anew for each run.

What the mark stands on is the family that is drawn from: a function's parameters, or (`pytestmark`) the tests
of a file, of which each run has at least one.  `drawn(3, by="group")` draws values of that parameter, the
same for all functions of a file, where tests share what takes long.  The closest mark counts: in a file that
is drawn from, `drawn(1)` is for tests of each run.  All this is for families whose members are much alike and
dear: each run sees some, many runs all of them, and `make test-long` has all.  So has whoever names a file or
a test, or selects by `-k` or `-m`.

The number that the draw goes by is printed; UNDERSTUDY_TEST_DRAW repeats one.
"""

from __future__ import annotations

import os
import random
import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import durations
import pytest

MARK = "drawn"
VARIABLE = "UNDERSTUDY_TEST_DRAW"
SEED = pytest.StashKey[str]()
"""Empty: all tests run that are selected."""


@dataclass
class Family:
    """What is drawn from."""

    one_in: int
    least: int = 0
    """Members that each run has, however small their share is: 1 if the mark is a file's own."""
    members: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Whatever is drawn -> the ids of the tests that come with it."""


def drawn(family: str, members: Iterable[str], one_in: int, seed: str, least: int = 0) -> set[str]:
    """As many as its share is, and `least`; where that is no whole number, now one less and now one more."""
    known, chance = sorted(members), random.Random(f"{seed} {family}")
    whole, rest = divmod(len(known), one_in)
    share = whole + (chance.randrange(one_in) < rest)
    return set(chance.sample(known, min(len(known), max(least, share))))


def families(items: Iterable[pytest.Item]) -> dict[str, Family]:
    """By name.  The closest mark counts."""
    found: dict[str, Family] = {}
    for item in items:
        for node, mark in item.iter_markers_with_node(MARK):
            by = mark.kwargs.get("by", "")
            name = f"{durations.file_of(item.nodeid)} {by}" if by else node.nodeid.partition("[")[0]
            one = found.setdefault(name, Family(mark.args[0], least=int(isinstance(node, pytest.Module))))
            one.members[_parameter(item, by) if by else item.nodeid].append(item.nodeid)
            break
    return found


def _parameter(item: Any, name: str) -> str:
    return str(item.callspec.params[name])


def left_out(known: Mapping[str, Family], seed: str) -> set[str]:
    """The ids of tests that are for other runs."""
    return {
        test
        for name, family in known.items()
        for member in family.members.keys() - drawn(name, family.members, family.one_in, seed, family.least)
        for test in family.members[member]
    }


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


@pytest.hookimpl(trylast=True)  # of those that `-m` leaves
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not (seed := config.stash[SEED]):
        return
    left = left_out(families(items), seed)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
    items[:] = [item for item in items if item.nodeid not in left]
