"""A rank fails in the middle of a step; `torchrun` starts the job again, and its losses are those of one that
never stopped, bit for bit (paper 001 §3)."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from jit_launch import environment, torchrun
from places import TESTS
from start_ranks import free_port

pytestmark = pytest.mark.drawn(5)

SCRIPT = TESTS / "workloads" / "jit_faults.py"
STEPS = 28
OPTIONS = ("--steps", str(STEPS), "--minimum-stall", "2.5")


@dataclass(frozen=True)
class Fault:
    """What happens to a rank in a step (counted from 0), and where the job may go on behind it."""

    place: str
    action: str
    rank: int
    step: int

    @property
    def resumes_behind(self) -> int:
        """A fault in front of the step's last all-reduce loses the step; behind it, the other rank has it."""
        reduced = ("gradients", "optimizer", "behind-optimizer", "boundary")
        return self.step + (self.place in reduced)

    def __str__(self) -> str:
        return f"{self.place}:{self.action}:{self.rank}:{self.step}"


# Rank 0 prints: what it did not get to print is printed by no one if the other rank has the step.
FAULTS = (
    Fault("loss", "kill", 1, 4),
    Fault("backward", "stop", 0, 8),
    Fault("optimizer", "kill", 1, 13),
    Fault("forward", "hold", 1, 17),
    Fault("behind-optimizer", "stop", 1, 22),
)
MORE = (
    Fault("batch", "stop", 1, 3),
    Fault("gradients", "kill", 1, 6),
    Fault("optimizer", "stop", 1, 10),
    Fault("boundary", "kill", 0, 13),
    Fault("gradients", "raise", 1, 16),
    Fault("forward", "raise", 1, 18),
    Fault("batch", "exit", 0, 21),
)


def losses(said: Iterable[str]) -> list[tuple[int, str]]:
    """Step and bits, in the order in which they were printed."""
    found = [re.fullmatch(r"step (\d+)  loss \S+  ([0-9a-f]{8})", line) for line in said]
    return [(int(one[1]), one[2]) for one in found if one]


def run(script: Sequence[str | Path], directory: Path) -> str:
    """What rank 0 of two says that no launcher watches."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    place["PYTHONFAULTHANDLER"] = "1"  # one that hangs says where, as it is aborted
    ranks = [
        subprocess.Popen(
            [sys.executable, *map(str, script), str(directory), *OPTIONS],
            env=environment() | place | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    except subprocess.TimeoutExpired:
        for rank in ranks:
            rank.send_signal(signal.SIGABRT)
            rank.wait(30)
        raise
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert not list(directory.glob("step-*"))
    return said[0]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of a job that never stopped, by step. Nobody had to save, so nobody did."""
    directory = tmp_path_factory.mktemp("undisturbed") / "ckpt"
    return dict(losses(run([SCRIPT, ""], directory).splitlines()))


def test_rank_that_works_alone_for_longer_than_a_stall_may_last_is_waited_for(
    tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    """An evaluation, or a checkpoint of its own: the others hear that it is at work."""
    said = run([SCRIPT, "batch:work:1:8"], tmp_path / "ckpt")
    assert dict(losses(said.splitlines())) == undisturbed


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(FAULTS[:2], id="two-places"),
        pytest.param(FAULTS[2:], id="three-others"),
        pytest.param(FAULTS, id="five-places", marks=pytest.mark.long),
        pytest.param(MORE, id="seven-more", marks=pytest.mark.long),
    ],
)
def test_rank_that_fails_anywhere_in_a_step_costs_no_more_than_this_step_and_no_bit(
    tmp_path: Path, undisturbed: dict[int, str], faults: tuple[Fault, ...]
) -> None:
    script: list[str | Path] = [SCRIPT, ",".join(map(str, faults)), tmp_path / "ckpt", *OPTIONS]
    said, errors = torchrun(script, ranks=2, restarts=8)

    resumed = [int(line.split()[-1]) for line in said if line.startswith("goes on behind step")]
    assert resumed == [fault.resumes_behind for fault in faults]
    printed = losses(said)
    assert all(undisturbed[step] == bits for step, bits in printed)
    assert {step for step, _ in printed} == undisturbed.keys() == set(range(1, STEPS + 1))
    assert len(printed) <= STEPS + len(faults), "no fault has more than one step redone"
    saves = [line for line in errors if re.search(r"understudy.jit: rank \d: step \d+ saved in", line)]
    for fault in faults:
        by_whom = f"rank {1 - fault.rank}: step {fault.resumes_behind} saved"
        assert any(by_whom in line for line in saves)
        if fault.action not in ("raise", "hold"):  # the rank itself arrives as well
            (line,) = [line for line in saves if by_whom in line]
            assert f"did not arrive: rank {fault.rank} (" in line
