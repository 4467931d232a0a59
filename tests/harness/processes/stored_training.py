"""A training that ends without warning, of which a snapshot is left on storage."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from proxied import until
from running_proxyd import running_proxyd
from training_run import installed

from understudy.recovery.base.control import blocking_channel, pb, rpc


def leave_a_snapshot(folder: Path, ranks: int, command: Sequence[str], least_step: int = 1) -> Path:
    """Where it is stored, once one of `least_step` or later is durable on all ranks."""
    socket, store = folder / "proxyd.sock", folder / "store"
    with running_proxyd(socket, ranks, ("--persist", str(store), "--persist-every", "1")):
        run = subprocess.Popen(
            [*installed("proxyrun"), "--socket", str(socket), *command],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        try:
            with blocking_channel(socket) as channel:
                daemon = rpc.DaemonStub(channel)

                def durable() -> bool:
                    assert run.poll() is None
                    status = daemon.GetStatus(pb.StatusRequest(), timeout=30)
                    return min((rank.persisted_step for rank in status.ranks), default=0) >= least_step

                until(durable, "a durable snapshot", within_s=120)
        finally:
            run.terminate()
            run.wait(60)
    return store
