"""Ten functions are killed at every hint and at random instants, and go on to the same bits.

Paper 000 (§4.2.1) did this for one training, and found that generators had been forgotten.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hinted
import numpy
import pytest
import torch
from forked_calls import bits, dies_behind, in_a_process, one_thread
from places import ROOT

from understudy.hints import checkpoints

__all__ = ["one_thread"]  # a fixture

pytestmark = pytest.mark.drawn(10)

SHORT = 3
MANY = 100


def prepare(name: str, folder: Path) -> Callable[[], tuple[Any, ...]]:
    """Puts a function's files there; what is returned makes its arguments, equal in each process."""
    if name != "pipeline":
        amount = {"training": 2, "tree_search": 5, "k_means": 3, "nested_loops": 6, "exceptions": 5}.get(
            name, 7
        )
        return lambda: (hinted.argument() if name == "aliasing" else amount,)
    folder.mkdir()
    text = "title\n" + "".join(f"word{n % 3} büro{n} last\n" for n in range(7))
    (folder / "in.txt").write_text(text, encoding="utf-8")
    return lambda: (folder,)


NAMES = [
    "training",
    "tree_search",
    "k_means",
    "pipeline",
    "nested_loops",
    "exceptions",
    "closures",
    "aliasing",
    "matching",
    "iterators",
]


def outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """What a caller can see of a call: result, arguments, globals, and where the generators are."""
    result = function(*arguments)
    drawn = (random.random(), numpy.random.random(), torch.rand(1))
    return bits([result, arguments, hinted.LOG, hinted.rounds, hinted.TOTALS, drawn])


def warm(name: str) -> None:
    """What PyTorch imports late is imported once, and not in each fork."""
    if name == "training":
        hinted.training(1)


@pytest.mark.parametrize("name", NAMES)
def test_function_killed_behind_every_hint_in_turn_gives_the_bits_of_one_that_never_stopped(
    name: str, tmp_path: Path
) -> None:
    expected, _ = undisturbed(name, tmp_path / "undisturbed")
    arguments = prepare(name, tmp_path / "data")
    function = checkpoints(directory=tmp_path / "run", every=1)(getattr(hinted, name))

    def killed_at_its_next_hint() -> Any:
        dies_behind("saved", 1)
        return outcome(function, arguments())

    kills = 0
    while (answer := in_a_process(killed_at_its_next_hint))[0] == 77:
        kills += 1
        assert kills < 200
    assert answer[0] == 0
    assert kills >= 5
    assert same(name, answer[1], expected)
    assert os.listdir(tmp_path / "run") == []


@pytest.mark.parametrize("many", [SHORT, pytest.param(MANY, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", NAMES)
def test_function_killed_at_random_instants_gives_the_bits_of_one_that_never_stopped(
    name: str, many: int, tmp_path: Path
) -> None:
    expected, seconds = undisturbed(name, tmp_path / "undisturbed")
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    instants = random.Random(seed)
    for number in range(many):
        arguments = prepare(name, tmp_path / f"data{number}")
        function = checkpoints(directory=tmp_path / f"run{number}", every=instants.choice([1, 1, 2, 3]))(
            getattr(hinted, name)
        )
        instant = instants.uniform(0, 6 * seconds)  # saving takes longer than the function itself

        def cut(function: Any = function, arguments: Any = arguments, instant: float = instant) -> Any:
            signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_VIRTUAL, max(instant, 1e-4))
            return outcome(function, arguments())

        status, answer = in_a_process(cut)
        assert status in (0, -signal.SIGVTALRM)
        if status:
            status, answer = in_a_process(lambda f=function, a=arguments: outcome(f, a()))  # type: ignore[misc]
            assert status == 0
        assert same(name, answer, expected)


def undisturbed(name: str, folder: Path) -> tuple[Any, float]:
    """The outcome of the plain function, and the CPU seconds that it takes."""
    warm(name)
    arguments = prepare(name, folder)

    def timed() -> Any:
        begin = time.process_time()
        return outcome(getattr(hinted, name), arguments()), time.process_time() - begin

    status, answer = in_a_process(timed)
    assert status == 0
    return answer  # type: ignore[no-any-return]


def same(name: str, found: Any, expected: Any) -> bool:
    """All but the folder of `pipeline`, which is another one for each run."""
    if name == "pipeline":
        found[1][1] = expected[1][1] = None
    return bool(found == expected)


SCRIPT = """
import logging, os, random, signal, sys
from pathlib import Path
from understudy.hints import checkpoint, checkpoints, running

logging.basicConfig(level=logging.INFO)
SENTINEL = object()
goes_on = bool(os.listdir(sys.argv[1]))

@checkpoints(directory=sys.argv[1], every=1)
def search(words, sentinel=SENTINEL):
    table, best = {word: len(word) for word in words}, sentinel
    with open(Path(sys.argv[1]).parent / "log.txt", "w") as log:
        for number, word in enumerate(table):
            score = random.random() * table[word]
            best = (score, word) if best is SENTINEL or score > best[0] else best
            print(number, word, score, file=log)
            checkpoint()
            if number == 2 and not goes_on:
                os.kill(os.getpid(), signal.SIGKILL)
    return best

random.seed(5)
print(search(frozenset("a bb ccc dddd eeeee".split())))
"""


def run_script(path: Path, *arguments: str, hash_seed: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(
        [sys.executable, path, *arguments], capture_output=True, text=True, env=environment, timeout=120
    )


def test_the_example_finds_what_it_would_have_found_without_being_killed(tmp_path: Path) -> None:
    example = ROOT / "examples" / "resumable_search.py"

    def search(run: str, *options: str) -> subprocess.CompletedProcess[str]:
        words = [str(tmp_path / run), "--rollouts=300", "--every=20", *options]
        return run_script(example, *words, hash_seed="1")

    whole = search("whole")
    killed = [search("run", f"--die-at={number}").returncode for number in (70, 190)]
    rest = search("run")
    assert killed == [-signal.SIGKILL] * 2
    assert (whole.returncode, rest.returncode) == (0, 0)
    assert "goes on behind line" in rest.stderr and "goes on" not in whole.stderr
    assert rest.stdout == whole.stdout and " fields: " in whole.stdout


def test_script_that_is_killed_goes_on_in_a_new_process_with_other_hashes(tmp_path: Path) -> None:
    (tmp_path / "kill.py").write_text(SCRIPT)
    (tmp_path / "run").mkdir(0o700)
    first = run_script(tmp_path / "kill.py", str(tmp_path / "run"), hash_seed="1")
    assert first.returncode == -signal.SIGKILL, first.stderr
    log = (tmp_path / "log.txt").read_text()
    second = run_script(tmp_path / "kill.py", str(tmp_path / "run"), hash_seed="2")
    assert second.returncode == 0, second.stderr
    assert "goes on behind line" in second.stderr
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert "\n".join(lines).startswith(log)
    assert sorted(line.split()[1] for line in lines) == ["a", "bb", "ccc", "dddd", "eeeee"]
    draws = random.Random(5)
    scores = [(draws.random() * len(line.split()[1]), line.split()[1]) for line in lines]
    assert [float(line.split()[2]) for line in lines] == [score for score, _ in scores]
    assert second.stdout.strip() == repr(max(scores))
