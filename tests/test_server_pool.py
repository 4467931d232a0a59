"""The pool of device servers, with a spawner that tests hold up."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
from proxied import until

from understudy.recovery.servers import ServerPool

SPAWNER = """
import json, os, pathlib, signal, subprocess, sys

folder = pathlib.Path(sys.argv[1])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print(json.dumps({"ready": {"torch_version": "2", "capability": {}}}), flush=True)
for line in sys.stdin:
    child = subprocess.Popen(["sleep", "100"])
    (folder / "pids.new").write_text(f"{os.getpid()} {child.pid}")
    (folder / "pids.new").rename(folder / "pids")
    signal.sigwait([signal.SIGUSR1])
    print(json.dumps({"spawned": {"pid": child.pid}}), flush=True)
"""


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_server_that_is_being_forked_while_the_pool_stops_is_ended_with_the_others(tmp_path: Path) -> None:
    async def scene() -> int:
        pool = ServerPool(["cpu:0"], 0, tmp_path, [sys.executable, "-c", SPAWNER, str(tmp_path)])
        await pool.start()
        await asyncio.to_thread(until, (tmp_path / "pids").exists, "a server has been forked")
        spawner, pid = map(int, (tmp_path / "pids").read_text().split())
        stopping = asyncio.create_task(pool.stop())
        await asyncio.sleep(0)  # it has begun
        os.kill(spawner, signal.SIGUSR1)
        await asyncio.wait_for(stopping, 30)
        return pid

    pid = asyncio.run(scene())
    assert not is_running(pid)
