"""A GPU that is gone: the next device server there finds out, and its rank goes to another one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import proxied
import pytest
import simulated_device
from proxied import WORKLOADS

from understudy.proxy_server import _server
from understudy.proxy_server.device_server import trouble_of
from understudy.recovery.base.control import pb
from understudy.recovery.host.leases import Leases
from understudy.recovery.host.placement import NoPlace, Placement
from understudy.recovery.machine.processes import Watched
from understudy.recovery.state.jobs import Session

UNKNOWN = "CUDA error: unknown error"
Trial = Callable[[], Awaitable[str]]


async def _sound() -> str:
    return ""


async def _fails() -> str:
    return UNKNOWN


def _fails_with(code: grpc.StatusCode, words: str) -> Trial:
    async def fails() -> str:
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), words)

    return fails


_never = _fails_with(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
_dies = _fails_with(grpc.StatusCode.UNAVAILABLE, "Socket closed")


class Pool:
    """Device servers of which each answers as its device does."""

    def __init__(self, devices: dict[str, Trial]) -> None:
        self._devices = devices
        self.retired: list[str] = []

    async def take(self, device: str) -> Any:
        async def tried(request: object, timeout: float) -> pb.TryDeviceReply:
            return pb.TryDeviceReply(error=await self._devices[device]())

        return SimpleNamespace(device=device, stub=SimpleNamespace(TryDevice=tried))

    def retire(self, server: Any) -> None:
        self.retired.append(server.device)

    def lease(self, device: str) -> None: ...

    def unlease(self, device: str, fill: bool = True) -> None: ...


class Node:
    """A rank on the first of some devices, whose server has died."""

    def __init__(self, *trials: Trial) -> None:
        names = [f"cuda:{index}" for index in range(len(trials))]
        self.pool = Pool(dict(zip(names, trials, strict=True)))
        self.leases = Leases(names, cast(Any, self.pool))
        self.placement = Placement(cast(Any, self.pool), self.leases)
        job = SimpleNamespace(name="job", note_fired=lambda session: None, fired=lambda kind, rank: 0)
        dead = SimpleNamespace(device="its last one", process=Watched.gone(1, 1))
        session = SimpleNamespace(
            device="cuda:0", device_index=0, destination=None, on_gpu=True, rank=3, server=dead, job=job
        )
        self.session = cast(Session, session)
        self.leases.hold(self.session)

    def replaced(self) -> str:
        return asyncio.run(self.placement.replacement(self.session, keep_source=False)).device


def test_a_rank_whose_gpu_computes_stays_there() -> None:
    node = Node(_sound, _sound)
    assert (node.replaced(), node.leases.fenced) == ("cuda:0", {})


@pytest.mark.parametrize(
    ("trial", "said"),
    [
        (_fails, f"a new device server there was told: {UNKNOWN}"),
        (_never, "a new device server there did not get it to compute within 20 s"),
    ],
)
def test_a_rank_leaves_gpus_that_do_not_compute_and_they_are_fenced(trial: Trial, said: str) -> None:
    node = Node(trial, trial, _sound)
    assert node.replaced() == node.session.device == "cuda:2"
    assert node.leases.fenced == {0: said, 1: said}
    assert node.pool.retired == ["its last one", "cuda:0", "cuda:1"]


def test_a_gpu_whose_new_server_is_killed_during_the_trial_is_not_fenced() -> None:
    node = Node(_dies, _sound)
    with pytest.raises(NoPlace, match="a new device server on cuda:0 ended: Socket closed"):
        node.replaced()
    assert (node.session.device, node.leases.fenced) == ("cuda:0", {})
    assert node.pool.retired == ["its last one", "cuda:0"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("CUDA error: unknown error\nSearch for it", UNKNOWN),
        ("it computes 3 of 9 numbers wrongly", "it computes 3 of 9 numbers wrongly"),
        ("CUDA error: out of memory\nSearch for it", ""),
        ("CUDA out of memory. Tried to allocate 1 MiB.", ""),
    ],
)
def test_a_gpu_is_told_of_but_for_memory_that_is_full(
    monkeypatch: pytest.MonkeyPatch, error: str, said: str
) -> None:
    def fails(device: str) -> None:
        raise RuntimeError(error)

    monkeypatch.setattr(_server, "try_device", fails)
    assert trouble_of("cuda:0") == said


def test_a_rank_without_another_gpu_is_told_that_its_own_is_gone() -> None:
    node = Node(_fails)
    with pytest.raises(NoPlace, match=r"cuda:0 of rank 3 is gone, and no other is free"):
        node.replaced()


def test_a_rank_does_not_move_to_a_gpu_that_does_not_compute_and_keeps_its_own() -> None:
    node = Node(_sound, _fails)
    node.session.destination = 1
    with pytest.raises(NoPlace, match=f"rank 3 did not move to cuda:1: .* told: {UNKNOWN}"):
        node.replaced()
    assert (node.session.device, node.leases.fenced) == ("cuda:0", {})


def test_a_round_that_is_given_up_during_a_trial_leaves_no_server() -> None:
    async def run() -> Node:
        tries = asyncio.Event()

        async def waits() -> str:
            tries.set()
            await asyncio.Event().wait()
            return ""

        node = Node(waits)
        replacing = asyncio.create_task(node.placement.replacement(node.session, keep_source=False))
        await tries.wait()
        replacing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await replacing
        return node

    assert asyncio.run(run()).pool.retired == ["its last one", "cuda:0"]


def test_a_processor_passes_the_trial() -> None:
    _server.try_device("cpu")


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder in which a file makes a simulated GPU go."""
    folder = tmp_path / "gone"
    folder.mkdir()
    for name, value in simulated_device.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SIMULATED_CUDA_GONE", str(folder))


def _losses(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("step ")]


@pytest.mark.parametrize("how", ["fails", pytest.param("hangs", marks=pytest.mark.long)])
def test_a_training_goes_on_with_the_same_bits_when_a_gpu_is_gone(gone: None, folder: Path, how: str) -> None:
    found = {}
    for what in ("stays", how):
        command = proxied.torchrun(2, WORKLOADS / "gone_gpu.py", what)
        options = ("--devices", "cuda:3", "--hang-timeout", "8")
        (folder / what).mkdir()
        found[what] = proxied.run(command, folder=folder / what, options=options)
        assert found[what].status == 0, found[what].output[-3000:]
    assert len(_losses(found["stays"].output)) == 7
    assert _losses(found[how].output) == _losses(found["stays"].output)
    (recovery,) = found[how].report["recoveries"]
    devices = [rank["device"] for rank in found[how].report["ranks"]]
    assert (recovery["recovered"], devices) == (True, ["cuda:2", "cuda:1"])
