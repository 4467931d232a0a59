"""Only kernels that give the same bits each time: what a server of a GPU holds to, tried on the CPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest
import torch
from executor_harness import SETTING, Harness

from understudy.proxy_server import _server
from understudy.recovery.config.proxyd_settings import settings_of
from understudy.recovery.host.spawner import default_command
from understudy.recovery.membership.network.data_network import DataNetwork

DETERMINISTIC, FILL, BENCHMARK = 1, 5, 25
"""Of replay/csrc/log_format.h."""
CUBLAS, NCCL = "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (CUBLAS, NCCL):
        monkeypatch.delenv(name, raising=False)
    _server.set_exact(True)
    try:
        yield
    finally:
        _server.set_exact(False)
        with Harness() as h:  # whose session sets everything back
            h.synchronize()


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
    found = {name: libc.getenv(name.encode()) for name in (CUBLAS, NCCL)}
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


def test_without_it_a_session_is_as_its_script_chooses() -> None:
    with Harness() as h:
        h.writer.append(SETTING, BENCHMARK, [1])
        h.synchronize()
        assert mode() == (False, False, True, True)


def test_exactness_is_the_default_and_can_be_given_up() -> None:
    exact, inexact = (
        default_command(
            given.socket, given.log_directory, "cuda", given.adoption_grace_s, DataNetwork(), given.exact
        )
        for given in (settings_of(["--devices", "cuda:1", *more]) for more in ([], ["--exact", "off"]))
    )
    assert "--inexact" not in exact and "--inexact" in inexact
