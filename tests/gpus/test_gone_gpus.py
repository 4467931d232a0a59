"""A GPU that is gone: the next device server there finds out, and its rank goes to another one."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import proxied
import pytest
import simulated_device
from compiled_programs import program
from proxied import WORKLOADS

from understudy.protos import control_pb2 as pb
from understudy.proxy_server import _server
from understudy.proxy_server.device_server import trouble_of
from understudy.recovery.agent_api.commands import NoPlace, NotDone
from understudy.recovery.host.gpu_health import GpuHealth
from understudy.recovery.host.leases import Leases
from understudy.recovery.host.placement import HostPlacement
from understudy.recovery.machine.processes import Watched
from understudy.recovery.planning.gpu_verdict import Finding, Severity
from understudy.recovery.state.jobs import Session

UNKNOWN = "CUDA error: unknown error"
Trial = Callable[[], Awaitable[str]]


async def _sound() -> str:
    return ""


async def _fails() -> str:
    return UNKNOWN


def _fails_with(words: str, *, late: bool) -> Trial:
    async def fails() -> str:
        raise NotDone(words, late=late)

    return fails


_never = _fails_with("Deadline Exceeded", late=True)
_dies = _fails_with("Socket closed", late=False)


class Pool:
    """Device servers of which each answers as its device does."""

    def __init__(self, devices: dict[str, Trial]) -> None:
        self._devices = devices
        self.retired: list[str] = []
        self._leased: set[str] = set()
        self.crash = ""
        """What each server that ends has died of, by its own fault."""
        self.asked_why, self.ends_late = asyncio.Event(), False

    @property
    def leased(self) -> list[str]:
        """For which it keeps no server ready."""
        return sorted(self._leased)

    async def take(self, device: str) -> Any:
        async def execute(command: object, within_s: float) -> pb.TryDeviceReply:
            assert isinstance(command, pb.TryDeviceRequest)
            return pb.TryDeviceReply(error=await self._devices[device]())

        return SimpleNamespace(device=device, execute=execute)

    def retire(self, server: Any) -> None:
        self.retired.append(server.device)

    async def crash_of(self, server: Any) -> str:
        self.asked_why.set()
        if self.ends_late:
            await asyncio.Event().wait()
        return self.crash

    def lease(self, device: str) -> None:
        self._leased.add(device)

    def unlease(self, device: str, fill: bool = True) -> None:
        self._leased.discard(device)


class Told(GpuHealth):
    """What NVML tells of devices, by index."""

    def __init__(self, found: dict[int, Finding]) -> None:
        super().__init__()
        self.found = found
        self.xids: dict[int, str] = {}
        """Sentences of those that forbid the use of a device."""
        self.newcomers: list[bool] = []

    async def finding(self, index: int, newcomer: bool = False) -> Finding | None:
        self.newcomers.append(newcomer)
        return self.found.get(index)

    def unusable(self, index: int) -> str:
        return self.xids.get(index, "")

    def forget(self, index: int) -> None:
        self.xids.pop(index, None)


LOST = Finding(Severity.UNUSABLE, "NVML tells of it: it is lost")
WORN = Finding(Severity.LEAVE, "NVML tells of it: 1 uncorrectable ECC error since the rank came there")


class Node:
    """A rank on the first of some devices, whose server has died."""

    def __init__(self, *trials: Trial, told: dict[int, Finding] | None = None) -> None:
        names = [f"cuda:{index}" for index in range(len(trials))]
        self.pool = Pool(dict(zip(names, trials, strict=True)))
        self.told = Told(told or {})
        self.leases = Leases(names, cast(Any, self.pool), self.told)
        self.placement = HostPlacement(cast(Any, self.pool), self.leases)
        job = SimpleNamespace(name="job", note_fired=lambda session: None, fired=lambda kind, rank: 0)
        dead = SimpleNamespace(device="its last one", process=Watched.gone(1, 1))
        session = SimpleNamespace(
            device="cuda:0", device_index=0, destination=None, on_gpu=True, rank=3, server=dead, job=job
        )
        self.session = cast(Session, session)
        self.leases.hold(self.session)

    def tells(self, index: int, sentence: str) -> None:
        """An Xid has come."""
        self.told.xids[index] = sentence
        self.leases.tell_pool(index)

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


def test_a_gpu_that_crashes_two_new_servers_is_fenced() -> None:
    node = Node(_dies, _sound)
    node.pool.crash = "SIGSEGV"
    assert node.replaced() == "cuda:1"
    assert node.leases.fenced == {0: "2 new device servers there died as they tried it, of SIGSEGV"}
    assert node.pool.retired == ["its last one", "cuda:0", "cuda:0"]


def test_a_gpu_that_crashes_one_new_server_and_computes_for_the_next_is_kept() -> None:
    trials = iter([_dies, _sound])

    async def next_trial() -> str:
        return await next(trials)()

    node = Node(next_trial, _sound)
    node.pool.crash = "SIGABRT"
    assert (node.replaced(), node.leases.fenced) == ("cuda:0", {})


@pytest.mark.parametrize("trial", [_sound, _dies])
def test_a_gpu_of_which_nvml_tells_that_it_is_lost_is_fenced_whatever_it_computes(trial: Trial) -> None:
    node = Node(trial, _sound, told={0: LOST})
    assert (node.replaced(), node.leases.fenced) == ("cuda:1", {0: LOST.sentence})
    assert node.pool.retired == ["its last one", "cuda:0"]


def test_a_gpu_with_an_ecc_error_is_left_for_another_one() -> None:
    node = Node(_sound, _sound, told={0: WORN})
    assert (node.replaced(), node.leases.fenced) == ("cuda:1", {})
    assert node.leases.worn == {0: WORN.sentence}
    assert (node.leases.free(), node.pool.leased) == ([0], ["cuda:1"])


def test_a_gpu_that_is_worn_is_given_last_and_before_a_job_ends() -> None:
    node = Node(_sound, _sound, _sound, told={0: WORN})
    assert (node.replaced(), node.leases.free(), node.leases.place(0)) == ("cuda:1", [2, 0], 2)
    node.told.found[1] = LOST
    assert (node.replaced(), node.leases.fenced) == ("cuda:2", {1: LOST.sentence})
    assert node.leases.place(0) == 0  # there is no better one
    node.told.found[2] = LOST
    assert node.replaced() == "cuda:0"


def test_two_gpus_that_are_worn_do_not_send_a_rank_to_and_fro() -> None:
    node = Node(_sound, _sound, told={0: WORN, 1: WORN})
    assert (node.replaced(), set(node.leases.worn)) == ("cuda:1", {0})
    assert node.leases.free() == [0]


def test_a_gpu_with_an_ecc_error_is_used_on_where_there_is_no_other() -> None:
    node = Node(_sound, told={0: WORN})
    assert (node.replaced(), node.leases.fenced) == ("cuda:0", {})
    assert node.pool.retired == ["its last one"]


def test_a_rank_without_another_gpu_does_not_stay_on_one_that_is_lost() -> None:
    node = Node(_sound, told={0: LOST})
    with pytest.raises(NoPlace, match=r"cuda:0 of rank 3 is gone, and no other is free"):
        node.replaced()


def test_a_rank_does_not_move_to_a_gpu_of_which_nvml_tells_an_error() -> None:
    node = Node(_sound, _sound, told={1: WORN})
    node.session.destination = 1
    with pytest.raises(NoPlace, match=f"rank 3 did not move to cuda:1: {WORN.sentence}"):
        node.replaced()
    assert (node.session.device, node.leases.fenced) == ("cuda:0", {})


FELL_OFF = "NVML tells of it: Xid 79, it fell off the bus"


def test_a_gpu_that_falls_off_the_bus_while_nobody_has_it_is_fenced() -> None:
    node = Node(_sound, _sound, _sound)
    for _ in range(2):
        node.tells(1, FELL_OFF)
    assert (node.leases.fenced, node.leases.free()) == ({1: FELL_OFF}, [2])
    assert node.pool.leased == ["cuda:0", "cuda:1"]
    node.leases.lift(1)
    assert (node.leases.free(), node.pool.leased) == ([1, 2], ["cuda:0"])


def test_a_gpu_that_falls_off_the_bus_is_fenced_behind_the_rank_that_has_it() -> None:
    node = Node(_sound)
    node.tells(0, FELL_OFF)
    assert node.leases.fenced == {}
    node.leases.release(node.session)
    assert (node.leases.fenced, node.pool.leased) == ({0: FELL_OFF}, ["cuda:0"])


def test_a_gpu_that_falls_off_the_bus_is_fenced_when_its_rank_moves_away() -> None:
    node = Node(_sound, _sound)
    node.tells(0, FELL_OFF)
    node.session.destination = 1
    assert node.replaced() == "cuda:1"
    node.leases.arrive(node.session)
    assert (node.leases.fenced, node.leases.free()) == ({0: FELL_OFF}, [])
    assert node.pool.leased == ["cuda:0", "cuda:1"]
    assert node.told.newcomers == [True]  # what was counted there while others had it is not the rank's


def test_a_gpu_that_falls_off_the_bus_while_a_session_opens_there_is_fenced_if_it_does_not() -> None:
    node = Node(_sound, _sound)
    with node.leases.claim(1):
        node.tells(1, FELL_OFF)
        assert (node.leases.fenced, node.pool.leased) == ({}, ["cuda:0", "cuda:1"])
    assert (node.leases.fenced, node.pool.leased) == ({1: FELL_OFF}, ["cuda:0", "cuda:1"])


def test_a_gpu_that_falls_off_the_bus_while_it_is_kept_is_fenced_if_nobody_comes() -> None:
    node = Node(_sound, _sound)
    node.leases.keep(1, node.session)
    node.tells(1, FELL_OFF)
    assert node.leases.fenced == {}
    node.leases.let_go(1)
    assert (node.leases.fenced, node.pool.leased) == ({1: FELL_OFF}, ["cuda:0", "cuda:1"])
    node.leases.lift(1)
    assert (node.leases.free(), node.pool.leased) == ([1], ["cuda:0"])


def test_a_rank_does_not_move_to_a_gpu_that_nvml_says_is_lost_and_nobody_else_gets_it() -> None:
    node = Node(_sound, _sound, told={1: LOST})
    node.session.destination = 1
    with pytest.raises(NoPlace, match=f"rank 3 did not move to cuda:1: {LOST.sentence}"):
        node.replaced()
    assert (node.session.device, node.leases.fenced) == ("cuda:0", {1: LOST.sentence})
    assert node.leases.free() == []


def test_what_a_gpu_tells_of_after_it_failed_in_a_drill_outlives_that() -> None:
    node = Node(_sound, _sound)
    cast(Any, node.session.job).fired = lambda kind, rank: 1
    node.leases.fence(node.session, "a drill")
    node.tells(0, FELL_OFF)
    assert node.leases.move(node.session)
    node.leases.lift_rehearsed("job")
    assert node.leases.fenced == {0: FELL_OFF}
    node.leases.lift_rehearsed("job")
    assert node.leases.fenced == {0: FELL_OFF}


def test_a_fenced_gpu_that_was_drained_as_well_gets_a_server_again_when_it_is_given_back() -> None:
    node = Node(_sound, _sound)
    node.leases.drain(1)
    node.tells(1, FELL_OFF)
    assert node.leases.fenced == {1: FELL_OFF}
    node.leases.draining.discard(1)
    node.leases.lift(1)
    assert (node.leases.free(), node.pool.leased) == ([1], ["cuda:0"])


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


def test_a_round_that_is_given_up_while_a_server_is_asked_why_it_ended_leaves_no_server() -> None:
    async def run() -> Node:
        node = Node(_dies)
        node.pool.ends_late = True
        replacing = asyncio.create_task(node.placement.replacement(node.session, keep_source=False))
        await node.pool.asked_why.wait()
        replacing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await replacing
        return node

    assert asyncio.run(run()).pool.retired == ["its last one", "cuda:0"]


def test_a_processor_passes_the_trial() -> None:
    _server.try_device("cpu")


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder in which a file makes a simulated GPU go; beside it that of NVML's stand-in."""
    folder, nvml = tmp_path / "gone", tmp_path / "nvml"
    folder.mkdir()
    nvml.mkdir()
    for name, value in simulated_device.environment().items():
        monkeypatch.setenv(name, value)
    libraries = os.pathsep.join([os.environ["LD_LIBRARY_PATH"], str(program("stand_in_nvml"))])
    monkeypatch.setenv("LD_LIBRARY_PATH", libraries)
    monkeypatch.setenv("STAND_IN_NVML", str(nvml))
    monkeypatch.setenv("SIMULATED_CUDA_GONE", str(folder))
    for index in range(4):
        (nvml / f"GPU-{index:08}-0000").write_text(f"{OLD_ERRORS}\n")
    return nvml


OLD_ERRORS = "uncorrected 2"


def _losses(output: str) -> list[str]:
    """Their lines; what a device server says at the same time may stand on one of them."""
    return re.findall(r"step \d+ -?0x[0-9a-f.]+p[+-]\d+", output)


def _trained(folder: Path, devices: str, *words: str) -> proxied.Ended:
    where = folder / "-".join([devices, *words]).replace(" ", "-")
    where.mkdir()
    options = ("--devices", f"{devices}:3", "--hang-timeout", "8")
    command = proxied.torchrun(2, WORKLOADS / "gone_gpu.py", *words)
    ended = proxied.run(command, folder=where, options=options)
    assert ended.status == 0, ended.output[-3000:]
    return ended


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a training whose device, a processor, stays."""
    found = _losses(_trained(tmp_path_factory.mktemp("cpu"), "cpu", "stays").output)
    assert len(found) == 7
    return found


@pytest.mark.drawn(12)
@pytest.mark.parametrize(
    "how",
    ["fails", "crashes", "wrong", pytest.param("hangs", marks=pytest.mark.long)],
)
def test_a_training_goes_on_with_the_same_bits_when_a_gpu_is_gone(
    losses: list[str], gone: Path, folder: Path, how: str
) -> None:
    ended = _trained(folder, "cuda", how)
    assert _losses(ended.output) == losses
    (recovery,) = ended.report["recoveries"]
    devices = [rank["device"] for rank in ended.report["ranks"]]
    assert (recovery["recovered"], devices) == (True, ["cuda:2", "cuda:1"])


@pytest.mark.drawn(12)
@pytest.mark.parametrize(
    ("told", "device"),
    [
        ("uncorrected 3", "cuda:2"),
        (OLD_ERRORS, "cuda:0"),
        pytest.param("lost", "cuda:2", marks=pytest.mark.long),
        pytest.param("hangs", "cuda:0", marks=pytest.mark.long),
        pytest.param("crashes", "cuda:0", marks=pytest.mark.long),
        pytest.param("mig 1", "cuda:0", marks=pytest.mark.long),
    ],
)
def test_a_training_whose_server_dies_leaves_a_gpu_that_nvml_has_something_against(
    losses: list[str], gone: Path, folder: Path, told: str, device: str
) -> None:
    """It computes as before, for each new server."""
    ended = _trained(folder, "cuda", "ecc", told)
    assert _losses(ended.output) == losses
    (recovery,) = ended.report["recoveries"]
    devices = [rank["device"] for rank in ended.report["ranks"]]
    assert (recovery["recovered"], devices) == (True, [device, "cuda:1"])
