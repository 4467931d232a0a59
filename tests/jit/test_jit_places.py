"""A rank fails at any of forty places of a step, whether state is replicated, sharded or split: `torchrun`
starts the job again, and all ranks have the bits of one that never stopped (paper 001 §3)."""

from __future__ import annotations

import itertools
import os
import random
import re
import runpy
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import proxied
import psutil
import pytest
import zygotes
from jit_launch import environment, torchrun
from native_reference import native_reference
from places import TESTS

from understudy.jit.choosing import judge
from understudy.jit.reading import Directory

pytestmark = pytest.mark.drawn(4)

SCRIPT = TESTS / "workloads" / "jit_places.py"
PLACES: tuple[str, ...] = runpy.run_path(str(TESTS / "workloads" / "jit_step_places.py"))["PLACES"]
LACKS = ("hsdp", 2, "reduction-0")
"""Two ranks have one shard, and nothing to reduce but between replicas, five times in a step."""
ACTIONS = ("kill", "stop", "hold")
FIRST, APART = 5, 5
"""Steps: before so many of an attempt nothing is known of how long its collectives take."""
MINIMUM_STALL = 2.5
AT_ONCE = 10
"""Faults of one job."""
KILLED_S, HUNG_S = 4, 8
"""Roughly, of a fault and what follows it, with four ranks on two cores."""


@dataclass(frozen=True)
class Fault:
    """What happens to a rank in a step, counted from 0."""

    place: str
    action: str
    rank: int
    step: int

    def may_resume_behind(self, several_shards: bool) -> set[int]:
        """The step is lost if it had not all of this rank's gradients, and kept if all ranks had.

        In between, the launcher may end ranks that are slow before they have done the step.
        """
        if self.place == "gate":
            return {self.step, self.step + 1}
        at, reduced = PLACES.index(self.place), PLACES.index("behind-backward")
        if at < reduced:
            return {self.step}
        return {self.step + 1} if several_shards and at > reduced else {self.step, self.step + 1}

    def __str__(self) -> str:
        return f"{self.place}:{self.action}:{self.rank}:{self.step}"


def planned(places: Iterable[tuple[str, str, int]]) -> list[Fault]:
    """Faults at places, with actions, of ranks, in as many steps."""
    return [Fault(*what, FIRST + APART * number) for number, what in enumerate(places)]


Line = tuple[int, int]
"""Step and rank."""


def lines(said: Iterable[str]) -> list[tuple[Line, str]]:
    """What ranks had behind steps, in the order in which they said it."""
    found = [
        re.fullmatch(r"step (\d+)  rank (\d+)  (loss [0-9a-f]{8}  has [0-9a-f]{8})", one) for one in said
    ]
    return [((int(one[1]), int(one[2])), one[3]) for one in found if one]


def undisturbed(parallelism: str, ranks: int, steps: int) -> dict[Line, str]:
    """Of a job that never stopped, and knows nothing of `understudy.jit`."""
    folder = native_reference(
        lambda folder: proxied.ranks(ranks, SCRIPT, parallelism, str(steps), "undisturbed", str(folder))
    )
    return dict(lines(line for file in folder.iterdir() for line in file.read_text().splitlines()))


def assert_costs_one_step_and_no_bit(
    directory: Path, parallelism: str, ranks: int, faults: Sequence[Fault]
) -> None:
    steps = faults[-1].step + 3
    expected = undisturbed(parallelism, ranks, steps)
    script = [SCRIPT, parallelism, steps, "faults", directory, MINIMUM_STALL, *faults]
    said, errors = torchrun([*map(str, script)], ranks, len(faults), 60 + 30 * len(faults))

    happened = [line.split()[1:3] for line in errors if line.startswith("fault: ")]
    assert happened == [[fault.place, fault.action] for fault in faults]
    resumed = [int(line.split()[-1]) for line in said if line.startswith("goes on behind step")]
    assert resumed[0] == 0 and len(resumed) == 1 + len(faults)
    for fault, step in zip(faults, resumed[1:], strict=True):
        assert step in fault.may_resume_behind(parallelism != "ddp" and ranks > 2), fault
    printed = lines(said)
    assert [(line, bits) for line, bits in printed if expected[line] != bits] == []
    times = Counter(line for line, _ in printed)
    failed = {
        fault.step + 1 for fault in faults
    }  # not all ranks may have come to say what they had behind it
    assert {step for step, _ in expected.keys() - times.keys()} <= failed
    assert {step for (step, _), count in times.items() if count > 1} <= failed and max(times.values()) <= 2


SAMPLE = {
    "hsdp": (
        ("reduction-5", "kill", 3),
        ("optimizer-2", "hold", 1),
        ("behind-forward-1", "stop", 0),
        ("gate", "kill", 2),
    ),
    "tp": (("reduction-5", "kill", 1),),
    "ddp": (("optimizer-3", "kill", 2),),
}


@pytest.mark.parametrize("parallelism", SAMPLE)
def test_one_of_four_ranks_fails_at_a_place_of_a_step(tmp_path: Path, parallelism: str) -> None:
    assert_costs_one_step_and_no_bit(tmp_path / "ckpt", parallelism, 4, planned(SAMPLE[parallelism]))


def test_there_are_forty_places_of_a_step() -> None:
    assert len(set(PLACES)) == len(PLACES) == 40


def in_full() -> list[tuple[str, int, str, int]]:
    """Parallelism, ranks, action, and which of the jobs that the places are dealt out to."""
    jobs = range(0, len(PLACES), AT_ONCE)
    of_two = itertools.product(("ddp", "hsdp"), (2,), ACTIONS, jobs)
    return [*of_two, *itertools.product(("ddp", "hsdp", "tp"), (4,), ACTIONS, jobs)]


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest) -> None:
    """How long it will take, on the terminal."""
    seconds = sum(AT_ONCE * (KILLED_S if action == "kill" else HUNG_S) for _, _, action, _ in in_full())
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():  # type: ignore[union-attr]
        print(f"\n{len(in_full()) * AT_ONCE} faults: about {seconds // 60} minutes on two cores")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("parallelism", "ranks", "action", "first"), in_full())
def test_any_rank_fails_at_each_of_forty_places(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: None,
    parallelism: str,
    ranks: int,
    action: str,
    first: int,
) -> None:
    monkeypatch.delenv(zygotes.COLD, raising=False)  # else most of it would be `import torch`
    shift = ACTIONS.index(action)
    here = [
        number for number in range(first, first + AT_ONCE) if (parallelism, ranks, PLACES[number]) != LACKS
    ]
    faults = planned((PLACES[number], action, (number + shift) % ranks) for number in here)
    assert_costs_one_step_and_no_bit(tmp_path / "ckpt", parallelism, ranks, faults)


@pytest.mark.long
@pytest.mark.parametrize("action", ACTIONS)
def test_one_of_two_stages_of_two_replicas_fails(tmp_path: Path, action: str) -> None:
    places = [("before-forward-1", 0), ("before-backward-4", 3), ("reduction-5", 2), ("reduction-0", 1)]
    places += [("behind-backward", 0), ("optimizer-1", 2), ("optimizer-0", 3), ("boundary", 1)]
    faults = planned((place, action, rank) for place, rank in places)
    assert_costs_one_step_and_no_bit(tmp_path / "ckpt", "pp", 4, faults)


def ranks_of(job: subprocess.Popen[str]) -> list[int]:
    return [rank.pid for rank in psutil.Process(job.pid).children()]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("parallelism", ["hsdp", "tp", "pp"])
@pytest.mark.parametrize("all_ranks", [True, False], ids=["all-are-ended", "one-is-killed"])
def test_job_of_several_shards_that_fails_at_a_random_instant_has_a_whole_step(
    tmp_path: Path, seed: int, parallelism: str, all_ranks: bool
) -> None:
    """Every step that a rank had done by then is there, and one step is lost at most, wherever others were.

    A rank that waits at the gate does its step alone and says so; then the job may go on in front of that.
    """
    draw = random.Random(seed)
    for number in range(10):
        directory = tmp_path / str(number)
        script = [parallelism, "1000000", "faults", str(directory), str(MINIMUM_STALL)]
        job = subprocess.Popen(
            proxied.ranks(4, SCRIPT, *script), env=environment(), stdout=subprocess.PIPE, text=True
        )
        with job:
            assert job.stdout is not None
            newest, wanted = 0, draw.randrange(4, 12)
            while newest < wanted:
                newest = max(
                    (step for (step, _), _ in lines([job.stdout.readline().rstrip()])), default=newest
                )
            time.sleep(draw.random() * 0.03)  # this is the instant
            os.kill(
                job.pid if all_ranks else draw.choice(ranks_of(job)),
                signal.SIGTERM if all_ranks else signal.SIGKILL,
            )
            done = newest
            newest = max([step for (step, _), _ in lines(job.stdout.read().splitlines())] + [done])
        choice = judge(Directory(directory, os.getuid())).choice
        assert choice is not None and choice.step >= done and choice.step - newest in (-1, 0, 1), number
