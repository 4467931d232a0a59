"""NVML, asked by a process of its own; its GPUs are files, of a libnvidia-ml.so.1 of the tests."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog
from compiled_programs import program
from proxied import command_of, until

from understudy.proxy_server import capability
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.host.gpu_health import GpuHealth
from understudy.recovery.machine import nvml
from understudy.recovery.planning.gpu_verdict import Reading, Severity, reading_of

pytestmark = pytest.mark.drawn(5)

ONE, OTHER = "GPU-1", "GPU-2"
OFF = "Xid 79, it fell off the bus"


class Gpus:
    """The folder of the stand-in."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def tell(self, uuid: str, *lines: str) -> None:
        new = self._folder / "new"
        new.write_text("".join(f"{line}\n" for line in lines))
        new.rename(self._folder / uuid)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gpus:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(program("stand_in_nvml")))
    monkeypatch.setenv("STAND_IN_NVML", str(tmp_path))
    return Gpus(tmp_path)


def asked(*words: str) -> Any:
    """What the process says that asks NVML."""
    command = [*module_command("recovery.machine.nvml"), str(os.getpid()), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def askers() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "machine.nvml" in " ".join(command_of(one))]


def test_what_nvml_tells_of_a_gpu_is_read_and_what_it_does_not_tell_is_none(gpus: Gpus) -> None:
    gpus.tell(ONE, "uncorrected 7", "remap_pending 1", "remap_failed 0", "action 4", "mig 0")
    assert reading_of(asked("read", ONE)) == Reading(
        uncorrected=7, remap_pending=True, remap_failed=False, action=4
    )
    gpus.tell(ONE, "retirement_pending 1")
    assert reading_of(asked("read", ONE)) == Reading(retirement_pending=True)


@pytest.mark.parametrize(
    ("lines", "reading"),
    [
        (["lost"], Reading(trouble="lost")),
        (["reset"], Reading(trouble="reset")),
        (["mig 1", "uncorrected 7"], Reading(mig=True)),
    ],
)
def test_a_gpu_that_is_lost_or_divided_is_told(gpus: Gpus, lines: list[str], reading: Reading) -> None:
    gpus.tell(ONE, *lines)
    assert reading_of(asked("read", ONE)) == reading
    assert reading_of(asked("read", OTHER)) == Reading(trouble="unknown")


def test_the_installed_bindings_have_all_that_is_called() -> None:
    import pynvml

    tree = ast.parse(Path(nvml.__file__).read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nvml"
    }
    assert len(used) > 15
    assert [name for name in sorted(used) if not hasattr(pynvml, name)] == []


async def _begun(health: GpuHealth, *indices: int) -> None:
    for index in indices:
        health.begin(index)
    await asyncio.gather(*health._tasks._tasks)


def test_only_errors_since_a_rank_came_to_a_device_tell_against_it(gpus: Gpus) -> None:
    """Devices are named by UUID: CUDA numbers them otherwise than NVML."""

    async def scene() -> None:
        gpus.tell(ONE, "uncorrected 5")
        gpus.tell(OTHER, "uncorrected 5")
        health = GpuHealth([OTHER, ONE])
        await _begun(health, 0, 1)
        assert (await health.finding(0), await health.finding(1)) == (None, None)
        gpus.tell(ONE, "uncorrected 6")
        assert await health.finding(0) is None
        found = await health.finding(1)
        assert found is not None and found.severity is Severity.LEAVE
        assert found.sentence == "NVML tells of it: 1 uncorrectable ECC error since the rank came there"
        await _begun(health, 1)  # another rank
        assert await health.finding(1) is None

    asyncio.run(scene())


@pytest.mark.parametrize(("uuid", "reason"), [(ONE, "it is divided (MIG)"), (OTHER, "it is not there")])
def test_it_is_said_of_a_gpu_that_nvml_can_say_nothing_about(gpus: Gpus, uuid: str, reason: str) -> None:
    gpus.tell(ONE, "mig 1")
    with structlog.testing.capture_logs() as said:
        asyncio.run(_begun(GpuHealth([uuid]), 0))
    assert [(one["device"], one["reason"]) for one in said] == [("cuda:0", reason)]


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        ("hangs", {"event": "NVML did not answer", "device": "cuda:0", "within_s": 2.0}),
        ("crashes", {"event": "a process that asked NVML ended", "status": -signal.SIGSEGV}),
    ],
)
def test_nvml_that_hangs_or_crashes_is_no_verdict_and_holds_nobody_up(
    gpus: Gpus, trouble: str, told: dict[str, Any]
) -> None:
    async def scene() -> None:
        gpus.tell(ONE, trouble)
        health = GpuHealth([ONE], asked_s=2.0 if trouble == "hangs" else 60.0)
        begin = time.monotonic()
        assert await health.finding(0) is None
        assert time.monotonic() - begin < 30
        until(lambda: not askers(), "nobody asks any more")

    with structlog.testing.capture_logs() as said:
        asyncio.run(scene())
    assert any(told.items() <= one.items() for one in said), said


def test_a_machine_without_nvml_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")  # where a machine has one it is not found
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    real, asked_so_far = asyncio.create_subprocess_exec, []

    async def counted(*command: str, **options: Any) -> Any:
        asked_so_far.append(command)
        return await real(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", counted)

    async def scene() -> None:
        health = GpuHealth([ONE])
        await health.run(nobody)  # it ends, as there is nothing to follow
        health.begin(0)
        assert await health.finding(0) is None
        assert len(asked_so_far) == 1

    asyncio.run(scene())


def test_devices_without_gpus_cost_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*command: str, **options: Any) -> Any:
        raise AssertionError(command)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refused)

    async def scene() -> None:
        for health in (GpuHealth(), GpuHealth([""])):  # processors, and a part of a GPU
            await health.run(nobody)
            health.begin(0)
            assert await health.finding(0) is None

    asyncio.run(scene())


def nobody(index: int) -> None:
    raise AssertionError(f"device {index} is said to be unusable")


def _followed(
    gpus: Gpus, uuids: list[str], scene: Callable[[GpuHealth], Awaitable[None]],
    tell: Callable[[int], None], again_s: float = 60.0,
) -> None:  # fmt: skip
    async def run() -> None:
        health = GpuHealth(uuids, again_s=again_s)
        following = asyncio.create_task(health.run(tell))
        await asyncio.wait_for(health.followed.wait(), 60)
        try:
            await scene(health)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        until(lambda: not askers(), "nobody asks any more")

    asyncio.run(run())


async def _until_found(health: GpuHealth, index: int) -> Any:
    for _ in range(600):
        if (found := await health.finding(index)) is not None:
            return found
    raise AssertionError("it is not found")


def test_an_xid_that_comes_is_told_of_its_gpu_alone_and_outlives_the_next_rank_there(gpus: Gpus) -> None:
    gpus.tell(ONE, "xid 95")
    gpus.tell(OTHER, "xid 13")
    unusable: list[int] = []

    async def scene(health: GpuHealth) -> None:
        assert await health.finding(0) is None  # that one came before
        gpus.tell(ONE, "xid 95", "xid 31", "xid 94", "xid 79")
        found = await _until_found(health, 0)
        while "79" not in found.sentence:
            found = await _until_found(health, 0)
        assert found.severity is Severity.UNUSABLE
        assert found.sentence.endswith("Xid 94, a contained ECC error; " + OFF)
        assert (health.unusable(0), unusable) == (
            "NVML tells of it: " + OFF,
            [0],
        )
        assert await health.finding(1) is None
        await _begun(health, 0)
        found = await health.finding(0)
        assert found is not None and found.sentence == "NVML tells of it: " + OFF
        health.forget(0)  # somebody has reset it
        assert (await health.finding(0), health.unusable(0)) == (None, "")

    _followed(gpus, [ONE, OTHER], scene, unusable.append)


def test_xids_are_followed_again_when_the_process_that_does_has_ended(gpus: Gpus) -> None:
    gpus.tell(ONE)
    unusable: list[int] = []

    async def scene(health: GpuHealth) -> None:
        (follower,) = askers()
        health.followed.clear()
        follower.kill()
        await asyncio.wait_for(health.followed.wait(), 60)
        gpus.tell(ONE, "lost", "xid 79")
        while "Xid 79" not in (found := await _until_found(health, 0)).sentence:
            pass
        assert found.sentence == f"NVML tells of it: {OFF}; it is lost"
        assert unusable == [0]

    _followed(gpus, [ONE], scene, unusable.append, again_s=0.01)


def test_where_no_gpu_tells_of_xids_nothing_is_followed(gpus: Gpus) -> None:
    gpus.tell(ONE, "mig 1")
    health = GpuHealth([ONE], again_s=0.0)
    asyncio.run(asyncio.wait_for(health.run(nobody), 60))
    assert health.followed.is_set()  # NVML was there, and said so


def test_xids_of_a_divided_gpu_are_not_followed(gpus: Gpus) -> None:
    gpus.tell(ONE, "mig 1")
    gpus.tell(OTHER, "mig 0")
    command = [*module_command("recovery.machine.nvml"), str(os.getpid()), "watch", ONE, OTHER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline()) == {"watching": [OTHER]}
        finally:
            process.kill()


def test_who_asks_nvml_ends_with_who_asked_it_to(gpus: Gpus) -> None:
    gpus.tell(ONE)
    parent = (
        "import os, subprocess, sys; command = sys.argv[1:]; command.insert(4, str(os.getpid()));"
        "print(subprocess.Popen(command).pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", parent, *module_command("recovery.machine.nvml"), "watch", ONE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            asks = psutil.Process(int(process.stdout.readline()))
            assert "watching" in process.stdout.readline()
        finally:
            process.kill()
    until(lambda: not command_of(asks), "it has ended")  # or nobody has waited for it yet


TORCH_OF_TWO = """
from types import SimpleNamespace as N
def asked(index):
    if index in SICK:
        raise RuntimeError("CUDA error: unknown error")
    return N(name="a GPU", uuid=f"{index}", total_memory=1, major=9, minor=0, multi_processor_count=2)
cuda = N(is_available=lambda: True, device_count=lambda: 2, get_device_properties=asked)
backends = N(cudnn=N(version=lambda: 91900))
"""


@pytest.mark.parametrize(("sick", "uuids"), [((), ["GPU-0", "GPU-1"]), ((0,), ["", "GPU-1"]), ((0, 1), None)])
def test_a_gpu_that_does_not_say_what_it_is_is_told_of_and_keeps_no_other_from_being_used(
    sick: tuple[int, ...], uuids: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "torch.py").write_text(f"SICK = {sick}\n{TORCH_OF_TWO}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if uuids is None:
        with pytest.raises(capability.DriverUnavailable, match="cuda:1 does not say what it is: CUDA error"):
            capability.find_capability("cuda")
        return
    found, known = capability.find_capability("cuda")
    assert (found.device_name, found.cudnn_version, known) == ("a GPU", 91900, uuids)
    told = [f"understudy: cuda:{index} does not say what it is: CUDA error: unknown error" for index in sick]
    assert capsys.readouterr().err.splitlines() == told


def test_parts_of_gpus_have_no_uuid_that_nvml_is_asked_by(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"device_name": "", "total_memory": 1, "major": 9, "minor": 0, "multi_processor_count": 1}
    monkeypatch.setattr(
        capability, "_properties_of_the_gpu",
        lambda: {**told, "cudnn_version": 0, "uuids": ["GPU-a", "GPU-b", "GPU-c"]},
    )  # fmt: skip
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert capability.find_capability("cuda")[1] == ["GPU-a", "GPU-b", "GPU-c"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,MIG-GPU-b/1/0,0")
    assert capability.find_capability("cuda")[1] == ["GPU-a", "", "GPU-c"]
    assert capability.find_capability("cpu")[1] == []
