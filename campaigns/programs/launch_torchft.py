"""Starts torchft's lighthouse and its replica groups: `python launch_torchft.py PLAN.json GROUPS RESTARTS`.

Each group is one rank under a torchrun of its own, which starts it again when it dies. What is over when a
group has completed all steps: the others get some time to complete them too, and are ended then (nobody
else would end a rank that is stopped). Exit status 0 if any group has completed them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from understudy.campaigns.programs import with_torchft
from understudy.campaigns.programs.plan import Plan

JOIN_MS, TICK_MS = 10_000, 100
"""As in torchft's README."""
PAUSE_S = 0.05


def main(arguments: Sequence[str]) -> int:
    from torchft.coordination import LighthouseServer

    path, groups, restarts = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    plan = Plan.read(path)
    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=with_torchft.least_groups(plan, groups),
        join_timeout_ms=JOIN_MS,
        quorum_tick_ms=TICK_MS,
    )
    processes = [_group(path, number, groups, restarts, lighthouse.address()) for number in range(groups)]
    try:
        return 0 if _completed(processes, plan.collective_timeout + with_torchft.DEAD_S) else 1
    finally:
        for process in processes:
            _end(process)
        lighthouse.shutdown()


def _group(path: Path, number: int, groups: int, restarts: int, lighthouse: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    words += ["--max-restarts", str(restarts), str(Path(with_torchft.__file__)), str(path)]
    ours = {
        "TORCHFT_LIGHTHOUSE": lighthouse,
        with_torchft.GROUP: str(number),
        with_torchft.GROUPS: str(groups),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0",  # a Manager looks for a store, and starts none
    }
    return subprocess.Popen(words, env=os.environ | ours, stdin=subprocess.DEVNULL)


def _completed(processes: Sequence[subprocess.Popen[bytes]], patience: float) -> bool:
    """Whether any has, once all have ended or had their time."""
    deadline = None
    while any(process.poll() is None for process in processes):
        if deadline is None and any(process.poll() == 0 for process in processes):
            deadline = time.monotonic() + patience
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(PAUSE_S)
    return any(process.poll() == 0 for process in processes)


def _end(process: subprocess.Popen[bytes]) -> None:
    """With its rank, which may be stopped: torchrun would wait for that."""
    if process.poll() is None:
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        process.wait()
        for rank in ranks:
            os.kill(int(rank), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
