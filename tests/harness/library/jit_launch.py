"""Jobs under `torchrun` whose ranks fail, for tests of just-in-time saves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path


def environment() -> dict[str, str]:
    """What docs/library.md says, and a thread for each rank."""
    return os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def torchrun(
    script: Sequence[str | Path], ranks: int, restarts: int, seconds: float = 200
) -> tuple[list[str], list[str]]:
    """Lines of stdout and stderr of a job that ends well.

    A rank that was stopped (it says so: "fault: PLACE stop pid PID") is killed as soon as the launcher
    ends it because of another one, and not 30 s later, as the launcher does.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", *map(str, script)]
    job = subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert job.stdout is not None and job.stderr is not None
    said: list[str] = []
    reader = threading.Thread(
        target=lambda out: said.extend(line.rstrip("\n") for line in out), args=(job.stdout,)
    )
    reader.start()
    guard = threading.Timer(seconds, os.killpg, (job.pid, signal.SIGKILL))
    guard.start()
    errors, stopped = [], 0
    began = time.monotonic()
    try:
        for line in job.stderr:
            errors.append(line.rstrip("\n"))
            if found := re.search(r"fault: \S+ stop pid (\d+)", line):
                stopped = int(found[1])
            if stopped and re.search(r"Sending process \d+ closing signal", line):
                os.kill(stopped, signal.SIGKILL)
                stopped = 0
        status = job.wait()
    finally:
        guard.cancel()
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        if stopped:
            os.kill(stopped, signal.SIGKILL)
        reader.join()
    print(*said, *errors, sep="\n")
    assert status == 0, "\n".join([f"status {status} {time.monotonic() - began:.0f} s on", *errors[-8:]])
    return said, errors
