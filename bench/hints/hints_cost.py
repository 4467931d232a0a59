"""`make bench-hints`: paper 000's experiment (§4), and what it did not get to: with failures.

    .venv/bin/python bench/hints/hints_cost.py [--quick] [--runs N] [--seed N] [--data FOLDER]

writes bench/results/hints.json and docs/reports/hints.md; with --quick, whose figures mean nothing, only
bench/results/hints-quick.json. Ends with status 1 where a single bit of a result is another one. FOLDER is
that of MNIST's test images; where it is not there, nothing is measured, which is said. bench/README.md says
how.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import torch
from hints_attempts import HINT, SAVED, Outcome, Way, failures, run
from hints_report import Facts, markdown
from machine import ROOT, describe_machine
from resumable_mnist import HELD_BACK, read, train
from training_run import RunFailed

DATA = ROOT.parent / "shared" / "data" / "mnist"
FAILURES = 2.0
"""In the time that the plain function takes, on average."""


@dataclass(frozen=True)
class Effort:
    """How much to measure."""

    runs: int
    overheads: tuple[float, ...]
    images: int
    epochs: int


FULL = Effort(runs=5, overheads=(0.05, 0.10, 0.15), images=5000, epochs=4)
QUICK = Effort(runs=1, overheads=(0.10,), images=2000, epochs=1)


class Experiment:
    """Its function, and what is known of it before the first round."""

    def __init__(self, effort: Effort, data: Path, seed: int, folder: Path) -> None:
        self._effort, self._seed, self._folder = effort, seed, folder
        images, labels = read(data)
        self._arguments = (images[: effort.images], labels[: effort.images], effort.epochs, seed)
        self._runs = 0
        logging.getLogger("understudy.hints").setLevel(logging.ERROR)  # hints of a plain function say so
        few = images[: 2 * HELD_BACK], labels[: 2 * HELD_BACK]
        train(*few, 1, seed)  # what is imported late is imported once for all forks
        _say("the plain function, and each tenth hint")
        self.rate = 1.0  # of no run that is killed
        plain = min((self._run(Way("none"), None) for _ in range(2)), key=lambda each: each.seconds)
        self.expected, self.rate = plain.digest, FAILURES / plain.seconds
        (attempt,) = run(Way("each tenth", every=10), train, self._arguments, self.rate, (), folder / "tenth")
        pairs = [*zip(attempt.said, attempt.said[1:], strict=False)]
        self.step = statistics.median(
            now.at - before.at for before, now in pairs if (now.what, before.what) == (HINT, HINT)
        )
        self.checkpoint = statistics.median(now.at - before.at for before, now in pairs if now.what == SAVED)
        self.hints = sum(each.what == HINT for each in attempt.said)
        self.every = {
            overhead: math.ceil(self.checkpoint / (overhead * self.step)) for overhead in effort.overheads
        }

    def round(self, number: int) -> list[Outcome]:
        """Of all ways, undisturbed and killed, in an order of its own.

        Raises RunFailed for a bit that differs.
        """
        ways = [Way("none")]
        for overhead, every in self.every.items():
            ways += [Way("hints", overhead), Way("fixed", overhead, every)]
        turns = [(way, failing) for way in ways for failing in (False, True)]
        random.Random(self._seed + number).shuffle(turns)
        found = []
        for way, failing in turns:
            _say(f"round {number + 1} of {self._effort.runs}: {_named(way)}{', killed' if failing else ''}")
            found.append(self._run(way, self._seed + number if failing else None))
            if found[-1].digest != self.expected:
                raise RunFailed(f"{_named(way)}: the result is not that of the undisturbed function")
        return found

    def _run(self, way: Way, seed: int | None) -> Outcome:
        self._runs += 1
        folder = self._folder / str(self._runs)
        kills = failures(self.rate, seed) if seed is not None else ()
        return Outcome.of(way, seed is not None, run(way, train, self._arguments, self.rate, kills, folder))


def measure(effort: Effort, data: Path, seed: int, command: str) -> tuple[Facts, list[list[Outcome]]]:
    """All of it. Raises RunFailed."""
    begun, machine = time.monotonic(), describe_machine()
    torch.set_num_threads(1)  # before anything is computed: forks have no pool of threads
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-hints-", dir=ROOT / "build") as folder:
        experiment = Experiment(effort, data, seed, Path(folder))
        rounds = [experiment.round(number) for number in range(effort.runs)]
    every = {str(overhead): k for overhead, k in experiment.every.items()}
    facts = Facts(
        machine, seed, experiment.rate, experiment.hints, experiment.step, experiment.checkpoint,
        every, time.monotonic() - begun, command,
    )  # fmt: skip
    return facts, rounds


def _named(way: Way) -> str:
    return way.name if way.overhead is None else f"{way.name} {way.overhead:.0%}"


def _say(what: str) -> None:
    print(f"bench-hints: {what}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run: the numbers mean nothing")
    parser.add_argument("--runs", type=int, help="of each way; 5, with --quick 1")
    parser.add_argument("--seed", type=int, default=1, help="of the training, of the order and of failures")
    parser.add_argument("--data", type=Path, default=DATA, help="the folder of MNIST's test images")
    parser.add_argument("--output", type=Path, help="JSON elsewhere")
    parser.add_argument("--report", type=Path, help="Markdown elsewhere")
    given = parser.parse_args(arguments)
    if given.runs is not None and given.runs < 1:
        parser.error(f"--runs is {given.runs}; it must be 1 or more.")
    if not (given.data / "t10k-images-idx3-ubyte.gz").exists():
        _say(f"nothing is measured, because MNIST's test images are not in {given.data}")
        return 0
    _say(f"seed {given.seed}")
    results = ROOT / "bench" / "results"
    output = given.output or results / ("hints-quick.json" if given.quick else "hints.json")
    report = given.report or (None if given.quick else ROOT / "docs" / "reports" / "hints.md")
    options = [*["--quick"] * given.quick, *([f"--runs={given.runs}"] if given.runs else [])]
    command = "make bench-hints" + (f" OPTIONS='{' '.join(options)}'" if options else "")
    effort = QUICK if given.quick else FULL
    effort = replace(effort, runs=given.runs or effort.runs)
    try:
        facts, rounds = measure(effort, given.data, given.seed, command)
    except RunFailed as problem:
        _say(f"FAILED: {problem}")
        return 1
    whole: dict[str, Any] = {
        **asdict(facts),
        "rounds": [[asdict(each) for each in found] for found in rounds],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(whole, indent=1) + "\n")
    text = markdown(facts, rounds)
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
