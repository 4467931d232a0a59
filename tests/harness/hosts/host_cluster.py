"""Hosts for tests, each with a network, /dev/shm and proxyd of its own, and one etcd that they share."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from etcd_server import running_etcd
from namespaces import Network, network
from proxied import WORKLOADS, until
from running_proxyd import RunningProxyd
from training_run import installed

from understudy.recovery.base.control import blocking_channel, pb, rpc
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.membership.network.certificates import issue, make_authority

EXAMPLES = WORKLOADS.parent.parent / "examples"
PORT = 9400
MASTER_PORT = 29400
SHARED_MEMORY = os.environ.get("UNDERSTUDY_SHARED_MEMORY", "/dev/shm")
"""The same for all hosts, each in a tmpfs of its own, and for the zygotes whose forks run there."""
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "EXAMPLES": str(EXAMPLES),
    "UNDERSTUDY_SHARED_MEMORY": SHARED_MEMORY,
}  # fmt: skip
WAIT_FOR_ALL = "for one in $(jobs -p); do wait $one || status=$?; done; exit ${status:-0}"
PRIVATE = (
    "unshare", "--mount", "--propagation", "private", "bash", "-c",
    'mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /run && '
    f'mkdir -p -m 700 {SHARED_MEMORY} && exec "$@"', "host",
)  # fmt: skip


class HostRun:
    """One host's part of a job."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(process.stdout, self.lines), daemon=True),
            threading.Thread(target=self._read, args=(process.stderr, self.errors), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any, lines: list[str]) -> None:
        lines.extend(line.rstrip("\n") for line in iter(stream.readline, ""))

    def wait(self, timeout: float) -> int:
        status = self.process.wait(timeout)
        for reader in self._readers:
            reader.join(10)
        return status

    def steps(self) -> int:
        """The newest that was printed."""
        told = [line.split() for line in self.lines if line.startswith("step ")]
        return int(told[-1][1]) if told else 0


@contextlib.contextmanager
def short(socket: Path) -> Iterator[str]:
    """A name that is short enough for the kernel; that by way of /proc/PID/root may be too long."""
    folder = os.open(socket.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{socket.name}"
    finally:
        os.close(folder)


class Host:
    """One of them."""

    def __init__(self, cluster: Cluster, name: str, devices: int, options: Sequence[str] = ()) -> None:
        self.cluster, self.name, self.devices, self.options = cluster, name, devices, options
        self.socket = cluster.folder / f"{name}.sock"
        self.log = cluster.folder / f"{name}.log"
        # Whatever is to see its /dev/shm enters the mount namespace of this process.
        self._keeper = subprocess.Popen([*cluster.net.inside(name), *PRIVATE, "sleep", "infinity"])
        until(lambda: self._is_private(), f"{name} has mounts of its own", 20)
        self.proxyd = self.start_proxyd()

    def _is_private(self) -> bool:
        line = Path(f"/proc/{self._keeper.pid}/cmdline").read_bytes()
        return line.startswith(b"sleep")

    def inside(self) -> list[str]:
        """What to put before a command."""
        return ["nsenter", "--target", str(self._keeper.pid), "--mount", "--net"]

    def start_proxyd(self) -> RunningProxyd:
        options = (
            "--etcd", self.cluster.etcd.url, "--host-name", self.name, "--certs", str(self.cluster.certs),
            "--listen", f"{self.cluster.net.addresses[self.name]}:{PORT}",
            "--data-address", self.cluster.net.data_addresses[self.name], *self.options,
        )  # fmt: skip
        self.proxyd = RunningProxyd(
            self.socket, self.devices, options, self.log, ENVIRONMENT, [*self.inside(), *installed("proxyd")]
        )
        return self.proxyd

    def start(self, command: Sequence[str], *options: str) -> HostRun:
        """proxyrun with a command."""
        words = [*self.inside(), *installed("proxyrun"), "--socket", str(self.socket), *options, *command]
        process = subprocess.Popen(
            words, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        return HostRun(process)

    def recoveryctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*module_command("recovery.recoveryctl"), *words, "--socket", str(self.socket)],
            capture_output=True, text=True, timeout=200, env=os.environ | {"COLUMNS": "250"},
        )  # fmt: skip

    def status(self) -> Any:
        with blocking_channel(self.socket) as channel:
            return rpc.DaemonStub(channel).GetStatus(pb.StatusRequest(), timeout=30)

    def state_places(self) -> list[str]:
        """IP:PORT at which its device servers let those of other hosts read state."""
        found = []
        for path in self.path(SHARED_MEMORY).glob("understudy-*/server-*.sock"):
            with short(path) as name, blocking_channel(name) as channel:
                reply = rpc.DeviceServerStub(channel).Health(pb.HealthRequest(), timeout=30)
            found.append(reply.data_address)
        return found

    def shared_memory(self) -> list[str]:
        """What lies in its shared memory."""
        return sorted(os.listdir(self.path(SHARED_MEMORY)))

    def path(self, inside: str) -> Path:
        """As everybody reaches what lies there for it: /run and /dev/shm are its own."""
        return Path(f"/proc/{self._keeper.pid}/root{inside}")

    def stop(self) -> None:
        if self.proxyd.process.poll() is None:
            self.proxyd.stop()
        self._keeper.kill()
        self._keeper.wait()


class Cluster:
    """`hosts`: name -> devices."""

    def __init__(self, folder: Path, net: Network, etcd: Any, hosts: dict[str, int], options: Sequence[str]):
        self.folder, self.net, self.etcd = folder, net, etcd
        self.certs = folder / "certs"
        make_authority(self.certs, "tests")
        for name in hosts:
            issue(self.certs, name)
        self.hosts: dict[str, Host] = {}
        try:
            for name, devices in hosts.items():
                self.hosts[name] = Host(self, name, devices, options)
            until(lambda: all(self.sees_all(host) for host in self.hosts.values()), "all see all", 60, 0.2)
        except BaseException:
            self.stop()
            raise

    def sees_all(self, host: Host) -> bool:
        with blocking_channel(host.socket) as channel:
            found = rpc.DaemonStub(channel).ListHosts(pb.ListHostsRequest(), timeout=30)
        return {one.record.name for one in found.hosts if one.state == "alive"} == set(self.hosts)

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def torchrun(self, names: Sequence[str], script: Path, *arguments: str) -> list[list[str]]:
        """One command for each host, with a rank on each."""
        first = self.net.addresses[names[0]]
        common = ["--nnodes", str(len(names)), "--nproc-per-node", "1", "--master-addr", first]
        common += ["--master-port", str(MASTER_PORT)]
        words = [str(script), *arguments]
        return [
            [*installed("torchrun"), *common, "--node-rank", str(number), "--local-addr", address, *words]
            for number, address in enumerate(self.net.addresses[name] for name in names)
        ]

    def train(
        self,
        names: Sequence[str],
        steps: int,
        losses: Path,
        *,
        script: Path = EXAMPLES / "char_gpt.py",
        options: Sequence[str] = (),
        first_options: Sequence[str] = (),
        arguments: Sequence[str] = (),
        job: str = "spanning",
    ) -> list[HostRun]:
        words = ["--steps", str(steps), "--losses", str(losses), *arguments]
        commands = self.torchrun(names, script, *words)
        common = ["--job", job, "--hosts", str(len(names)), *options]
        runs = [self[names[0]].start(commands[0], *common, *first_options)]
        # Whoever opens the job first leads it.
        until(lambda: f'"{job}"' in self[names[0]].log.read_text(), f"{names[0]} has opened the job", 60)
        return runs + [
            self[name].start(command, *common) for name, command in zip(names[1:], commands[1:], strict=True)
        ]

    def start_ranks(
        self,
        names: Sequence[str],
        script: Path,
        words: Sequence[str],
        *first_options: str,
        each: int = 1,
        options_of: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> list[HostRun]:
        """`each` on every host, migratable; without torchrun, which waits for the agent of a lost one."""
        runs: list[HostRun] = []
        first = self[names[0]]
        for number, name in enumerate(names):
            commands = []
            for local in range(each):
                variables = {
                    "RANK": number * each + local, "WORLD_SIZE": len(names) * each, "LOCAL_RANK": local,
                    "LOCAL_WORLD_SIZE": each, "MASTER_ADDR": self.net.addresses[first.name],
                    "MASTER_PORT": MASTER_PORT,
                }  # fmt: skip
                told = [f"{key}={value}" for key, value in variables.items()]
                commands.append(shlex.join(["env", *told, sys.executable, str(script), *words]))
            together = f"{' & '.join(commands)} & {WAIT_FOR_ALL}"
            options = ["--job", "spanning", "--hosts", str(len(names)), "--migratable"]
            options += [*(first_options if number == 0 else ()), *options_of.get(name, ())]
            runs.append(self[name].start(["bash", "-c", together], *options))
            until(lambda: '"spanning"' in first.log.read_text(), f"{first.name} has opened the job", 60)
        return runs

    def stop(self) -> None:
        for host in self.hosts.values():
            host.stop()


@contextlib.contextmanager
def cluster(hosts: dict[str, int], *options: str) -> Iterator[Cluster]:
    """Until the block ends."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="understudy-test-", dir="/tmp")))
        net = stack.enter_context(network(*hosts, data=True))
        etcd = stack.enter_context(running_etcd(folder, net.gateway))
        made = Cluster(folder, net, etcd, hosts, options)
        stack.callback(made.stop)
        yield made


def losses_of(path: Path, ranks: int) -> list[list[str]]:
    """Of each rank, as bits."""
    files = [path, *(path.with_name(f"{path.name}.rank{rank}") for rank in range(1, ranks))]
    return [file.read_text().split() for file in files]


def report_of(path: Path) -> Any:
    return json.loads(path.read_text())
