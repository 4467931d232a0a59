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

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("proxy_server") is None
    or importlib.util.find_spec("proxy_server._server") is None,
    reason="the device server is not installed",
)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A private directory with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="understudy-test-", dir="/tmp") as made:
        yield Path(made)


class Daemon:
    """A proxyd in a process of its own."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.socket = directory / "proxyd.sock"
        self.marker = f"{directory.name}-{time.monotonic_ns()}"
        ours, theirs = os.pipe()
        command = [
            sys.executable,
            "-P",
            "-m",
            "recovery.proxyd",
            "--devices",
            "cpu:1",
            "--socket",
            str(self.socket),
        ]
        self.process = subprocess.Popen(
            [*command, "--ready-fd", str(theirs), *flags],
            env=os.environ | {"TEST_MARKER": self.marker},
            pass_fds=[theirs], stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        os.close(theirs)
        with open(ours) as pipe:
            self.answer = json.loads(pipe.readline())

    def runtime(self) -> list[Path]:
        return list(Path("/dev/shm").glob(f"understudy-{os.getuid()}-{self.process.pid}-*"))

    def processes(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.marker.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def wait_for_processes(self, count: int) -> None:
        """The kernel tells nobody about processes that are not theirs: look until it is so."""
        deadline = time.monotonic() + 30
        while len(self.processes()) != count:
            assert time.monotonic() < deadline, self.processes()
            time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_proxyd_that_is_told_to_stop_exits_0_and_leaves_nothing(
    number: signal.Signals, directory: Path
) -> None:
    daemon = Daemon(directory)
    assert daemon.answer == {"ready": True}
    assert len(daemon.runtime()) == 1
    daemon.process.send_signal(number)
    daemon.process.communicate(timeout=30)
    assert daemon.process.returncode == 0
    assert daemon.processes() == []
    assert daemon.runtime() == []
    assert list(directory.iterdir()) == []


def test_second_proxyd_on_the_same_socket_ends_with_one_sentence_and_harms_nothing(directory: Path) -> None:
    daemon = Daemon(directory)
    command = [
        sys.executable,
        "-P",
        "-m",
        "recovery.proxyd",
        "--devices",
        "cpu:1",
        "--socket",
        str(daemon.socket),
    ]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 2
    assert second.stderr.strip().count("\n") == 0
    assert "another proxyd already listens" in second.stderr
    control = [
        sys.executable,
        "-P",
        "-m",
        "recovery.recoveryctl",
        "status",
        "--json",
        "--socket",
        str(daemon.socket),
    ]
    status = subprocess.run(control, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(status.stdout)["node"]["devices"][0]["spec"] == "cpu:0"
    daemon.process.terminate()
    daemon.process.communicate(timeout=30)


def test_proxyd_killed_outright_takes_its_servers_along_and_a_new_one_cleans_up(directory: Path) -> None:
    daemon = Daemon(directory)
    daemon.process.kill()
    daemon.process.communicate(timeout=30)
    daemon.wait_for_processes(0)
    assert len(daemon.runtime()) == 1
    successor = Daemon(directory)
    assert successor.answer == {"ready": True}
    assert daemon.runtime() == []
    successor.process.terminate()
    successor.process.communicate(timeout=30)
    assert list(directory.iterdir()) == []


def test_idle_server_that_dies_is_replaced(directory: Path) -> None:
    daemon = Daemon(directory, "--spares", "1")
    daemon.wait_for_processes(4)  # proxyd, spawner, one server for the device, one spare
    servers = sorted(daemon.processes())[-2:]
    os.kill(servers[0], signal.SIGKILL)
    deadline = time.monotonic() + 30
    while len(alive := daemon.processes()) != 4 or servers[0] in alive:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    daemon.process.terminate()
    daemon.process.communicate(timeout=30)
    assert daemon.processes() == []


def test_missing_gpu_ends_proxyd_with_one_sentence(directory: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    command = [
        sys.executable,
        "-P",
        "-m",
        "recovery.proxyd",
        "--devices",
        "cuda:1",
        "--socket",
        str(directory / "s"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert list(directory.iterdir()) == []


def test_embedded_proxyd_stops_when_its_launcher_is_killed(directory: Path) -> None:
    marker = f"{directory.name}-{time.monotonic_ns()}"
    code = "import time; print('up', flush=True); time.sleep(600)"
    run = subprocess.Popen(
        [sys.executable, "-P", "-m", "recovery.proxyrun", "--devices", "cpu:1", sys.executable, "-c", code],
        env=os.environ | {"TEST_MARKER": marker, "XDG_RUNTIME_DIR": str(directory)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stdout is not None and run.stdout.readline() == "up\n"
    watcher = Daemon.__new__(Daemon)
    watcher.marker = marker
    run.kill()
    run.wait()
    watcher.wait_for_processes(1)  # the user's command is nobody's child now; that is theirs
    (command,) = watcher.processes()
    os.kill(command, signal.SIGKILL)


@pytest.mark.parametrize(
    ("code", "status"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_exit_status_of_the_command_is_passed_on(code: str, status: int, directory: Path) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "recovery.proxyrun",
        "--devices",
        "cpu:1",
        sys.executable,
        "-c",
        code,
    ]
    variables = os.environ | {"XDG_RUNTIME_DIR": str(directory)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stderr


def test_signal_to_proxyrun_reaches_the_command(directory: Path) -> None:
    code = (
        "import signal, sys; signal.signal(15, lambda *_: sys.exit(5)); "
        "print('up', flush=True); signal.pause()"
    )
    run = subprocess.Popen(
        [sys.executable, "-P", "-m", "recovery.proxyrun", "--devices", "cpu:1", sys.executable, "-c", code],
        env=os.environ | {"XDG_RUNTIME_DIR": str(directory)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stdout is not None and run.stdout.readline() == "up\n"
    run.terminate()
    run.communicate(timeout=60)
    assert run.returncode == 5


def test_devices_are_the_running_proxyds_business(directory: Path) -> None:
    daemon = Daemon(directory)
    command = [
        sys.executable,
        "-P",
        "-m",
        "recovery.proxyrun",
        "--devices",
        "cpu:1",
        "--socket",
        str(daemon.socket),
        "true",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "leave out --devices" in done.stderr
    missing = [
        sys.executable,
        "-P",
        "-m",
        "recovery.proxyrun",
        "--socket",
        str(daemon.socket),
        "no-such-command-here",
    ]
    done = subprocess.run(missing, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "cannot start no-such-command-here" in done.stderr
    daemon.process.terminate()
    daemon.process.communicate(timeout=30)
