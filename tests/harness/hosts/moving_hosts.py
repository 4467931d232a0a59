"""Hosts between which workers move: namespaces of network and mounts, and a real endpoint on each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from namespaces import Network, network
from needs import CRIU
from proxied import WORKLOADS, until

from understudy.recovery.membership.network.certificates import issue, make_authority

PROGRAM = WORKLOADS / "migration" / "moving_host.py"
LOADING = WORKLOADS / "migration" / "loading.py"
COUNTER = WORKLOADS / "migration" / "counter.py"
PORT = 9401
ANSWER_S = 120.0


class MovingHost:
    """One of them; what is mounted there stays if its program is killed."""

    def __init__(self, folder: Path, net: Network, name: str, variables: dict[str, str]) -> None:
        self.name, self._folder = name, folder
        self.cut, self.heal = lambda: net.cut(name), lambda: net.heal(name)
        self._peers = {host: f"{address}:{PORT}" for host, address in net.addresses.items()}
        self._socket = folder / f"{name}.orders"
        self._log = open(folder / f"{name}.log", "a")  # noqa: SIM115
        criu = {CRIU: os.environ[CRIU]} if CRIU in os.environ else {}
        self._variables = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"} | criu | variables
        # `cat` ends when we close its input, or have ended.
        self._machine = subprocess.Popen(
            [*net.machine(name), "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._machine.stdout is not None
        self._machine.stdout.readline()
        self.runtime = ""
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._socket.unlink(missing_ok=True)
        more = {"RUNTIME": self.runtime} if self.runtime else {}
        return subprocess.Popen(
            [*self.inside(), sys.executable, "-P", str(PROGRAM), self.name, self._peers[self.name],
             str(self._folder / "certs"), json.dumps(self._peers), str(self._socket)],
            stdout=self._log, stderr=self._log, env=self._variables | more, start_new_session=True,
        )  # fmt: skip

    def inside(self) -> list[str]:
        """What to put before a command."""
        return ["nsenter", "--target", str(self._machine.pid), "--net", "--mount"]

    def run(self, *command: str) -> str:
        """There."""
        return subprocess.run(
            [*self.inside(), *command], capture_output=True, text=True, timeout=30, check=True
        ).stdout

    def processes(self) -> list[int]:
        """That run there, below relays, too; without the program itself."""
        ours = os.stat(f"/proc/{self._machine.pid}/ns/net").st_ino
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{pid}/ns/net").st_ino == ours and pid not in (
                    self._machine.pid, self.process.pid
                ):  # fmt: skip
                    found.append(pid)
        return found

    def await_start(self) -> None:
        until(self._answers, "a host")
        self.runtime = str(self.order("runtime")["path"])

    def _answers(self) -> bool:
        assert self.process.poll() is None, (self._folder / f"{self.name}.log").read_text()
        with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
            connection.connect(str(self._socket))
            return True
        return False

    def order(self, do: str, **more: Any) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_S)
            connection.connect(str(self._socket))
            connection.sendall(json.dumps({"do": do, **more}).encode() + b"\n")
            with connection.makefile() as lines:
                answer = json.loads(lines.readline() or '{"error": "it has ended"}')
        assert isinstance(answer, dict)
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        """Its successor, after it has been killed."""
        self.process.wait()
        self.process = self._start()
        self.await_start()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._machine.communicate()
        self._log.close()
        print(f"--- {self.name}\n" + (self._folder / f"{self.name}.log").read_text())


class Counted:
    """A worker that counts, prints, and has what workers have (counter.py), and its relay."""

    def __init__(
        self, home: MovingHost, folder: Path, rank: int = 0, *options: str, script: Path = COUNTER
    ) -> None:
        self.home, self.folder, self.rank = home, folder, rank
        command = [sys.executable, str(script), str(folder), *options]
        started = home.order("start", rank=rank, command=command, folder=str(folder))
        assert "error" not in started, started
        self.relay, self._number = started["relay"], started["number"]

    def lines(self) -> list[str]:
        return (self.folder / f"out.{self.rank}").read_text().split("\n")[:-1]

    def errors(self) -> str:
        return (self.folder / f"err.{self.rank}").read_text()

    def await_lines(self, more: int = 10) -> None:
        """Until it has printed so many more."""
        before = len(self.lines())
        until(lambda: len(self.lines()) >= before + more, "it counts on")

    def await_signals(self, number: int) -> None:
        """Until it has had so many."""
        until(lambda: self.lines().count("signal") == number, "it got the signal")

    def send(self, source: MovingHost, to: MovingHost, **more: Any) -> dict[str, Any]:
        done = source.order("send", relay=self.relay, rank=self.rank, to=to.name, **more)
        return done

    def signal(self, number: int) -> None:
        self.home.order("signal", number=self._number, signal=number)

    def wait(self) -> int:
        return int(self.home.order("wait", number=self._number)["status"])


@contextlib.contextmanager
def moving_hosts(folder: Path, *names: str, **variables: dict[str, str]) -> Iterator[list[MovingHost]]:
    """Until the block ends; `variables`: of the environment of a host."""
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(network(*names))
        make_authority(folder / "certs", "tests")
        hosts = []
        for name in names:
            issue(folder / "certs", name)
            host = MovingHost(folder, net, name, variables.get(name, {}))
            stack.callback(host.stop)
            hosts.append(host)
        for host in hosts:
            host.await_start()
        yield hosts


def check_output(worker: Counted) -> None:
    *numbers, done = [line for line in worker.lines() if line != "signal"]
    assert done == "done"
    assert numbers == [str(number) for number in range(len(numbers))]
    assert worker.errors() == "a" * 300_000 + " True\n"


def nothing_left(*hosts: MovingHost) -> None:
    """Of workers that have been there, and ended."""
    until(lambda: not any(host.order("files")["files"] for host in hosts), "files are gone", 20)
    until(lambda: not any(host.processes() for host in hosts), "processes are gone", 20)
