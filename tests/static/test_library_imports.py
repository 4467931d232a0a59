"""The library for scripts needs PyTorch alone, and its import costs next to nothing beyond PyTorch's."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.drawn(4)

PARTS = ["understudy", "understudy.data", "understudy.jit", "understudy.hints"]
LONGEST_S = 0.05
"""Of an import, beyond PyTorch's: the issue's bound."""
MEASURE = """
import importlib, json, sys, time
import torch
before, times = set(sys.modules), []
for _ in range(3):
    for name in set(sys.modules) - before:
        del sys.modules[name]
    begun = time.thread_time()
    importlib.import_module(sys.argv[1])
    times.append(time.thread_time() - begun)
tops = {name.partition(".")[0] for name in set(sys.modules) - before}
ours = {".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("understudy")}
print(json.dumps({"seconds": times, "tops": sorted(tops), "ours": sorted(ours)}))
"""


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_the_library_imports_pytorch_and_the_standard_library_alone_and_quickly(part: str) -> None:
    command = [sys.executable, "-P", "-c", MEASURE, part]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout)
    print(found)

    assert set(found["tops"]) - sys.stdlib_module_names == {"understudy"}
    assert {"understudy", part} <= set(found["ours"]) <= {"understudy", "understudy.durable", part}
    assert min(found["seconds"]) <= LONGEST_S
