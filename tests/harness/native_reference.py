"""Runs without us that others are compared with: made once for each thing that determines them.

They are deterministic by the premise of all tests, so what one run has left is what another would leave.
`build/native/` holds a folder for each; `make clean` removes them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from training_run import ROOT, Training, driver, execute_natively

PLACE = ROOT / "build" / "native"
SOURCES = ("examples", "tests/workloads", "bench/workloads")
"""Scripts import each other there: a change of any of them makes all references anew."""
STANDS_FOR_FOLDER = Path("/FOLDER")
PATIENCE_S = 600.0
"""A test that takes so long fails by its own limit; a machine that is busy is no reason to."""


def native_reference(command: Callable[[Path], list[str]], timeout_s: float = PATIENCE_S) -> Path:
    """The folder in which `command(folder)` has left its results; nobody may write there.

    Raises RunFailed.
    """
    made = PLACE / _name(command(STANDS_FOR_FOLDER))
    if not made.exists():
        PLACE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="new-", dir=PLACE) as folder:
            new = Path(folder, "results")
            new.mkdir()
            execute_natively(command(new), timeout_s)
            try:
                new.rename(made)
            except OSError:
                if not made.exists():  # else another test process was quicker
                    raise
    return made


def native_losses(training: Training) -> list[list[str]]:
    """Of each rank and step, as bits."""
    losses = native_reference(lambda folder: training.command(folder, native=True)) / "losses"
    return training.losses(losses)


def _name(words: list[str]) -> str:
    facts = "\0".join([*_surroundings(), *words, driver(), os.environ.get("OMP_NUM_THREADS", "1")])
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


@functools.cache
def _surroundings() -> tuple[str, ...]:
    """What determines results beside the command."""
    sources = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]
    installed = sorted(f"{one.name}=={one.version}" for one in importlib.metadata.distributions())
    data = hashlib.sha256()
    for path in sources:
        data.update(f"{path}\0".encode() + path.read_bytes())
    return (data.hexdigest(), sys.version, platform.platform(), _processor(), *installed)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith("model name")), platform.machine())
