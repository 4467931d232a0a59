"""What every test shares: a seed, printed with a failure and settable to repeat it."""

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

VARIABLE = "UNDERSTUDY_SHARED_MEMORY"


def pytest_configure() -> None:
    """Shared memory of our own: a test process beside us looks for what was left there, too."""
    os.environ[VARIABLE] = tempfile.mkdtemp(prefix="understudy-test-", dir="/dev/shm")


def pytest_unconfigure() -> None:
    """Nothing stays."""
    shutil.rmtree(os.environ.pop(VARIABLE), ignore_errors=True)


@pytest.fixture
def seed() -> int:
    """A seed for this test: `UNDERSTUDY_TEST_SEED`, or a new one. Captured output shows it on failure."""
    chosen = int(os.environ.get("UNDERSTUDY_TEST_SEED") or random.SystemRandom().randrange(2**31))
    print(f"repeat with UNDERSTUDY_TEST_SEED={chosen}")
    return chosen


@pytest.fixture
def folder() -> Iterator[Path]:
    """Private, with a path short enough for sockets, which that of tmp_path may not be."""
    with tempfile.TemporaryDirectory(prefix="understudy-test-", dir="/tmp") as made:
        yield Path(made)
