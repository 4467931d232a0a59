"""Variables that choose kernels: a script's reach the kernels that run for it, and nobody else's do."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import proxied
import pytest
from executor_harness import ENVIRONMENT, Harness
from native_reference import native_reference
from running_proxyd import RunningProxyd, running_proxyd
from training_run import installed

from understudy.proxy_client.session import _check_openmp
from understudy.recovery.base.control import blocking_channel, pb, rpc

pytestmark = pytest.mark.drawn(5)

SCRIPT = proxied.WORKLOADS / "kernel_environment.py"
PLAIN = ("ATEN_CPU_CAPABILITY=default", "MKL_CBWR=COMPATIBLE", "ONEDNN_MAX_CPU_ISA=SSE41")


def command(device: str, variables: tuple[str, ...], folder: Path) -> list[str]:
    return proxied.python(SCRIPT, device, str(folder), *variables)


def natively(*variables: str) -> str:
    """What the script writes on the processor."""
    return (native_reference(functools.partial(command, "cpu", variables)) / "said").read_text()


def surroundings(*variables: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"} | dict(variable.split("=", 1) for variable in variables)


def run(folder: Path, socket: Path, *variables: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*installed("proxyrun"), "--socket", str(socket), *command("cuda", variables, folder)],
        env=surroundings(),
    )


def rank(socket: Path) -> Any:
    with blocking_channel(socket) as channel:
        (found,) = rpc.DaemonStub(channel).GetStatus(pb.StatusRequest(), timeout=30).ranks
    return found


def kill_server(socket: Path) -> None:
    """And wait until it is replaced."""
    before = rank(socket)
    os.kill(before.server_pid, signal.SIGKILL)
    proxied.until(lambda: rank(socket).recoveries > before.recoveries, "the rank has recovered")


@pytest.mark.drawn(1)
def test_these_variables_choose_other_kernels() -> None:
    """Or the tests below would show nothing."""
    said = natively(), natively(*PLAIN)
    assert said[0].count("\n") == said[1].count("\n") == 6
    assert said[0] != said[1]


@pytest.mark.parametrize(("script_has", "proxyd_has"), [(PLAIN, ()), ((), PLAIN)])
def test_a_script_has_its_own_kernels_whatever_proxyd_and_its_successor_were_started_with(
    script_has: tuple[str, ...], proxyd_has: tuple[str, ...], tmp_path: Path
) -> None:
    """Undisturbed, with a server killed, and with another by a proxyd that adopts the session."""
    socket = tmp_path / "proxyd.sock"
    os.mkfifo(tmp_path / "go")  # who opens it waits for the other
    proxyd = RunningProxyd(socket, 1, environment=surroundings(*proxyd_has))
    try:
        job = run(tmp_path, socket, *script_has)
        proxied.until((tmp_path / "reached").exists, "the script is half through")
        kill_server(socket)
        proxyd.kill()
        proxyd = RunningProxyd(socket, 1, environment=surroundings(PLAIN[0]))
        kill_server(socket)
        (tmp_path / "go").write_bytes(b"")
        assert job.wait(60) == 0
    finally:
        proxyd.stop()
    assert (tmp_path / "said").read_text() == natively(*script_has)


def test_the_next_session_has_nothing_of_the_last_one(tmp_path: Path) -> None:
    with running_proxyd(tmp_path / "proxyd.sock", 1, environment=surroundings()) as proxyd:
        for number, variables in enumerate((PLAIN, ())):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / "go").touch()
            assert run(folder, proxyd.socket, *variables).wait(60) == 0
            assert (folder / "said").read_text() == natively(*variables)


def test_what_openmp_reads_too_early_is_refused_by_name() -> None:
    _check_openmp({"OMP_DYNAMIC": "FALSE", "OMP_THREAD_LIMIT": "8"}, threads=8)
    with pytest.raises(RuntimeError, match="OMP_DYNAMIC=true lets the number of threads"):
        _check_openmp({"OMP_DYNAMIC": " True"}, threads=1)
    with pytest.raises(RuntimeError, match="OMP_THREAD_LIMIT=2 is less than the 4 threads of PyTorch"):
        _check_openmp({"OMP_THREAD_LIMIT": "2"}, threads=4)


def words(text: bytes) -> list[int]:
    padded = text + bytes(-len(text) % 8)
    return [len(text), *(int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8))]


def test_a_record_sets_variables_that_choose_kernels_and_no_others() -> None:
    """This process is the device server."""
    for text in (
        b"LD_PRELOAD=/tmp/x.so\0",
        b"MKL_CBWR\0",
        b"=\0",
        b"MKL_CBWR=AVX2\0PATH=/tmp\0",
        b"MKL_X=" + bytes(1 << 17),
    ):
        with Harness() as h:
            h.writer.append(ENVIRONMENT, 0, words(text))
            with pytest.raises(RuntimeError, match="environment"):
                h.synchronize()
    assert "LD_PRELOAD" not in os.environ


def test_the_environment_is_part_of_a_commit() -> None:
    """A server that takes over gets it from the manifest."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    with Harness() as h:
        h.commit()
        h.synchronize()
        assert getenv(b"MKL_VERBOSE") is None
        h.writer.append(ENVIRONMENT, 0, words(b"MKL_VERBOSE=0\0ONEDNN_VERBOSE=00\0"))
        h.commit()
        h.synchronize()
        h.executor.detach()
        with Harness() as other:
            other.synchronize()
            assert getenv(b"MKL_VERBOSE") is None
        h.executor = h.new_executor()
        h.executor.restore(2)
        h.executor.resume()
        h.synchronize()
        assert (getenv(b"MKL_VERBOSE"), getenv(b"ONEDNN_VERBOSE")) == (b"0", b"00")
