"""Two proxyds and a real etcd: they know each other, and its end is no end of theirs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_proxyd_recovery
from etcd_server import EtcdServer, free_port, running_etcd
from proxied import until
from running_node import Node
from running_proxyd import RunningProxyd, running_proxyd

from understudy.recovery.base.control import blocking_channel, pb, rpc
from understudy.recovery.base.own_modules import module_command

pytestmark = pytest.mark.drawn(6)

variables = test_proxyd_recovery.variables  # the fixture


@pytest.fixture
def etcd(folder: Path) -> Iterator[EtcdServer]:
    with running_etcd(folder) as server:
        yield server


def recoveryctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*module_command("recovery.recoveryctl"), *arguments],
        capture_output=True, text=True, timeout=60, check=False, env=os.environ | {"COLUMNS": "250"},
    )  # fmt: skip


def hosts(socket: Path) -> dict[str, Any]:
    """By name, as the proxyd there sees them."""
    with blocking_channel(socket) as channel:
        found = rpc.DaemonStub(channel).ListHosts(pb.ListHostsRequest(), timeout=30)
    return {host.record.name: host for host in found.hosts}


def states(socket: Path) -> dict[str, str]:
    return {name: host.state for name, host in hosts(socket).items()}


def options(etcd: EtcdServer, name: str, *more: str) -> tuple[str, ...]:
    return ("--etcd", etcd.url, "--host-name", name, "--cluster", "tests", *more)


def test_hosts_of_a_cluster_are_shown_with_their_devices_until_they_leave(
    folder: Path, etcd: EtcdServer
) -> None:
    with (
        running_proxyd(folder / "a.sock", 1, options(etcd, "a")) as a,
        running_proxyd(folder / "b.sock", 2, options(etcd, "b")) as b,
    ):
        until(lambda: states(a.socket) == states(b.socket) == {"a": "alive", "b": "alive"}, "both", 20)
        until(lambda: hosts(a.socket)["b"].record.node.spares == 1, "the spare of b", 30)
        found = hosts(a.socket)
        assert found["a"].here and not found["b"].here
        assert [device.spec for device in found["b"].record.node.devices] == ["cpu:0", "cpu:1"]
        assert found["b"].record.node.pid == b.pid
        assert found["b"].record.boot_id and 0 <= found["b"].sign_age_s <= 9
        plain = json.loads(recoveryctl("hosts", "--json", "--socket", str(b.socket)).stdout)
        assert [(host["record"]["name"], host["state"], host["here"]) for host in plain["hosts"]] == [
            ("a", "alive", False), ("b", "alive", True),
        ]  # fmt: skip
        shown = recoveryctl("hosts", "--socket", str(a.socket)).stdout
        assert "cluster tests, etcd at 127.0.0.1" in shown and "2 cpu: 2 idle" in shown
        b.stop()
        until(lambda: states(a.socket) == {"a": "alive"}, "b took its leave", 20)


def test_host_whose_proxyd_is_killed_is_suspected_and_its_successor_takes_its_place(
    folder: Path, etcd: EtcdServer
) -> None:
    with running_proxyd(folder / "a.sock", 1, options(etcd, "a")) as a:
        b = RunningProxyd(folder / "b.sock", 1, options(etcd, "b"))
        until(lambda: states(a.socket).get("b") == "alive", "both", 20)
        b.process.send_signal(signal.SIGKILL)
        b.process.wait()
        with running_proxyd(folder / "b.sock", 1, options(etcd, "b")) as successor:  # its lease still lasts
            until(lambda: hosts(a.socket)["b"].record.node.pid == successor.pid, "the successor", 20)
            assert states(a.socket)["b"] == "alive"
            successor.process.send_signal(signal.SIGKILL)
            until(lambda: states(a.socket)["b"] == "suspected", "its lease ended", 30)
            until(lambda: "nobody can be asked" in hosts(a.socket)["b"].why, "the reason", 10)


@pytest.mark.parametrize("which", ["unreachable", "taken"])
def test_proxyd_that_cannot_register_at_its_start_ends_with_one_sentence(
    which: str, folder: Path, etcd: EtcdServer
) -> None:
    url = etcd.url if which == "taken" else f"http://127.0.0.1:{free_port()}"
    with running_proxyd(folder / "a.sock", 1, options(etcd, "a")):
        done = subprocess.run(
            [*module_command("recovery.proxyd"), "--devices", "cpu:1", "--socket",
             str(folder / "b.sock"), "--etcd", url, "--host-name", "a", "--cluster", "tests"],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 2
    (sentence,) = done.stderr.strip().splitlines()
    if which == "taken":
        assert "a host a is registered and alive" in sentence and "choose another --host-name" in sentence
    else:
        assert "does not answer: Connection refused" in sentence and "check --etcd" in sentence


def test_training_goes_on_without_etcd_and_the_host_registers_again_when_it_is_back(
    folder: Path, etcd: EtcdServer, variables: dict[str, str]
) -> None:
    port = free_port()

    def metric() -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        name = "understudy_membership_trouble_since_seconds "
        return float(next(line for line in lines if line.startswith(name)).split()[1])

    with Node(folder, variables, *options(etcd, "a", "--metrics", str(port))) as node:
        node.train(8, limit=2)
        node.await_step(2)
        until(lambda: len(hosts(node.socket)["a"].record.ranks) == 2, "the ranks are told", 20)
        assert metric() == 0
        etcd.kill()
        until(lambda: node.status().node.membership.trouble, "trouble", 20)
        trouble = node.status().node.membership
        assert "does not answer" in trouble.trouble and metric() == trouble.trouble_since_ms / 1000 > 0
        assert "not registered with the cluster tests since" in node.recoveryctl("status")
        assert states(node.socket) == {"a": "unknown"}
        node.let(5)
        node.await_step(5)
        etcd.start()
        until(lambda: not node.status().node.membership.trouble, "registered again", 30)
        until(lambda: states(node.socket) == {"a": "alive"}, "alive again", 20)
        assert metric() == 0
        node.finish()


def test_host_without_etcd_is_shown_by_itself(folder: Path) -> None:
    with running_proxyd(folder / "a.sock", 1) as a:
        until(lambda: list(states(a.socket).values()) == ["alive"], "itself", 20)
        assert "this host is by itself" in recoveryctl("hosts", "--socket", str(a.socket)).stdout
