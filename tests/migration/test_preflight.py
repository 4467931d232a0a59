"""What would keep a worker from being moved is found in real processes, before it is needed."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import proxied
import pytest
from proxied import until
from running_proxyd import running_proxyd
from test_commands import run

from understudy.recovery.base.own_modules import module_command
from understudy.recovery.migration.preflight import process_tree
from understudy.recovery.migration.preflight.obstacles import obstacles, sentence
from understudy.recovery.migration.preflight.process_tree import parse_maps, read_tree
from understudy.recovery.migration.preflight.sockets import Kind, parse_internet
from understudy.recovery.state.jobs import Session

pytestmark = pytest.mark.drawn(5)

READY = "import os, sys, time; print('ready', file=open(sys.argv[1], 'w')); time.sleep(1000)"


@contextlib.contextmanager
def process(folder: Path, before: str = "", **popen: object) -> Iterator[subprocess.Popen[bytes]]:
    """A Python that did `before` and sleeps, with no descriptors of ours."""
    ready = folder / "ready"
    ready.unlink(missing_ok=True)
    options: dict[str, object] = {
        "start_new_session": True,
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
    }
    started = subprocess.Popen(  # type: ignore[call-overload]
        [sys.executable, "-c", f"{before}\n{READY}", str(ready)], **(options | popen)
    )
    try:
        until(lambda: ready.exists() and ready.read_text(), "ready")
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, 9)
        started.wait()


def found_in(pid: int) -> list[str]:
    """Sentences, without the one about the missing pid namespace."""
    tree = read_tree(pid)
    return [
        text for one in obstacles(tree) if "no pid namespace" not in (text := sentence(1, pid, tree, one))
    ]


def the_one(pid: int) -> str:
    found = found_in(pid)
    assert len(found) == 1, found
    return found[0]


def test_a_plain_process_has_nothing_but_its_pids_in_the_way(tmp_path: Path) -> None:
    with process(tmp_path) as plain:
        assert found_in(plain.pid) == []
        assert "has no pid namespace of its own" in obstacles(read_tree(plain.pid))[0].text


def test_a_tcp_connection_is_named_with_its_peer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; s = socket.create_connection(('127.0.0.1', {port}))"
        with process(tmp_path, code) as connected:
            text = the_one(connected.pid)
    assert text.startswith(f"rank 1 (pid {connected.pid}): descriptor ")
    assert text.endswith(f"is a TCP connection to 127.0.0.1:{port}")


def test_a_listening_socket_is_named_with_its_port(tmp_path: Path) -> None:
    code = "import socket; s = socket.create_server(('::1', 0), family=socket.AF_INET6)"
    with process(tmp_path, code) as listening:
        assert "a TCP socket that listens at [::1]:" in the_one(listening.pid)


def test_a_pipe_to_somebody_outside_is_named_with_who_that_is(tmp_path: Path) -> None:
    with process(tmp_path, stdout=subprocess.PIPE) as piped:
        text = the_one(piped.pid)
    assert "descriptor 1 is a pipe that " in text
    assert f"(pid {os.getpid()}) holds, too" in text


def test_a_unix_socket_to_somebody_outside_is_named(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, process(tmp_path, pass_fds=[theirs.fileno()]) as connected:
        theirs.close()
        assert f"is a Unix socket connected to {read_name()} (pid {os.getpid()})" in the_one(connected.pid)


def read_name() -> str:
    return Path("/proc/self/comm").read_text().strip()


def test_pipes_sockets_events_and_children_of_its_own_are_no_obstacles(tmp_path: Path) -> None:
    code = """
import os, select, signal, socket, subprocess
ours, theirs = os.pipe()
pair = socket.socketpair()
event, poll = os.eventfd(0), select.epoll()
null = open('/dev/urandom')
pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE}
child = subprocess.Popen(['sleep', '1000'], pass_fds=[pair[1].fileno()], **pipes)
"""
    with process(tmp_path, code) as busy:
        assert found_in(busy.pid) == []
        assert len(read_tree(busy.pid).processes) == 2


def test_what_a_child_holds_is_told_with_the_childs_name(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = (
            f"import os, socket, subprocess; s = socket.create_connection(('127.0.0.1', {port}))\n"
            "child = subprocess.Popen(['sleep', '1000'], pass_fds=[s.fileno()]); s.close()"
        )
        with process(tmp_path, code) as parent:
            text = the_one(parent.pid)
    assert "its child sleep): descriptor " in text


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; ours, theirs = os.openpty()", "the terminal /dev/"),
        ("f = open('/dev/kmsg', 'rb', buffering=0)", "the device /dev/kmsg"),
        (
            "import ctypes; fd = ctypes.CDLL(None).inotify_init1(0); assert fd >= 0",
            "inotify, which cannot be moved",
        ),
        (
            "import socket; s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
            "neither a Unix nor a TCP nor a UDP socket",
        ),
        (
            "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.connect(('127.0.0.1', 9))",
            "a UDP connection to 127.0.0.1:9",
        ),
        (
            "import ctypes; c = ctypes.CDLL(None); c.shmat.restype = ctypes.c_void_p\n"
            "i = c.shmget(0, 4096, 0o1600); c.shmat(i, None, 0); c.shmctl(i, 0, None)",
            "has System V shared memory mapped (SYSV",
        ),
        (
            "import os; f = open('big', 'w+b'); f.truncate((1 << 30) + 1); os.unlink('big')",
            "only this descriptor keeps",
        ),
    ],
)
def test_each_kind_of_obstacle_is_named(code: str, words: str, tmp_path: Path) -> None:
    if ("kmsg" in words and not os.access("/dev/kmsg", os.R_OK)) or ("neither" in words and os.geteuid()):
        pytest.skip("may not be opened here")
    with process(tmp_path, code, cwd=tmp_path) as blocked:
        assert any(words in text for text in found_in(blocked.pid)), found_in(blocked.pid)


def test_a_session_of_somebody_outside_is_named(tmp_path: Path) -> None:
    with process(tmp_path, start_new_session=False, process_group=0) as member:
        assert "belongs to the session of " in the_one(member.pid)


def test_lines_that_make_no_sense_are_left_out() -> None:
    good = "  0: 0100007F:1F90 0200000A:01BB 01 0:0 0:0 0 0 0 77 1"
    found = parse_internet(f"header\n{good}\nnonsense\n 1: zz:1 0:0 01 0 0 0 0 0 78\n", Kind.TCP)
    assert {inode: (one.local, one.peer) for inode, one in found.items()} == {
        77: ("127.0.0.1:8080", "10.0.0.2:443")
    }
    maps = "7f00-7f10 rw-s 00000000 00:01 5   /dev/shm/a b (deleted)\n7f10-7f20 rw-p 0 00:00 0\n"
    assert [(one.path, one.shared, one.bytes) for one in parse_maps(maps)] == [
        ("/dev/shm/a b (deleted)", True, 16)
    ]


def test_who_has_ended_is_no_process() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    with pytest.raises(ProcessLookupError):
        read_tree(child.pid)


def test_status_tells_the_first_obstacle_and_how_many_more() -> None:
    session = Session.__new__(Session)
    for known, text in ((None, ""), ((), "yes"), (("a",), "no (a)"), (("a", "b", "c"), "no (a; and 2 more)")):
        session.obstacles = known
        assert session.migratable == text


def test_a_users_own_connection_shows_in_preflight_and_status_before_it_is_needed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = tmp_path / "script.py"
        script.write_text(
            "import socket, sys, time, torch\n"
            f"connection = socket.create_connection(('127.0.0.1', {port}))\n"
            "x = torch.ones(3, device='cuda'); torch.cuda.synchronize()\n"
            "while not __import__('os').path.exists(sys.argv[1]): time.sleep(0.05)\n"
        )
        with running_proxyd(tmp_path / "proxyd.sock", 1) as proxyd:
            command = [
                *module_command("recovery.proxyrun"),
                "--socket",
                str(proxyd.socket),
                *proxied.python(script),
            ]
            train = subprocess.Popen([*command, str(tmp_path / "stop")], stdin=subprocess.DEVNULL)
            at = ["--socket", str(proxyd.socket)]
            told = f"is a TCP connection to 127.0.0.1:{port}"
            try:
                shown = until(
                    lambda: (s := run("recoveryctl", "status", *at, COLUMNS="400").stdout)
                    and "migratable: no (" in s and s, "a survey",
                )  # fmt: skip
                looked = run("recoveryctl", "preflight", *at)
            finally:
                (tmp_path / "stop").touch()
                assert train.wait(60) == 0
    assert "rank 0" in shown
    assert looked.returncode == 1
    assert told in looked.stdout, looked.stdout


def test_a_descriptor_that_is_closed_while_it_is_looked_at_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = process_tree._text

    def closed_by_then(file: Path) -> str:
        return "" if file.parent.name == "fdinfo" and file.name == "1" else text(file)

    monkeypatch.setattr(process_tree, "_text", closed_by_then)
    with subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL) as child:
        try:
            (process,) = read_tree(child.pid).processes
        finally:
            child.kill()
    assert 1 not in [one.number for one in process.descriptors]
