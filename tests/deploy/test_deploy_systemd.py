"""deploy/systemd: systemd accepts the unit, and what it says is carried out here as systemd would."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import proxied
import pytest
from proxied import WORKLOADS, left_behind, until
from training_run import installed
from unit_file import SYSTEMD, UNIT, environment_file, exec_start, of_this_installation, settings

from understudy.recovery.config.proxyd_settings import settings_of

pytestmark = [pytest.mark.cold, pytest.mark.drawn(12)]  # the service manager's child is proxyd itself
MOST_EXPOSED = 2.5
"""Of `systemd-analyze security`, from 0 to 10; 2.0 today."""
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here"
)


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """With the programs of this installation, which `verify` looks for."""
    copy = tmp_path / UNIT.name
    copy.write_text(of_this_installation(UNIT.read_text()))
    return copy


class Systemd:
    """Starts the unit's command in its environment, and takes what it tells."""

    def __init__(
        self, folder: Path, options: str = "--devices cpu:1 --spares 1", before: tuple[str, ...] = ()
    ) -> None:
        """`before`: the command is an argument of this one."""
        self.runtime = folder
        (folder / "understudy").mkdir(mode=0o700)  # RuntimeDirectory=
        self.socket = folder / "understudy" / "proxyd.sock"
        self._told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._told.settimeout(60)
        self._told.bind(os.fspath(folder / "notify"))
        self.options = {"PROXYD_OPTIONS": options}
        self._before = before
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Type=notify: until it says that it is ready."""
        self.process = subprocess.Popen(
            [*self._before, *exec_start(self.runtime, self.options)],
            env=os.environ | self.options | {"NOTIFY_SOCKET": os.fspath(self.runtime / "notify")},
            umask=int(settings()["UMask"][0], 8), start_new_session=True,
        )  # fmt: skip
        assert self.next_word() == "READY=1"
        return self.process

    def next_word(self) -> str:
        return self._told.recv(256).decode()

    def close(self) -> None:
        """Ends what still runs."""
        self.process.terminate()
        self.process.wait(60)
        self._told.close()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    made = Systemd(tmp_path)
    try:
        yield made
    finally:
        made.close()


@needs_systemd
def test_systemd_accepts_the_unit(unit: Path) -> None:
    done = analyze("verify", str(unit))
    assert done.returncode == 0 and done.stderr == "", done.stderr


@needs_systemd
def test_the_check_by_systemd_would_notice_a_misspelt_setting(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("KillMode=process", "KillMode=proces"))
    assert "kill mode" in analyze("verify", str(unit)).stderr


@needs_systemd
def test_the_unit_is_no_more_exposed_than_it_has_to_be(unit: Path) -> None:
    done = analyze("security", "--offline=true", "--no-pager", str(unit))
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found[1]) <= MOST_EXPOSED, done.stdout


def test_options_in_the_environment_file_are_what_proxyd_takes(tmp_path: Path) -> None:
    options = environment_file(SYSTEMD / "proxyd.env")["PROXYD_OPTIONS"]
    arguments = options.replace("/var/lib/understudy", str(tmp_path)).split()
    given = settings_of(arguments)
    assert given.persist is not None and given.persist.directory.parent == tmp_path
    assert settings()["StateDirectory"] == ["understudy"]  # /var/lib/understudy may be written


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def control(*arguments: str) -> str:
    """What recoveryctl prints."""
    command = [*installed("recoveryctl"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def ranks(*at: str) -> str:
    """As JSON; while there are none, as of one that has persisted nothing."""
    return json.dumps(json.loads(control("status", "--json", *at))["ranks"] or [{"persisted_step": 0}])


def allowed_calls(*names: str) -> set[str]:
    """System calls that SystemCallFilter=NAMES allows, groups and all they consist of."""
    found: set[str] = set()
    for name in names:
        if name.startswith("@"):
            lines = analyze("syscall-filter", "--no-pager", name).stdout.splitlines()[1:]
            words = [line.strip() for line in lines]
            found |= allowed_calls(*(word for word in words if word and not word.startswith("#")))
        else:
            found.add(name)
    return found


def calls_of(trace: str) -> dict[str, str]:
    """The system calls in what strace wrote, and a line of each.

    Of a process that is killed as it stops for strace, that reads a number which Linux gives to no system
    call (`syscall_0x7551`, once in many runs); such a call was none.  One that is too new for strace counts.
    """
    lines = re.finditer(r"^\d+ +(?:<\.\.\. )?([a-z0-9_]+)(?:\(| resumed).*$", trace, re.MULTILINE)
    made = {line[1]: line[0] for line in lines}
    return {
        name: line for name, line in made.items() if int(name.partition("syscall_")[2] or "0", 16) < 0x400
    }


@needs_systemd
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed here")
def test_every_system_call_of_proxyd_and_its_processes_is_allowed(tmp_path: Path) -> None:
    """While it keeps a training on storage, replaces a server that was killed, and stops."""
    trace = tmp_path / "calls"
    options = f"--devices cpu:1 --persist {tmp_path}/stored --persist-every 1step --validate-every 2"
    tracer = ("strace", "--follow-forks", "--quiet=all", "--signal=none", "-o", str(trace))
    if subprocess.run([*tracer, "true"], capture_output=True, check=False).returncode:
        pytest.skip("processes may not be traced here")
    systemd = Systemd(tmp_path, options, tracer)
    at = ("--socket", str(systemd.socket))
    script = proxied.python(WORKLOADS / "tiny.py", "--steps", "1000000")
    try:
        with subprocess.Popen([*installed("proxyrun"), *at, *script], stdout=subprocess.DEVNULL) as run:
            try:
                until(lambda: '"persisted_step": 0' not in ranks(*at), "a snapshot on storage", 120)
                control("drill", "kill-server", "--rank", "0", *at)
            finally:
                run.terminate()
    finally:
        os.kill(children(systemd.process.pid)[0], signal.SIGTERM)  # strace itself would only let go of it
        systemd.process.wait(60)
        systemd.close()
    made = calls_of(trace.read_text())
    assert {"pidfd_open", "futex"} <= set(made)
    refused = set(made) - allowed_calls(*settings()["SystemCallFilter"])
    assert refused == set(), [made[name] for name in refused]


def test_a_number_that_is_no_system_calls_is_not_counted_as_one() -> None:
    trace = "7 futex(0x1) = 0\n7 syscall_0x7551(0x0) = 0\n7 syscall_0x1d2(0x0) = 0\n"
    assert set(calls_of(trace)) == {"futex", "syscall_0x1d2"}


def test_the_services_user_is_the_one_that_is_made() -> None:
    words = (SYSTEMD / "sysusers.conf").read_text().splitlines()[-1].split()
    assert words[:2] == ["u", settings()["User"][0]]


def test_a_service_that_is_stopped_says_so_and_leaves_nothing(systemd: Systemd) -> None:
    systemd.process.send_signal(signal.SIGTERM)  # KillMode=process: to this process alone
    assert systemd.next_word() == "STOPPING=1"
    assert systemd.process.wait(float(settings()["TimeoutStopSec"][0])) == 0
    assert not systemd.socket.exists()
    assert left_behind() == []


def test_a_service_that_is_killed_and_restarted_adopts_its_training(systemd: Systemd) -> None:
    command = [
        *installed("proxyrun"),
        "--socket",
        str(systemd.socket),
        *proxied.python(WORKLOADS / "tiny.py", "--fail", "hang"),
    ]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    until(lambda: run.stdout is not None and run.stdout.readline().startswith("hanging"), "it hangs")
    systemd.process.kill()  # Restart=on-failure: so that it comes back
    systemd.process.wait()
    systemd.options = {"PROXYD_OPTIONS": "--devices cpu:1 --spares 0"}  # an edited file, with other options
    systemd.start()
    assert "adopted" in control("status", "--socket", str(systemd.socket))
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=60)
    assert "adopted the job" in errors
    systemd.process.send_signal(signal.SIGTERM)
    assert systemd.process.wait(60) == 0
    assert left_behind() == []


def test_the_unit_says_what_adoption_rests_on() -> None:
    """Without any of these a proxyd that dies, or one server that runs out of memory, ends every training."""
    told = settings()
    assert told["KillMode"] == ["process"]
    assert told["Restart"] == ["on-failure"]
    assert told["RuntimeDirectoryPreserve"] == ["restart"]
    assert told["OOMPolicy"] == ["continue"]


def test_children_are_not_told_of_the_service_manager(systemd: Systemd) -> None:
    """Theirs would be a second READY=1, and they live longer than proxyd."""
    environment = Path(f"/proc/{children(systemd.process.pid)[0]}/environ").read_bytes()
    assert b"PROXYD_OPTIONS" in environment and b"NOTIFY_SOCKET" not in environment
    systemd.process.terminate()
    assert systemd.process.wait(60) == 0
