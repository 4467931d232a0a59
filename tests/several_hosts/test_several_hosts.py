"""Two proxyds on two hosts (network namespaces) and one etcd: a link that is cut, and healed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from etcd_server import running_etcd
from namespaces import Network, network
from proxied import until
from running_proxyd import running_proxyd
from training_run import installed

from understudy.recovery.base.control import blocking_channel, pb, rpc
from understudy.recovery.membership.network.certificates import issue, make_authority

pytestmark = pytest.mark.drawn(2)

PORT = 9400


def seen_by(socket: Path) -> dict[str, Any]:
    """Every host as the proxyd there sees it; a Unix socket is reached from any network."""
    with blocking_channel(socket) as channel:
        found = rpc.DaemonStub(channel).ListHosts(pb.ListHostsRequest(), timeout=30)
    return {host.record.name: host for host in found.hosts}


def states(socket: Path) -> dict[str, str]:
    return {name: host.state for name, host in seen_by(socket).items()}


def proxyd(folder: Path, certs: Path, net: Network, etcd: str, host: str) -> Any:
    place = f"{net.addresses[host]}:{PORT}"
    options = ("--etcd", etcd, "--host-name", host, "--certs", str(certs), "--listen", place)
    return running_proxyd(
        folder / f"{host}.sock",
        1,
        options,
        folder / f"{host}.log",
        program=[*net.inside(host), *installed("proxyd")],
    )


def test_host_whose_link_is_cut_is_suspected_then_lost_and_back_when_it_is_healed() -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="understudy-test-", dir="/tmp")))
        net = stack.enter_context(network("a", "b"))
        certs = folder / "certs"
        make_authority(certs, "tests")
        for host in "ab":
            issue(certs, host)
        issue(certs, "etcd", [net.gateway])
        more = (
            "--cert-file", str(certs / "etcd.pem"), "--key-file", str(certs / "etcd.key"),
            "--trusted-ca-file", str(certs / "ca.pem"), "--client-cert-auth",
        )  # fmt: skip
        etcd = stack.enter_context(running_etcd(folder, net.gateway, "https", more))
        a = stack.enter_context(proxyd(folder, certs, net, etcd.url, "a")).socket
        b = stack.enter_context(proxyd(folder, certs, net, etcd.url, "b")).socket
        until(lambda: states(a) == states(b) == {"a": "alive", "b": "alive"}, "both see both", 30)
        assert seen_by(a)["b"].record.address == f"{net.addresses['b']}:{PORT}"

        net.cut("b")
        thought: list[str] = []

        def lost() -> bool:
            state = states(a)["b"]
            if not thought or thought[-1] != state:
                thought.append(state)
            return state == "lost"

        until(lost, "b is lost to a", 60)
        assert thought[-2:] == ["suspected", "lost"]
        standing = seen_by(a)["b"]
        assert standing.since_ms > 0 and "1 of 1 that could be asked do not reach it (a)" in standing.why
        until(lambda: set(states(b).values()) == {"unknown"}, "b sees nobody", 30)  # and gives nobody up
        shown = subprocess.run(
            [*installed("recoveryctl"), "hosts", "--socket", str(a)],
            capture_output=True, text=True, timeout=60, env=os.environ | {"COLUMNS": "250"},
        ).stdout  # fmt: skip
        assert "lost since" in shown

        net.heal("b")
        until(lambda: states(a) == states(b) == {"a": "alive", "b": "alive"}, "both are back", 60)
        assert seen_by(a)["b"].since_ms == 0


def test_host_that_only_etcd_does_not_see_is_suspected_and_never_lost() -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="understudy-test-", dir="/tmp")))
        net = stack.enter_context(network("a", "b"))
        certs = folder / "certs"
        make_authority(certs, "tests")
        for host in "ab":
            issue(certs, host)
        etcd = stack.enter_context(running_etcd(folder, net.gateway))
        a = stack.enter_context(proxyd(folder, certs, net, etcd.url, "a")).socket
        b = stack.enter_context(proxyd(folder, certs, net, etcd.url, "b")).socket
        until(lambda: states(a) == states(b) == {"a": "alive", "b": "alive"}, "both see both", 30)
        route = [*net.inside("b"), "ip", "route"]
        subprocess.run([*route, "add", "blackhole", f"{net.gateway}/32"], check=True, timeout=20)
        until(lambda: "but a can reach it" in seen_by(a)["b"].why, "suspected, and why not lost", 60)
        assert states(a)["b"] == "suspected"
        subprocess.run([*route, "del", "blackhole", f"{net.gateway}/32"], check=True, timeout=20)
        until(lambda: states(a) == states(b) == {"a": "alive", "b": "alive"}, "both are back", 60)
