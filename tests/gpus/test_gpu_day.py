"""What bench/gpu_day.py shows on a real GPU, on a simulated one: that it runs, not what it measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import simulated_device
from gpu_day import PARTS
from machine import ROOT

NATIVE_ALONE = {"facts", "host_results", "operators", "tests", "lone", "exact", "speed"}
"""Need PyTorch's own CUDA, or measure it."""
SHARED = {"ranks", "protected"}
"""Gloo of a CPU build takes no tensors of a GPU."""


def notes_of(part: str, folder: Path) -> list[dict[str, Any]]:
    """What one part writes."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "bench" / "gpu_day.py"), str(folder), part],
        env=os.environ | simulated_device.environment() | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads((folder / f"{part}.json").read_text())
    assert [one for one in found if "failed" in one] == []
    return found


@pytest.mark.drawn(6)
def test_a_script_sees_its_own_errors(tmp_path: Path) -> None:
    assertion, memory = [one["output"].splitlines()[-1] for one in notes_of("errors", tmp_path)]
    assert assertion.startswith("IndexError index 1000000000 is out of bounds")  # as the CPU's kernel says
    assert memory.startswith("OutOfMemoryError CUDA out of memory. Tried to allocate 16.00 TiB.")


@pytest.mark.long
@pytest.mark.parametrize("part", ["recovery", "nccl"])
def test_a_lone_rank_comes_back_by_snapshot_and_log_with_the_same_bits(part: str, tmp_path: Path) -> None:
    struck = [one for one in notes_of(part, tmp_path) if "recoveries" in one]
    assert len(struck) > 1
    assert [one["same_bits"] for one in struck] == [True] * len(struck)
    assert all(recovery["recovered"] for one in struck for recovery in one["recoveries"])


def test_every_part_is_tried_here_or_is_said_to_need_a_gpu() -> None:
    assert set(PARTS) == NATIVE_ALONE | SHARED | {"errors", "recovery", "nccl"}
