"""What every test shares: a seed, printed with a failure and settable to repeat it."""

import os
import random

import pytest


@pytest.fixture
def seed() -> int:
    """A seed for this test: `UNDERSTUDY_TEST_SEED`, or a new one. Captured output shows it on failure."""
    chosen = int(os.environ.get("UNDERSTUDY_TEST_SEED") or random.SystemRandom().randrange(2**31))
    print(f"repeat with UNDERSTUDY_TEST_SEED={chosen}")
    return chosen
