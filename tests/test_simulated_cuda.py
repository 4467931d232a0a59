"""A CUDA device that is simulated: what it is like, and what runs on it. Nothing of it is a GPU's result."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import simulated_device
from native_reference import native_losses
from proxied import WORKLOADS
from training_run import Training

TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the suite runs on something else, too."""
    for name, value in simulated_device.environment().items():
        monkeypatch.setenv(name, value)


def does(case: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """One case of workloads/simulated_cuda_cases.py."""
    paths = os.pathsep.join([str(TESTS / "harness"), str(TESTS), os.environ["PYTHONPATH"]])
    return subprocess.run(
        [sys.executable, str(WORKLOADS / "simulated_cuda_cases.py"), case],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | variables,
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("asynchrony", ["50 0 52000.0"]),
        ("poison", ["True False"]),
        ("limit", ["CUDA out of memory", str(1 << 30)]),
        ("sticky", ["700 CUDA error: an illegal memory access was encountered"] * 2),
        ("assertion", ["710 CUDA error: device-side assert triggered"]),
    ],
)
def test_it_behaves_as_a_gpu_does(case: str, said: list[str]) -> None:
    done = does(case)
    assert (done.returncode, done.stdout.splitlines()) == (0, said), done.stderr


def test_the_host_cannot_touch_its_memory() -> None:
    done = does("touch")
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "touches\n"), done.stderr


@pytest.mark.cold
def test_a_training_on_two_of_them_has_the_bits_of_the_cpu_through_a_killed_server_and_a_failed_call(
    folder: Path,
) -> None:
    training = Training("char_gpt.py", 2, 8)
    drills = ("kill-server rank=1 step=4 call=200", "call-error rank=0 step=6 call=100")
    done = training.run(folder / "run", proxied=True, drills=drills)
    found = [(one["fault"], one["recovered"]) for one in done.report["recoveries"]]
    assert found == [("server-died", True), ("call-failed", True)]
    assert done.losses == native_losses(training)


def test_the_executors_tests_pass_on_it() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:xdist", str(TESTS / "test_executor.py")],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    print(done.stdout[-3000:])
    assert done.returncode == 0
    passed = int(done.stdout.splitlines()[-1].split(" passed")[0].split()[-1])
    assert passed > 100
