"""proxyd from start to end: it serves, it stops, it leaves nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from proxied import until
from running_proxyd import RunningProxyd
from test_proxyd_recovery import understudy_processes

from understudy.recovery.base.own_modules import module_command
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("understudy.proxy_server._server") is None,
        reason="the device server is not installed",
    ),
    pytest.mark.drawn(12),
    pytest.mark.cold,  # it counts processes
]


@pytest.fixture
def directory() -> Iterator[Path]:
    """A private directory with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="understudy-test-", dir="/tmp") as made:
        yield Path(made)


@pytest.fixture
def marker(directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """In the environment of every process that this test starts."""
    made = f"{directory.name}-{time.monotonic_ns()}"
    monkeypatch.setenv("TEST_MARKER", made)
    return made


def await_processes(marker: str, count: int) -> None:
    until(lambda: len(understudy_processes(marker)) == count, f"{count} processes", 30)


def runtime(proxyd: RunningProxyd) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"understudy-{os.getuid()}-{proxyd.pid}-*"))


def run(module: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*module_command(module), *arguments],
        env=os.environ | variables, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_proxyd_that_is_told_to_stop_exits_0_and_leaves_nothing(
    number: signal.Signals, directory: Path, marker: str
) -> None:
    proxyd = RunningProxyd(directory / "proxyd.sock", 1)
    assert len(runtime(proxyd)) == 1
    proxyd.process.send_signal(number)
    assert proxyd.process.wait(30) == 0
    assert understudy_processes(marker) == []
    assert runtime(proxyd) == []
    assert list(directory.iterdir()) == []


def test_second_proxyd_on_the_same_socket_ends_with_one_sentence_and_harms_nothing(directory: Path) -> None:
    proxyd = RunningProxyd(directory / "proxyd.sock", 1)
    second = run("recovery.proxyd", "--devices", "cpu:1", "--socket", str(proxyd.socket))
    assert second.returncode == 2
    assert second.stderr.strip().count("\n") == 0
    assert "another proxyd already listens" in second.stderr
    status = run("recovery.recoveryctl", "status", "--json", "--socket", str(proxyd.socket))
    assert status.returncode == 0
    assert json.loads(status.stdout)["node"]["devices"][0]["spec"] == "cpu:0"
    proxyd.stop()


def test_proxyd_killed_outright_takes_its_servers_along_and_a_new_one_cleans_up(
    directory: Path, marker: str
) -> None:
    proxyd = RunningProxyd(directory / "proxyd.sock", 1)
    proxyd.kill()
    await_processes(marker, 0)
    assert len(runtime(proxyd)) == 1
    successor = RunningProxyd(directory / "proxyd.sock", 1)
    assert runtime(proxyd) == []
    successor.stop()
    assert list(directory.iterdir()) == []


def test_idle_server_that_dies_is_replaced(directory: Path, marker: str) -> None:
    proxyd = RunningProxyd(directory / "proxyd.sock", 1, ("--spares", "1"))
    await_processes(marker, 4)  # proxyd, spawner, one server for the device, one spare
    server, _ = sorted(understudy_processes(marker))[-2:]
    os.kill(server, signal.SIGKILL)
    until(
        lambda: len(alive := understudy_processes(marker)) == 4 and server not in alive, "another server", 30
    )
    proxyd.stop()
    assert understudy_processes(marker) == []


def test_missing_gpu_ends_proxyd_with_one_sentence(directory: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = run("recovery.proxyd", "--devices", "cuda:1", "--socket", str(directory / "s"))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert list(directory.iterdir()) == []


# ------------------------------------------------------------------ embedded
def started(code: str, directory: Path) -> subprocess.Popen[str]:
    """proxyrun with a script that has printed `up`."""
    launcher = subprocess.Popen(
        [*module_command("recovery.proxyrun"), "--devices", "cpu:1", sys.executable, "-c", code],
        env=os.environ | {"XDG_RUNTIME_DIR": str(directory)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert launcher.stdout is not None and launcher.stdout.readline() == "up\n"
    return launcher


def test_embedded_proxyd_stops_when_its_launcher_is_killed(directory: Path, marker: str) -> None:
    launcher = started("import time; print('up', flush=True); time.sleep(600)", directory)
    launcher.kill()
    launcher.wait()
    await_processes(marker, 1)  # the user's command is nobody's child now; that is theirs
    (command,) = understudy_processes(marker)
    os.kill(command, signal.SIGKILL)


def test_what_a_killed_launcher_leaves_behind_is_removed_by_the_next(
    directory: Path, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(directory))

    def directories() -> set[Path]:
        return {path for place in (directory, SHARED_MEMORY) for path in place.glob("understudy-*")}

    launcher = started("import time; print('up', flush=True); time.sleep(600)", directory)
    launcher.kill()
    launcher.wait()
    await_processes(marker, 1)
    (command,) = understudy_processes(marker)
    os.kill(command, signal.SIGKILL)
    assert directories(), "it was killed outright"
    command_line = ("--devices", "cpu:1", sys.executable, "-c", "pass")
    done = run("recovery.proxyrun", *command_line, XDG_RUNTIME_DIR=str(directory))
    assert done.returncode == 0, done.stderr
    assert not directories()


@pytest.mark.parametrize(
    ("code", "status"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_exit_status_of_the_command_is_passed_on(code: str, status: int, directory: Path) -> None:
    command = (sys.executable, "-c", code)
    done = run("recovery.proxyrun", "--devices", "cpu:1", *command, XDG_RUNTIME_DIR=str(directory))
    assert done.returncode == status, done.stderr


def test_signal_to_proxyrun_reaches_the_command(directory: Path) -> None:
    launcher = started(
        "import signal, sys; signal.signal(15, lambda *_: sys.exit(5)); "
        "print('up', flush=True); signal.pause()",
        directory,
    )
    launcher.terminate()
    launcher.communicate(timeout=60)
    assert launcher.returncode == 5


def test_devices_are_the_running_proxyds_business(directory: Path) -> None:
    proxyd = RunningProxyd(directory / "proxyd.sock", 1)
    there = ("--socket", str(proxyd.socket))
    done = run("recovery.proxyrun", "--devices", "cpu:1", *there, "true")
    assert done.returncode == 2
    assert "leave out --devices" in done.stderr
    done = run("recovery.proxyrun", *there, "no-such-command-here")
    assert done.returncode == 2
    assert "cannot start no-such-command-here" in done.stderr
    proxyd.stop()
