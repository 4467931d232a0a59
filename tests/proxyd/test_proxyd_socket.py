"""Who may reach proxyd, and what happens to sockets and files of one that is alive, dead or foreign."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import grpc.aio
import pytest

from understudy.recovery.base.control import OPTIONS
from understudy.recovery.base.errors import BadInput
from understudy.recovery.daemon.daemon import _bind
from understudy.recovery.machine.processes import start_ticks
from understudy.recovery.machine.runtime_directory import RuntimeDirectory
from understudy.recovery.machine.socket_path import claim, default_socket, is_answering
from understudy.recovery.rendezvous.store import Store
from understudy.recovery.takeover.leftovers import remove_leftovers


@pytest.fixture
def private(tmp_path: Path) -> Path:
    directory = tmp_path / "private"
    directory.mkdir(mode=0o700)
    return directory


def listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.fspath(path))
    listener.listen(1)
    return listener


def test_socket_of_a_living_proxyd_is_refused_with_a_sentence(private: Path) -> None:
    path = private / "proxyd.sock"
    with listening(path), pytest.raises(BadInput, match="another proxyd already listens"), claim(path):
        pass
    assert path.exists()


def test_socket_of_a_dead_proxyd_is_replaced(private: Path) -> None:
    path = private / "proxyd.sock"
    listening(path).close()
    assert path.exists() and not is_answering(path)
    with claim(path):
        assert not path.exists()


def test_file_that_is_no_socket_is_left_alone(private: Path) -> None:
    path = private / "notes.txt"
    path.write_text("mine")
    with pytest.raises(BadInput, match="is not a socket"), claim(path):
        pass
    assert path.read_text() == "mine"


def test_directory_open_to_others_is_refused(private: Path) -> None:
    private.chmod(0o755)
    with pytest.raises(BadInput, match="chmod 700"), claim(private / "proxyd.sock"):
        pass


def test_missing_directory_is_made_private(tmp_path: Path) -> None:
    with claim(tmp_path / "new" / "proxyd.sock"):
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory of somebody else")
def test_directory_of_somebody_else_is_refused(private: Path) -> None:
    os.chown(private, 65534, 65534)
    with pytest.raises(BadInput, match="must be a directory of yours"), claim(private / "proxyd.sock"):
        pass


def test_path_too_long_for_the_kernel_is_refused(private: Path) -> None:
    with pytest.raises(BadInput, match="longer than 107 bytes"), claim(private / ("x" * 120)):
        pass


def test_default_socket_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERSTUDY_SOCKET", "/a/b.sock")
    assert default_socket() == Path("/a/b.sock")
    monkeypatch.delenv("UNDERSTUDY_SOCKET")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_socket() == Path("/run/user/7/understudy/proxyd.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_socket() == Path(f"/tmp/understudy-{os.getuid()}/proxyd.sock")


CONNECT = """
import os, socket, sys
peer = socket.socket(socket.AF_UNIX)
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
try:
    peer.connect(sys.argv[1])
except PermissionError:
    sys.exit(13)
"""


def connect_as(path: Path, uid: int) -> int:
    """A child that gives up being root once Python is loaded: nobody may not read our Python."""
    return subprocess.run([sys.executable, "-c", CONNECT, str(path), str(uid)], check=False).returncode


@pytest.mark.skipif(os.getuid() != 0, reason="only root can connect as somebody else")
@pytest.mark.parametrize("directory_mode", [0o700, 0o755])
def test_peer_of_another_uid_is_refused_by_the_socket_and_by_its_directory(directory_mode: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="understudy-test-", dir="/tmp") as made:
        path = Path(made) / "proxyd.sock"

        async def scene() -> tuple[int, int]:
            server = grpc.aio.server(options=OPTIONS)
            with claim(path):
                _bind(server, path)
            Path(made).chmod(directory_mode)  # with 0755 the socket's own mode is all that protects it
            await server.start()
            try:
                return (
                    await asyncio.to_thread(connect_as, path, 65534),
                    await asyncio.to_thread(connect_as, path, 0),
                )
            finally:
                await server.stop(0)

        assert asyncio.run(scene()) == (13, 0)


def test_bound_socket_has_mode_0600(private: Path) -> None:
    async def scene() -> int:
        server = grpc.aio.server(options=OPTIONS)
        with claim(private / "proxyd.sock"):
            _bind(server, private / "proxyd.sock")
        mode = (private / "proxyd.sock").stat().st_mode
        await server.stop(0)
        return mode

    assert stat.S_IMODE(asyncio.run(scene())) == 0o600


# ------------------------------------------------------------------ shared memory
def dead_process() -> tuple[int, int]:
    child = subprocess.Popen(["sleep", "60"])
    ticks = start_ticks(child.pid)
    child.kill()
    child.wait()
    return child.pid, ticks


def test_runtime_directory_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    runtime = RuntimeDirectory.make(tmp_path)
    assert stat.S_IMODE(runtime.path.stat().st_mode) == 0o700
    runtime.rank_directory("job", 0, 0)
    runtime.remove()
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_dead_proxyd_are_removed(tmp_path: Path) -> None:
    pid, ticks = dead_process()
    left = tmp_path / f"understudy-{os.getuid()}-{pid}-{ticks}-abcd1234"
    (left / "job" / "rank-0").mkdir(parents=True)
    assert remove_leftovers(tmp_path) == [left]
    assert not left.exists()


def test_leftovers_whose_pid_was_reused_are_removed(tmp_path: Path) -> None:
    left = tmp_path / f"understudy-{os.getuid()}-{os.getpid()}-{start_ticks(os.getpid()) + 1}-abcd1234"
    left.mkdir()
    assert remove_leftovers(tmp_path) == [left]


def test_a_zombie_is_dead_although_its_pid_and_start_time_are_there(tmp_path: Path) -> None:
    """A container whose first process reaps nobody keeps a proxyd that was killed for ever."""
    with subprocess.Popen(["true"]) as proxyd:
        started = start_ticks(proxyd.pid)
        os.waitid(os.P_PID, proxyd.pid, os.WEXITED | os.WNOWAIT)
        left = tmp_path / f"understudy-{os.getuid()}-{proxyd.pid}-{started}-zombie"
        left.mkdir()
        assert remove_leftovers(tmp_path) == [left]


def test_directory_of_a_living_proxyd_is_left_alone(tmp_path: Path) -> None:
    runtime = RuntimeDirectory.make(tmp_path)
    assert remove_leftovers(tmp_path) == []
    assert runtime.path.exists()
    runtime.remove()


def test_directory_locked_in_another_pid_namespace_is_left_alone(tmp_path: Path) -> None:
    runtime = RuntimeDirectory.make(tmp_path)
    pid, ticks = dead_process()  # what a foreign namespace's pid looks like from here
    renamed = runtime.path.rename(tmp_path / f"understudy-{os.getuid()}-{pid}-{ticks}-abcd1234")
    assert remove_leftovers(tmp_path) == []
    assert renamed.exists()


def test_directory_that_only_looks_similar_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / f"understudy-{os.getuid()}-notes").mkdir()
    assert remove_leftovers(tmp_path) == []


# ------------------------------------------------------------------ the store
def test_reader_waits_until_its_key_is_set() -> None:
    async def scene() -> bytes | None:
        store = Store()
        reading = asyncio.create_task(store.get("job/1/x", 30))
        await asyncio.sleep(0)
        await store.set("job/1/x", b"value")
        return await reading

    assert asyncio.run(scene()) == b"value"


def test_reader_of_a_key_that_never_comes_gives_up() -> None:
    assert asyncio.run(Store().get("job/1/x", 0.01)) is None


def test_counters_count_as_text_and_jobs_forget_only_their_own_keys() -> None:
    async def scene() -> tuple[int, bytes | None, int]:
        store = Store()
        await store.add("a/n", 2)
        total = await store.add("a/n", 3)
        await store.set("b/x", b"1")
        value = await store.get("a/n", 0)
        store.forget("a")
        return total, value, len(store)

    assert asyncio.run(scene()) == (5, b"5", 1)
