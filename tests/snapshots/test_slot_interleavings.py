"""Who may write which slot, in every order of atomic steps; and the whole store under ThreadSanitizer.

`csrc/threads/slot_model.cpp` runs the real SlotTable and IndexRing on atomics that give the turn back.
"""

from __future__ import annotations

import subprocess
from operator import attrgetter

import pytest
from compiled_programs import program
from mistakes import Mistake, mistakes_of

pytestmark = pytest.mark.drawn(4)

MODEL = "slot_model"
SHORT = ["ring-1-2", "ring-2-2", "ring-2-3", "each-releases-2-2", "each-releases-3-2"]
SHORT += ["each-releases-2-2-failing", "each-releases-3-2-failing"]
SHORT += ["other-releases-3-2", "other-releases-3-2-failing"]
SHORT += ["lazy-each-releases-2-2", "lazy-each-releases-3-2"]
LONG = ["ring-3-3", "each-releases-2-3", "each-releases-3-3", "other-releases-4-3"]
LONG += ["lazy-each-releases-2-3", "lazy-each-releases-3-2-failing", "lazy-other-releases-3-2-failing"]


def run_model(name: str, *scenarios: str) -> list[str]:
    model, lines = program(name), []
    for scenario in scenarios:
        found = subprocess.run([model, scenario], capture_output=True, text=True, timeout=230)
        lines += found.stdout.splitlines()
        assert len(lines) > 0, f"there is no scenario {scenario}: {found.stderr}"
    print("\n".join(lines))
    return lines


@pytest.mark.drawn(1)
def test_no_order_of_steps_loses_a_slot_or_hands_out_one_that_is_needed() -> None:
    lines = run_model(MODEL, *SHORT)
    assert len(lines) == len(SHORT)
    assert not [line for line in lines if "VIOLATION" in line]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_order_of_steps_of_three_snapshots_loses_a_slot_or_hands_out_one_that_is_needed() -> None:
    lines = run_model(MODEL, *LONG)
    assert len(lines) == len(LONG)
    assert not [line for line in lines if "VIOLATION" in line]


@pytest.mark.parametrize("mistake", mistakes_of(MODEL), ids=attrgetter("name"))
def test_the_same_orders_find_what_is_done_wrong(mistake: Mistake) -> None:
    [line] = run_model(mistake.built, mistake.scenario)
    assert "VIOLATION" in line and mistake.violation in line


# ---------------------------------------------------------------- ThreadSanitizer
@pytest.mark.parametrize("seconds", [6, pytest.param(60, marks=pytest.mark.long)])
def test_threads_that_use_a_store_all_at_once_do_not_race(seed: int, seconds: int) -> None:
    words = [str(program("store_stress")), str(seconds), str(seed)]
    found = subprocess.run(words, capture_output=True, text=True, timeout=230)
    print(found.stdout)
    assert found.returncode == 0 and "WARNING" not in found.stderr, found.stderr[:4000]
