"""Runs that are killed and started again: their samples and losses are exact (paper 002 §3.4, eqs. 2, 5)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT, TESTS
from start_ranks import free_port

from understudy.data.check import main as check

pytestmark = pytest.mark.drawn(10)

SCRIPT = TESTS / "workloads" / "resumed_data.py"
EXAMPLE = ROOT / "examples" / "resumable_data.py"
LEAVING = TESTS / "workloads" / "leaves_at_once.py"
STEPS = 13
"""Two epochs of five steps and a part of one; a checkpoint is taken behind every third step."""


def start(ranks: int, command: list[str]) -> list[int]:
    """The exit statuses of all ranks. One that waits for a rank that was killed is told by Gloo."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    running = [
        subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=120)[1].decode() for process in running]
    statuses = [process.returncode for process in running]
    print(*said, statuses, sep="\n")
    return statuses


def train(run: Path, ranks: int, *options: str, kill: tuple[int, int] | None = None) -> None:
    """Until STEPS, or killed: on one rank, in one step."""
    run.mkdir(exist_ok=True)
    words = [str(SCRIPT), str(run), f"--steps={STEPS}", *options]
    if kill is not None:
        words += ["--kill", *map(str, kill)]
    statuses = start(ranks, words)
    if kill is None:
        assert statuses == [0] * ranks
    else:
        assert statuses[kill[0]] == -signal.SIGKILL
        assert 0 not in statuses


def losses(run: Path, rank: int) -> dict[int, str]:
    """By step; where it was done twice, both must be the same."""
    found: dict[int, str] = {}
    for line in (run / f"losses-rank{rank}.txt").read_text().splitlines():
        step, bits = line.split()
        assert found.setdefault(int(step), bits) == bits, f"step {step} was redone with another loss"
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs of one and two ranks that never stopped."""
    runs = {ranks: tmp_path_factory.mktemp("undisturbed") / str(ranks) for ranks in (1, 2)}
    for ranks, run in runs.items():
        train(run, ranks)
    return runs


@pytest.mark.parametrize(
    ("options", "rank", "step"),
    [((), 1, 4), (("--overlapped",), 0, 8), (("--workers=1",), 1, 11)],
    ids=["blocking", "overlapped", "workers"],
)
def test_two_ranks_killed_and_started_again_repeat_samples_and_losses_bit_for_bit(
    folder: Path, undisturbed: dict[int, Path], options: tuple[str, ...], rank: int, step: int
) -> None:
    run = folder / "run"
    train(run, 2, *options, kill=(rank, step))
    train(run, 2, *options)

    assert check(["check", str(run), "--against", str(undisturbed[2])]) == 0
    assert check(["check", str(run)]) == 0
    for one in range(2):
        assert losses(run, one) == losses(undisturbed[2], one)
        assert losses(run, one).keys() == set(range(STEPS))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_ranks_and_exactly_its_samples(
    folder: Path, undisturbed: dict[int, Path], before: int, after: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "run"
    train(run, before, kill=(0, 7))
    train(run, after)

    for reference in undisturbed.values():
        assert check(["check", str(run), "--against", str(reference)]) == 0
    said = capsys.readouterr().out
    assert f"2 attempts on {before} → {after} ranks" in said
    # Step 6 of all ranks, and step 7 of a rank that was past its last collective when the other was killed.
    assert re.search(r"1 step redone|2 steps redone", said)


def test_sharded_state_is_that_of_each_rank_and_is_not_given_to_another_number(folder: Path) -> None:
    whole, run = folder / "whole", folder / "run"
    train(whole, 2, "--sharded", "--overlapped")
    train(run, 2, "--sharded", "--overlapped", kill=(1, 7))
    train(run, 2, "--sharded", "--overlapped")

    assert check(["check", str(run), "--against", str(whole)]) == 0
    assert [losses(run, rank) for rank in range(2)] == [losses(whole, rank) for rank in range(2)]
    assert losses(run, 0) != losses(run, 1)
    assert json.loads((run / "latest.json").read_text())["step"] == 12
    assert start(1, [str(SCRIPT), str(run), f"--steps={STEPS}", "--sharded"]) == [1]


@pytest.mark.drawn(4)
def test_the_example_goes_on_as_its_text_says(folder: Path) -> None:
    def example(run: str, steps: int, ranks: int) -> list[str]:
        words = [
            str(LEAVING),
            str(EXAMPLE),
            str(folder / run),
            f"--steps={steps}",
            "--samples=70",
            "--checkpoint-every=5",
        ]
        command = [sys.executable, *words, f"--workers={2 - ranks}"]
        if ranks > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            command[1:1] = launcher
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout.splitlines()

    whole = example("whole", 12, 1)
    part = example("run", 7, 1)
    rest = example("run", 12, 1)
    more = example("run", 14, 2)

    assert whole[0] == "begins on 1 ranks"
    assert rest[0] == "goes on behind step 5 on 1 ranks"
    assert more[0] == "goes on behind step 10 on 2 ranks"
    assert [*part[:6], *rest[1:]] == whole
    assert re.fullmatch(r"step 14  loss \d\.\d{4}  [0-9a-f]{8}", more[-1])
    assert check(["check", str(folder / "run")]) == 0
