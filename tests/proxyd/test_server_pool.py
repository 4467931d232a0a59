"""The pool of device servers, with a spawner that tests hold up."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from pathlib import Path

import psutil
import pytest
from proxied import until

from understudy.proxy_server import spawner
from understudy.proxy_server.spawner import enter_gpu, visible_gpu
from understudy.recovery.config.settings import BadInput, DeviceSpec, missing_gpus, refuse_missing_gpus
from understudy.recovery.host.local_server import LocalServer
from understudy.recovery.host.servers import ServerPool
from understudy.recovery.host.spawner import SpawnerError
from understudy.recovery.machine.processes import Watched

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


SAYS_GPUS = """
import json, sys

gpus = ["GPU-a", "GPU-b", "GPU-c"]
print(json.dumps({"ready": {"torch_version": "2", "capability": {}, "gpu_uuids": gpus}}), flush=True)
for line in sys.stdin:
    print(json.dumps({"error": line.strip()}), flush=True)
"""


@pytest.mark.parametrize(
    ("known", "used"), [((), ("GPU-a", "GPU-b")), (("GPU-lost", "GPU-a"), ("GPU-lost", "GPU-a"))]
)
def test_a_pool_names_the_gpus_of_its_devices_and_no_others_of_the_host(
    known: tuple[str, ...], used: tuple[str, ...], tmp_path: Path
) -> None:
    """Those that a proxyd before this one knew stay those of the devices, whatever their numbers are now."""

    async def scene() -> tuple[tuple[str, ...], str]:
        command = [sys.executable, "-c", SAYS_GPUS]
        pool = ServerPool(["cuda:0", "cuda:1"], 0, tmp_path, command, known)
        await pool.start()
        with pytest.raises(SpawnerError) as refused:
            await pool.take("cuda:1")
        await pool.stop()
        return pool.gpus, str(refused.value)

    gpus, asked = asyncio.run(scene())
    assert gpus == used
    assert any(f'"gpu": "{one}"' in asked for one in used), asked


def test_each_server_sees_its_own_gpu_alone_of_those_that_proxyd_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [visible_gpu(index, 2) for index in range(2)] == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5ebe9fae")
    assert [visible_gpu(index, 2) for index in range(2)] == ["3", "GPU-5ebe9fae"]


def test_gpus_that_are_gone_are_told_by_what_was_known_of_them() -> None:
    known = ("GPU-a", "GPU-b", "", "GPU-d")  # the third one is a part of one
    assert missing_gpus(known, ["GPU-a", "GPU-b", "", "GPU-d"]) == []
    assert missing_gpus(known, ["GPU-b", "", "GPU-d"]) == [0]
    assert missing_gpus((), ["GPU-b"]) == []


def test_a_server_on_a_gpu_leaves_no_core_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    _, hard = before = resource.getrlimit(resource.RLIMIT_CORE)
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
        assert (enter_gpu("GPU-5"), os.environ["CUDA_VISIBLE_DEVICES"]) == ("cuda:0", "GPU-5")
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)


def test_more_gpus_than_cuda_shows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNDERSTUDY_TEST_SHARED_GPU", raising=False)
    refuse_missing_gpus(DeviceSpec("cuda", 2), 2)
    refuse_missing_gpus(DeviceSpec("cpu", 2), 0)
    with pytest.raises(BadInput, match="--devices cuda:2: CUDA shows 1 on this host"):
        refuse_missing_gpus(DeviceSpec("cuda", 2), 1)


ENDING = """
import json, os, subprocess, sys

print(json.dumps({"ready": {"torch_version": "2", "capability": {}}}), flush=True)
children = {}
for line in sys.stdin:
    if "ended" in (request := json.loads(line)):
        print(json.dumps({"status": children[request["ended"]].wait()}), flush=True)
        continue
    child = subprocess.Popen(["sleep", "100"])
    children[child.pid] = child
    print(json.dumps({"spawned": {"pid": child.pid}}), flush=True)
"""


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGSEGV, "SIGSEGV"), (signal.SIGABRT, "SIGABRT"), (signal.SIGKILL, "")]
)
def test_a_server_that_was_killed_is_told_from_one_that_crashed(
    tmp_path: Path, number: signal.Signals, name: str
) -> None:
    async def scene() -> str:
        pool = ServerPool([], 0, tmp_path, [sys.executable, "-c", ENDING])
        await pool.start()
        socket = tmp_path / "socket"
        server = LocalServer(Watched(await pool._spawner.spawn(socket, "cuda:0")), socket, "cuda:0")
        server.process.send(number)
        crash = await pool.crash_of(server)
        await server.close()
        await pool.stop()
        return crash

    assert asyncio.run(scene()) == name


def test_the_spawner_keeps_how_the_servers_ended_that_did_so_last(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [(pid, signal.SIGSEGV) for pid in range(100, 200)] + [(150, 256 * 3), (0, 0)]
    monkeypatch.setattr(os, "waitpid", lambda pid, options: ends.pop(0))
    monkeypatch.setattr(spawner, "_statuses", {})
    spawner.reap()
    assert len(spawner._statuses) == spawner.MOST_STATUSES
    assert (spawner._statuses[199], spawner._statuses[150]) == (-signal.SIGSEGV, 3)
