"""Runs one case of a script of cases, in a process of its own with a simulated CUDA device."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from places import MODULES, ROOT
from proxied import WORKLOADS


def does(
    case: str, script: str = "simulated_cuda_cases.py", *more: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """One case of a script in workloads/; it may end before it has removed its log.

    The environment is to have what simulated_device.environment() says.
    """
    folders = (*MODULES, ROOT / "bench")
    paths = os.pathsep.join([*map(str, folders), os.environ["PYTHONPATH"]])
    with tempfile.TemporaryDirectory(prefix="understudy-test-", dir="/dev/shm") as shared_memory:
        own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "UNDERSTUDY_SHARED_MEMORY": shared_memory}
        return subprocess.run(
            [sys.executable, str(WORKLOADS / script), case, *more],
            env=os.environ | own | variables, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
