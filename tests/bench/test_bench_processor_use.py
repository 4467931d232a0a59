"""What `make bench` says that the sides of a run take of the processor."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import processor_use

SCRIPT = """
import sys, time
print("begins", flush=True)
for line in sys.stdin:
    begun = time.process_time()
    while time.process_time() - begun < 0.1:
        pass
    for _ in range(20):
        time.sleep(0.001)
    print("done", flush=True)
"""


@pytest.fixture
def training(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that works for 0.1 s whenever it is told to, and sleeps 20 times."""
    script = tmp_path / "training_of_a_test.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    yield process
    process.stdin.close()
    process.wait()
    process.stdout.close()


def works(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("go\n")
    assert process.stdout.readline() == "done\n"


def test_processor_time_of_a_step_is_that_of_the_side_that_runs_the_script(
    training: subprocess.Popen[str],
) -> None:
    meter = processor_use.Meter("somewhere/training_of_a_test.py", 8)
    meter.on_step(1)
    for step in (2, 4, 6, 8):
        works(training)
        meter.on_step(step)
    sides = meter.per_step()
    assert 0.05 <= sides["worker"]["cpu_s"] <= 0.1  # three times 0.1 s in the six steps between the looks
    assert 3 * 20 / 6 <= sides["worker"]["sleeps"] <= 3 * 25 / 6
    assert sides["server"] == dict.fromkeys(sides["server"], 0)


def test_of_a_run_that_is_begun_again_only_the_last_attempt_counts(training: subprocess.Popen[str]) -> None:
    meter = processor_use.Meter("training_of_a_test.py", 8)
    for step in (2, 8, 2):
        meter.on_step(step)
    assert meter.per_step() == {}
    works(training)
    meter.on_step(8)
    assert 0.1 / 6 <= meter.per_step()["worker"]["cpu_s"] <= 0.2 / 6


def test_script_that_says_too_few_steps_is_told_nothing_of() -> None:
    meter = processor_use.Meter("silent.py", 8)
    meter.on_step(8)
    assert meter.per_step() == {}
    assert processor_use.medians([{}, {}]) == {}
    assert processor_use.rows({"native": {}, "proxied": {}}) == []


def test_medians_and_rows_are_of_all_turns() -> None:
    def of(*cpu_us: float) -> processor_use.Sides:
        sides = zip(("worker", "server", "control"), cpu_us, strict=True)
        return {side: {"cpu_s": 1e-6 * us, "sleeps": us, "preemptions": 0.0} for side, us in sides}

    native = processor_use.medians([of(500, 0, 0), of(400, 0, 0), of(100, 0, 0)])
    proxied = processor_use.medians([of(300, 90, 10), of(300, 90, 10), of(999, 999, 999)])
    cpu, switches = processor_use.rows({"native": native, "proxied": proxied})
    assert cpu[1] == "1.000 x" and "worker 300, server 90, proxyd 10, native 400 us" in cpu[2]
    assert switches[1] == "90.00"
