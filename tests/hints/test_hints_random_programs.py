"""Random functions (`hinted_programs`) are killed at each hint and at random ones, and end as if they never
were."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import hinted_programs
import pytest
import torch
from forked_calls import bits, cut_behind_every_checkpoint, dies_behind, in_a_process, one_thread

from understudy.hints import HintError, checkpoint, checkpoints

__all__ = ["one_thread"]  # a fixture

SAMPLE, MANY = 2, 300
MOST_KILLS = 400


def module(seed: int, folder: Path) -> ModuleType:
    path = folder / f"random_program_{seed}.py"
    path.write_text(hinted_programs.program(seed))
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None
    made = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = made
    found.loader.exec_module(made)
    return made


def outcome(home: ModuleType, function: Callable[[Any], Any]) -> Any:
    """What a caller sees: the result or the exception, the argument, globals, and where the generators
    are."""
    given = {"list": [7, 8]}
    try:
        result = function(given)
    except HintError:
        raise
    except Exception as error:  # noqa: BLE001 - what a random program raises is part of its outcome
        result = (type(error).__name__, str(error), type(error.__context__).__name__)
    return bits([result, given, home.LOG, home.total, home.Box.made, random.random(), torch.rand(1)])


def hints_of(home: ModuleType) -> Any:
    """The outcome of the plain function, and how many hints it passes."""
    count = itertools.count()
    home.checkpoint = lambda: next(count)  # type: ignore[attr-defined]
    return outcome(home, home.program), next(count)


def killed(home: ModuleType, function: Any, event: str, number: int) -> Any:
    dies_behind(event, number)
    return outcome(home, function)


def check(seed: int, folder: Path) -> int:
    """Of one program. Returns how often it was killed."""
    home = module(seed, folder)
    status, plain = in_a_process(lambda: hints_of(home))
    assert status == 0
    expected, hints = plain
    draw = random.Random(seed)
    kills = 0
    for turn in ("each", "random"):
        every = 1 if turn == "each" else draw.choice([1, 1, 2, 3])
        function = checkpoints(directory=folder / f"{seed}-{turn}", every=every)(home.program)
        for _ in range(MOST_KILLS):
            event, number = ("saved", 1)
            if turn == "random":
                event, number = draw.choice(["hint", "saved"]), draw.randint(1, max(2, hints // 3))
            status, answer = in_a_process(functools.partial(killed, home, function, event, number))
            if status != 77:
                break
            kills += 1
        assert status == 0, f"seed {seed} fails, {turn}"
        assert answer == expected, f"seed {seed} differs, {turn}"
    return kills


@pytest.mark.parametrize("first", [0])
def test_random_functions_killed_at_every_hint_and_at_random_ones_end_as_if_they_never_were(
    first: int, tmp_path: Path
) -> None:
    assert sum(check(seed, tmp_path) for seed in range(first, first + SAMPLE)) > SAMPLE


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_many_random_functions_killed_at_every_hint_end_as_if_they_never_were(tmp_path: Path) -> None:
    first = random.SystemRandom().randrange(1 << 30)
    print("seed", first)
    for seed in range(first, first + MANY):
        check(seed, tmp_path)


def grows(most: int) -> Any:
    table, found = {"a": 1, "b": 2}, []
    for key in table:
        found.append(key)
        if len(found) == most:
            table["c"] = 3
        checkpoint()
    return found


def test_dictionary_that_grew_while_it_was_gone_through_is_refused_by_python_as_ever(tmp_path: Path) -> None:
    """A random program (seed 5086) went on behind the hint where Python raises."""
    function = checkpoints(directory=tmp_path, every=1)(grows)

    def call(most: int) -> Any:
        try:
            return function(most)
        except RuntimeError as error:
            return str(error)

    assert cut_behind_every_checkpoint(lambda: call(9)) == (["a", "b"], 2)
    assert cut_behind_every_checkpoint(lambda: call(1)) == ("dictionary changed size during iteration", 1)
