"""Paper 000's experiment: the example, the supervisor that kills it, and what is told of the outcomes."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import runpy
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import hints_cost
import pytest
import torch
from forked_calls import dies_behind, in_a_process, one_thread
from hints_attempts import ENDED, HINT, SAVED, Attempt, Outcome, Said, Way, run
from hints_report import Facts, markdown
from places import ROOT
from training_run import RunFailed

from understudy.hints import checkpoint, checkpoints

__all__ = ["one_thread"]  # a fixture

EXAMPLE = ROOT / "examples" / "resumable_mnist.py"
needs_mnist = pytest.mark.skipif(
    not (hints_cost.DATA / "t10k-images-idx3-ubyte.gz").exists(),
    reason=f"MNIST's test images are not in {hints_cost.DATA}",
)


def example() -> ModuleType:
    found = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert found is not None and found.loader is not None
    made = importlib.util.module_from_spec(found)
    sys.modules[EXAMPLE.stem] = made
    found.loader.exec_module(made)
    return made


def script(words: list[str]) -> str:
    """What the example prints, as if it were called from a shell."""
    sys.argv = [str(EXAMPLE), *words]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()


@needs_mnist
def test_example_killed_twice_has_the_weights_of_its_script_that_was_not(tmp_path: Path) -> None:
    mnist = example()
    images, labels = (each[:1150] for each in mnist.read(hints_cost.DATA))
    train = checkpoints(directory=tmp_path / "run", every=2)(mnist.train)

    mnist.train(images, labels, 1, 1)  # what PyTorch imports late, it imports once for all forks

    def attempt(dies: int) -> Any:
        dies_behind("saved", dies)
        return mnist.digest(train(images, labels, 2, 1)[1])

    statuses = [in_a_process(lambda dies=dies: attempt(dies))[0] for dies in (2, 1)]  # type: ignore[misc]
    status, digest = in_a_process(lambda: attempt(0))
    words = [str(tmp_path / "whole"), "--data", str(hints_cost.DATA), "--images=1150", "--epochs=2"]
    printed = in_a_process(functools.partial(script, words))
    assert (statuses, status, printed[0]) == ([77, 77], 0, 0)
    assert printed[1].split()[-1] == digest


@needs_mnist
@pytest.mark.long
def test_experiment_runs_through_and_tells_of_it(tmp_path: Path) -> None:
    words = ["--quick", "--output", str(tmp_path / "hints.json"), "--report", str(tmp_path / "hints.md")]
    assert hints_cost.main(words) == 0
    assert "| hints | 10% |" in (tmp_path / "hints.md").read_text()


def test_experiment_says_that_nothing_is_measured_where_there_are_no_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hints_cost.main(["--data", str(tmp_path), "--output", str(tmp_path / "hints.json")]) == 0
    assert f"MNIST's test images are not in {tmp_path}" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def sums(most: int) -> tuple[float, torch.Tensor]:
    """Of draws, some milliseconds each."""
    total, found = 0.0, torch.zeros(8)
    torch.manual_seed(1)
    for number in range(most):
        found += torch.rand(100_000).sort().values[:8] * number
        total += found[0].item()
        checkpoint()
    return total, found


def fails(most: int) -> None:
    raise ArithmeticError(most)


@pytest.mark.parametrize(
    "way", [Way("hints", 0.5), Way("fixed", 0.5, 3), Way("none")], ids=lambda way: way.name
)
def test_training_that_the_supervisor_kills_ends_with_the_bits_of_one_that_it_leaves_alone(
    way: Way, tmp_path: Path
) -> None:
    whole = Outcome.of(Way("none"), False, run(Way("none"), sums, (12,), 5.0, (), tmp_path / "whole"))
    kills = (0.02, whole.seconds / 2)
    killed = Outcome.of(way, True, run(way, sums, (12,), 5.0, kills, tmp_path / "killed"))
    assert whole.kills == 0 == whole.lost
    assert killed.kills >= 1
    assert killed.digest == whole.digest
    assert 0 < killed.lost < killed.seconds
    assert killed.checkpoints > 0 or way.name != "fixed"


def test_training_that_fails_by_itself_is_told_and_not_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunFailed, match="an attempt ended with status 1"):
        run(Way("none"), fails, (3,), 1.0, (), tmp_path)
    assert "ArithmeticError: 3" in capfd.readouterr().err


def test_what_is_lost_begins_with_the_last_durable_checkpoint() -> None:
    said = [Said(HINT, 1.0), Said(HINT, 2.0), Said(SAVED, 2.5), Said(HINT, 4.0)]
    killed = Attempt(0.5, 5.0, tuple(said))
    assert (killed.killed, killed.lost, killed.checkpoints, killed.saving) == (True, 2.5, 1, 0.5)
    assert Attempt(0.5, 5.0, tuple(said[:2])).lost == 4.5
    whole = Attempt(5.0, 9.0, (*said, Said(ENDED, 9.0, b"12345678")))
    assert (whole.killed, whole.lost) == (False, 0.0)
    outcome = Outcome.of(Way("hints", 0.1), True, [killed, whole])
    assert (outcome.seconds, outcome.checkpoints, outcome.kills, outcome.lost) == (8.5, 2, 1, 2.5)


def test_report_has_medians_and_the_least_and_the_most() -> None:
    none = Outcome("none", None, False, 4.0, 0, 0.0, 0, 0.0, "00")
    ways = [none, replace(none, failing=True, seconds=12.0, kills=3, lost=8.0)]
    for failing in (False, True):
        ways.append(Outcome("hints", 0.05, failing, 4.2, 4, 0.2, 2 * failing, 0.5 * failing, "00"))
    rounds = [[replace(each, seconds=each.seconds * factor) for each in ways] for factor in (1.0, 1.1, 1.5)]
    machine = {"commit": "abc", "date": "today", "cpu": "x", "cores": 2, "load_before": 0.0, "torch": "2"}
    facts = Facts(machine, 1, 0.5, 256, 0.016, 0.04, {"0.05": 50}, 9.0, "make bench-hints")
    text = markdown(facts, rounds)
    assert "| hints | 5% | 4.62 (4.20–6.30) | 1.050 | 4 | 0.20 |" in text
    assert "| none | – | 13.20 (12.00–18.00) | 3.000 | 3 | 8.00 | 0 |" in text
    assert "k 50 at 5%" in text and "at commit abc" in text
    assert "Others were at work" not in text
    busy = replace(facts, machine=machine | {"load_before": 3.0})
    assert "Others were at work" in markdown(busy, rounds)
    assert asdict(facts)["every"] == {"0.05": 50}
