"""What generators of the device show of their state, and that they can be set back to it."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import proxied
import pytest

pytestmark = pytest.mark.drawn(2)


def lines(output: str) -> list[str]:
    """Those of generator_states.py."""
    return re.findall(r"^\d+ \d+ \S*$", output, re.MULTILINE)


def test_sixteen_bytes_lead_a_generator_back_to_the_numbers_that_a_cpu_gives_also_after_a_fault(
    tmp_path: Path,
) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    script = proxied.WORKLOADS / "generator_states.py"
    command = [sys.executable, str(script), "cpu", str(seed)]
    native = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert native == lines("\n".join(native))
    undisturbed = proxied.run(proxied.python(script, "cuda", str(seed)), folder=tmp_path)
    assert undisturbed.status == 0, undisturbed.output[-3000:]
    assert lines(undisturbed.output) == native
    step, call = random.Random(seed).randrange(3, 60), random.Random(seed).randrange(1, 10)
    drill = ("--drill", f"kill-server rank=0 step={step} call={call}")
    killed = proxied.run(proxied.python(script, "cuda", str(seed)), folder=tmp_path, options=drill)
    assert killed.status == 0, killed.output[-3000:]
    assert killed.report["recoveries"][0]["recovered"]
    assert lines(killed.output) == native


def test_a_model_of_the_meta_device_is_initialised_in_shards_and_survives_a_fault(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    draw = random.Random(seed)
    command = proxied.ranks(2, proxied.WORKLOADS / "sharded_initialisation.py")
    undisturbed = proxied.run(command, folder=tmp_path)
    assert undisturbed.status == 0, undisturbed.output[-3000:]
    drill = f"kill-server rank={draw.randrange(2)} step={draw.randrange(2, 8)} call={draw.randrange(1, 300)}"
    killed = proxied.run(command, folder=tmp_path, options=("--drill", drill))
    assert killed.status == 0, killed.output[-3000:]
    assert killed.report["recoveries"][0]["recovered"]
    found = [sorted(line for line in run.output.splitlines() if line[:2] in ("0 ", "1 "))
             for run in (undisturbed, killed)]  # fmt: skip
    assert found[0] == found[1]
    assert len(found[0]) > 2 * 8
