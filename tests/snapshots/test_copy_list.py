"""Who copies which piece of a snapshot, while buffers change and go: under ThreadSanitizer."""

from __future__ import annotations

import subprocess
from operator import attrgetter

import pytest
from compiled_programs import program
from mistakes import Mistake, mistakes_of

pytestmark = pytest.mark.drawn(2)

STRESS = "copy_stress"


def stress(name: str, snapshots: int, seed: int) -> subprocess.CompletedProcess[str]:
    words = [str(program(name)), str(snapshots), str(seed)]
    found = subprocess.run(words, capture_output=True, text=True, timeout=230)
    print(found.stdout)
    return found


@pytest.mark.parametrize("snapshots", [3000, pytest.param(15_000, marks=pytest.mark.long)])
def test_buffers_that_change_while_they_are_copied_do_not_race(seed: int, snapshots: int) -> None:
    found = stress(STRESS, snapshots, seed)
    assert found.returncode == 0 and "WARNING" not in found.stderr, found.stdout + found.stderr[:4000]


@pytest.mark.parametrize("mistake", mistakes_of(STRESS), ids=attrgetter("name"))
def test_the_same_stress_finds_what_is_done_wrong(mistake: Mistake, seed: int) -> None:
    found = stress(mistake.built, 3000, seed)
    assert found.returncode != 0 or "data race" in found.stderr
