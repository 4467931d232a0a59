"""Only kernels that give the same bits each time: what a server of a GPU holds to, tried on the CPU."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import proxied
import pytest
import torch
from executor_harness import ENVIRONMENT, SETTING, Harness
from running_proxyd import running_proxyd

from understudy.protos import control_pb2 as pb
from understudy.proxy_client.session import _nccl
from understudy.proxy_server import _server
from understudy.recovery.agent.refusals import check_nccl
from understudy.recovery.base.errors import BadInput, Refused
from understudy.recovery.config.proxyd_settings import settings_of
from understudy.recovery.host.spawner import default_command
from understudy.recovery.membership.network.data_network import DataNetwork
from understudy.recovery.takeover.leftovers import _check_fit
from understudy.replay import STRICT_NCCL

pytestmark = pytest.mark.drawn(5)

DETERMINISTIC, FILL, BENCHMARK = 1, 5, 25
"""Of replay/csrc/log/log_format.h."""
CUBLAS, NCCL, PROTOCOL = "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO"


@contextmanager
def exactness(how: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (CUBLAS, NCCL, PROTOCOL):
        monkeypatch.delenv(name, raising=False)
    _server.set_exact(how)
    try:
        yield
    finally:
        _server.set_exact("off")
        with Harness() as h:  # whose session sets everything back
            h.synchronize()


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with exactness("on", monkeypatch):
        yield


def mode() -> tuple[bool, bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
    )


def environment() -> dict[str, str]:
    """As the process has it: `os.environ` knows nothing of what C++ sets."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    found = {name: libc.getenv(name.encode()) for name in (CUBLAS, NCCL, PROTOCOL)}
    return {name: value.decode() for name, value in found.items() if value is not None}


@pytest.mark.usefixtures("exact")
def test_a_session_is_deterministic_whatever_its_script_chooses() -> None:
    with Harness() as h:
        h.synchronize()
        assert mode() == (True, True, False, False)
        h.writer.append(SETTING, BENCHMARK, [1])
        h.writer.append(SETTING, DETERMINISTIC, [0])
        h.synchronize()
        assert mode() == (True, True, False, False)


@pytest.mark.usefixtures("exact")
def test_what_is_stricter_is_left_as_the_script_has_it() -> None:
    with Harness() as h:
        h.writer.append(SETTING, DETERMINISTIC, [1])
        h.synchronize()
        assert mode() == (True, False, True, False)
        h.writer.append(SETTING, FILL, [0])
        h.synchronize()
        assert mode() == (True, False, False, False)
        h.writer.append(SETTING, DETERMINISTIC, [0])
        h.synchronize()
        assert mode() == (True, True, False, False)


@pytest.mark.usefixtures("exact")
def test_libraries_are_told_unless_the_script_tells_them_otherwise() -> None:
    with Harness() as h:
        h.synchronize()
        assert environment() == {CUBLAS: ":4096:8", NCCL: "^NVLS"}
    assert CUBLAS not in os.environ


def test_strictly_nccl_reduces_in_one_way_whatever_else_the_script_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strict = {CUBLAS: ":16:8", NCCL: "Ring", PROTOCOL: "Simple"}
    with exactness("strict", monkeypatch), Harness() as h:
        h.synchronize()
        assert environment() == strict | {CUBLAS: ":4096:8"}
        text = f"{CUBLAS}=:16:8\0{NCCL}=Tree\0".encode()  # proxyd refuses such a script
        text += bytes(-len(text) % 8)
        h.writer.append(ENVIRONMENT, 0, [len(text), *struct.unpack(f"<{len(text) // 8}Q", text)])
        h.synchronize()
        assert environment() == strict
        assert mode() == (True, True, False, False)
        h.commit()
        h.synchronize()
        h.executor.park()
        h.executor.rewind(1)
        h.executor.resume()
        h.synchronize()
        assert environment() == strict
    assert PROTOCOL not in environment()


def test_strictly_a_script_that_fixes_nccls_way_to_another_is_refused_by_one_sentence() -> None:
    strict, exact, on_processors = (
        settings_of(["--devices", devices, "--exact", how])
        for devices, how in (("cuda:1", "strict"), ("cuda:1", "on"), ("cpu:1", "strict"))
    )
    other = {NCCL: "allreduce:Tree", PROTOCOL: "^LL128"}
    same = {NCCL: "ring", PROTOCOL: "SIMPLE", "NCCL_MIN_NCHANNELS": "4", "NCCL_ALGORITHM": "Tree"}
    assert [entry.partition("=")[0] for entry in STRICT_NCCL] == [NCCL, PROTOCOL]
    for name, value in other.items():
        told = _nccl(same | {name: value})
        with pytest.raises(Refused) as refusal:
            check_nccl(strict, told)
        wanted = dict(entry.split("=") for entry in STRICT_NCCL)[name]
        assert str(refusal.value) == (
            f"the script's environment says {name}={value} and --exact strict {name}={wanted}: "
            f"unset {name}, or start proxyd with --exact on"
        )
        check_nccl(exact, told)
        check_nccl(on_processors, told)
    check_nccl(strict, _nccl(same))
    check_nccl(strict, ["", "=", "NCCL", "NCCL_PROTOCOL=LL"])


def test_the_refusal_reaches_the_script_where_it_first_uses_its_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch, simulated_gpus: None
) -> None:
    command = proxied.python("-c", "import torch; torch.ones(1, device='cuda')")
    with running_proxyd(folder / "socket", 1, ("--exact", "strict")):
        for protocol, status in (("LL", 1), ("Simple", 0)):
            monkeypatch.setenv(PROTOCOL, protocol)
            done = proxied.run(command, folder=folder, options=("--socket", str(folder / "socket")))
            assert done.status == status, done.output
            told = f"RuntimeError: the script's environment says {PROTOCOL}={protocol} and --exact strict"
            assert (told in done.output) == (status != 0)


def test_a_proxyd_that_is_exact_in_another_way_does_not_adopt_and_says_why() -> None:
    """NCCL would reduce in one way in the servers that live, and in another in those that come."""
    strict, on_processors = (
        settings_of(["--devices", devices, "--exact", "strict"]) for devices in ("cuda:1", "cpu:1")
    )
    left = pb.Journal(devices="cuda:1", optimizer_preimages=True, exact="on")
    with pytest.raises(BadInput, match="with --exact on: start with the same to adopt it"):
        _check_fit(strict, left)
    for exact in ("strict", ""):  # one of before said nothing of it
        left.exact = exact
        _check_fit(strict, left)
    _check_fit(on_processors, pb.Journal(devices="cpu:1", optimizer_preimages=True, exact="on"))


def test_without_it_a_session_is_as_its_script_chooses() -> None:
    with Harness() as h:
        h.writer.append(SETTING, BENCHMARK, [1])
        h.synchronize()
        assert mode() == (False, False, True, True)
    with Harness() as h:  # whose session sets it back
        h.synchronize()


def test_exactness_is_the_default_and_can_be_given_up() -> None:
    for more, how in (([], "on"), (["--exact", "off"], "off"), (["--exact", "strict"], "strict")):
        given = settings_of(["--devices", "cuda:1", *more])
        command = default_command(
            given.socket, given.log_directory, "cuda", given.adoption_grace_s, DataNetwork(), given.exact
        )
        assert command[command.index("--exact") + 1] == how
    with pytest.raises(ValueError, match="exact must be off, on or strict"):
        _server.set_exact("very")
