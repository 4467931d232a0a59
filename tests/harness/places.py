"""Where tests, and what they need, are found: the same from whatever folder a test is in."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
HARNESS = TESTS / "harness"
MODULES = [str(HARNESS), *sorted(map(str, HARNESS.glob("[a-z]*/")))]
"""Where a process looks that is to find the modules of the harness as a test does."""
