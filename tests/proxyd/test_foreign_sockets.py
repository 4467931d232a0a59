"""Nobody of ours talks to a proxyd of another user, whoever was first at the default path."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from places import TESTS

from understudy.protos import control_pb2 as pb
from understudy.proxy_client import proxyd_store
from understudy.recovery.base.errors import BadInput
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.machine import private_socket
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY
from understudy.recovery.machine.socket_path import is_answering
from understudy.recovery.run.launch import environment
from understudy.replay import Log, LogError, create_log

NOBODY = 65534
FOREIGN = TESTS / "workloads" / "foreign_proxyd.py"
USES_A_DEVICE = "import torch; torch.ones(3).cuda()"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of others")


class Foreign:
    """A proxyd of nobody, in a directory of its own or in one of ours."""

    def __init__(self, directory: Path, *, ours: bool) -> None:
        self.socket = directory / "proxyd.sock"
        if ours:
            directory.mkdir()
            directory.chmod(0o777)
        self._process = subprocess.Popen(
            [sys._base_executable, str(FOREIGN), str(self.socket), str(NOBODY)],  # type: ignore[attr-defined]
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        if ours:
            directory.chmod(0o700)

    def asked(self) -> list[str]:
        """For which methods, until now; it ends."""
        return self._process.communicate(timeout=30)[0].splitlines()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(params=["their directory", "our directory"])
def foreign(request: pytest.FixtureRequest) -> Iterator[Foreign]:
    if os.geteuid() != 0:
        pytest.skip("only root starts processes of others")
    with tempfile.TemporaryDirectory(prefix="understudy-test-", dir="/tmp") as made:
        Path(made).chmod(0o777)
        found = Foreign(Path(made) / "u", ours=request.param == "our directory")
        try:
            yield found
        finally:
            found.end()


def run_proxyrun(foreign: Foreign) -> subprocess.CompletedProcess[str]:
    command = [*module_command("recovery.proxyrun"), sys.executable, "-c", USES_A_DEVICE]
    return _run(command, os.environ | {"UNDERSTUDY_SOCKET": str(foreign.socket)})


def run_recoveryctl(foreign: Foreign) -> subprocess.CompletedProcess[str]:
    command = [*module_command("recovery.recoveryctl"), "status", "--socket", str(foreign.socket)]
    return _run(command, dict(os.environ))


def run_worker(foreign: Foreign) -> subprocess.CompletedProcess[str]:
    node = SimpleNamespace(
        capability=pb.Capability(driver="cpu", device_name="cpu", total_memory=1 << 30, major=8), devices=[0]
    )
    return _run([sys.executable, "-c", USES_A_DEVICE], environment("job", foreign.socket, node))


def _run(command: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("client", "status"), [(run_proxyrun, 2), (run_recoveryctl, 2), (run_worker, 1)])
def test_no_client_asks_a_proxyd_of_another_user_for_anything(
    foreign: Foreign, client: Callable[[Foreign], subprocess.CompletedProcess[str]], status: int
) -> None:
    ended = client(foreign)
    assert foreign.asked() == []
    assert ended.returncode == status
    assert (
        "must be a directory of yours" in ended.stderr
        or f"another user (uid {NOBODY}) listens at {foreign.socket}" in ended.stderr
    ), ended.stderr
    assert ended.stderr.rstrip().endswith("choose another --socket")


def test_a_directory_of_ours_that_others_may_write_into_is_not_trusted(folder: Path) -> None:
    path = folder / "u" / "proxyd.sock"
    path.parent.mkdir(mode=0o700)
    listener = private_socket.bound_to(path)
    with listener:
        listener.listen(1)
        assert is_answering(path)
        path.parent.chmod(0o770)
        with pytest.raises(BadInput, match=r"open to other users \(mode 0770\)"):
            is_answering(path)


def test_a_place_where_nothing_is_needs_to_belong_to_nobody() -> None:
    assert not is_answering(Path("/proc/nobody-listens-here.sock"))
    assert not is_answering(Path("/no/such/directory/proxyd.sock"))


def test_a_link_to_a_directory_of_ours_is_not_taken_for_it(folder: Path) -> None:
    """Whoever made the link may let it point elsewhere between two looks."""
    (folder / "u").mkdir(mode=0o700)
    with private_socket.bound_to(folder / "u" / "proxyd.sock") as listener:
        listener.listen(1)
        (folder / "link").symlink_to(folder / "u")
        with pytest.raises(BadInput, match="must be a directory of yours"):
            is_answering(folder / "link" / "proxyd.sock")


def test_a_socket_whose_backlog_is_full_is_answering(folder: Path) -> None:
    path = folder / "proxyd.sock"
    with private_socket.bound_to(path) as listener, socket.socket(socket.AF_UNIX) as waiting:
        listener.listen(0)
        waiting.connect(str(path))
        assert is_answering(path)


def test_the_workers_store_of_another_user_is_told_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "store"
    with private_socket.bound_to(path) as listener:
        listener.listen(1)
        heard: list[bytes] = []

        def hear() -> None:
            connection, _ = listener.accept()
            with connection:
                heard.append(connection.recv(1000))

        hearing = threading.Thread(target=hear)
        hearing.start()
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)  # then it is we who are another user
        with pytest.raises(RuntimeError, match="a process of another user"):
            proxyd_store.ask(str(path), {"do": "count"}, 60.0)
        hearing.join()
        assert heard == [b""]


@needs_root
def test_a_log_of_another_user_is_not_mapped() -> None:
    directory = tempfile.mkdtemp(prefix="understudy-test-", dir=SHARED_MEMORY)
    try:
        create_log(
            directory, segment_bytes=4 << 20, segment_count=4, dictionary_bytes=1 << 20, reply_bytes=1 << 16,
            shadow_bytes=1 << 20, proxyd_pid=os.getpid(),
        )  # fmt: skip
        Log(directory)
        os.chown(f"{directory}/segments", NOBODY, NOBODY)
        with pytest.raises(LogError, match="segments belongs to another user"):
            Log(directory)
    finally:
        shutil.rmtree(directory)
