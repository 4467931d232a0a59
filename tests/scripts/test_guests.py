"""A sample of the programs that others wrote (`make test-programs` runs all), and what is told of them."""

from __future__ import annotations

import dataclasses
import importlib.util
import random
import sys
from pathlib import Path

import pytest
from guests_report import markdown
from places import ROOT
from run_guests import PROGRAMS
from trial import DATA, Outcome, places, run

ENVIRONMENT = Path(sys.prefix)
SAMPLE = "moe_mixtral"
"""It needs nothing that the tests do not need anyway."""
needs_its_library = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or not DATA.exists(),
    reason="needs transformers and ../shared/data",
)


@pytest.mark.drawn(16)
@needs_its_library
def test_a_program_of_others_has_the_bits_of_a_native_run_and_keeps_them_when_a_server_is_killed() -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    (program,) = (one for one in PROGRAMS if one.name == SAMPLE)
    outcome = run(program, seed, ENVIRONMENT)
    assert outcome.problem == ""
    assert (outcome.works, outcome.bits, outcome.fault) == (True, True, True)
    assert outcome.steps == 10


@pytest.mark.drawn(16)
@needs_its_library
def test_a_program_that_does_not_run_is_told_of_unless_its_row_says_so() -> None:
    broken = dataclasses.replace(
        PROGRAMS[0], command=("mixture_of_experts.py", "{data}/no such text", "Mixtral")
    )
    assert "FileNotFoundError" in run(broken, 1, ENVIRONMENT).problem
    known = dataclasses.replace(broken, fails="it has no text", refusal="FileNotFoundError")
    outcome = run(known, 1, ENVIRONMENT)
    assert (outcome.works, outcome.problem) == (False, "")


def test_rows_have_names_of_their_own_and_scripts_that_exist() -> None:
    names = [program.name for program in PROGRAMS]
    assert len(names) == len(set(names)) >= 25
    folder = ROOT / "guests"
    for program in PROGRAMS:
        assert program.command[0] == "-m" or (folder / "scripts" / program.command[0]).exists(), program.name
        assert (folder / "environments" / f"{program.environment}.txt").exists(), program.name
        assert bool(program.fails) == bool(program.refusal), program.name


def test_a_fault_strikes_amid_a_run_that_steps_and_in_the_only_minibatch_of_one_that_does_not() -> None:
    stepping = {"steps": 12, "calls_per_step": 100, "records": 1300}
    first, following, last = places(stepping, random.Random(1), 2)
    assert first.replace("step=6", "step=7") == following and last.endswith("step=6 call=1")
    idle = {"steps": 0, "calls_per_step": 0, "records": 1000}
    drawn = {places(idle, random.Random(seed), 1)[0] for seed in range(20)}
    assert len(drawn) > 10 and all(place.startswith("rank=0 step=1 call=") for place in drawn)
    assert max(int(place.rpartition("=")[2]) for place in drawn) < 1000


def test_the_report_names_what_fails_and_why() -> None:
    failing = dataclasses.replace(PROGRAMS[0], fails="its cause", refusal="words")
    text = markdown([failing], {failing.name: Outcome(failing.name, "1.0", 3, commit="abc")})
    assert "| **no** |" in text and f"- {failing.name}: its cause." in text
