"""Hosts for tests: network namespaces on a bridge of their own, whose links can be cut; root is needed."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from collections.abc import Iterator, Sequence

import pytest


def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)


class Network:
    """A bridge at .1, and a namespace at .2, .3, … for each host."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._id = f"us{secrets.token_hex(2)}"  # not by our pid: another run may be in a namespace of pids
        self._subnet = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}"
        self.gateway = f"{self._subnet}.1"
        self.addresses = {host: f"{self._subnet}.{number}" for number, host in enumerate(hosts, 2)}

    def make(self) -> None:
        """Skips the test where it cannot be made."""
        bridge = f"{self._id}br"
        steps = [
            ("link", "add", bridge, "type", "bridge"),
            ("addr", "add", f"{self.gateway}/24", "dev", bridge),
            ("link", "set", bridge, "up"),
        ]
        for host, address in self.addresses.items():
            inside, outside = f"{self._id}{host}i", self._link(host)
            steps += [
                ("netns", "add", self._namespace(host)),
                ("link", "add", outside, "type", "veth", "peer", "name", inside),
                ("link", "set", inside, "netns", self._namespace(host)),
                ("link", "set", outside, "master", bridge),
                ("link", "set", outside, "up"),
                ("-n", self._namespace(host), "addr", "add", f"{address}/24", "dev", inside),
                ("-n", self._namespace(host), "link", "set", inside, "up"),
                ("-n", self._namespace(host), "link", "set", "lo", "up"),
            ]
        for step in steps:
            if (done := _ip(*step)).returncode != 0:
                pytest.skip(
                    f"no network namespaces can be had here: ip {' '.join(step)}: {done.stderr.strip()}"
                )

    def remove(self) -> None:
        for host in self.addresses:
            _ip("netns", "del", self._namespace(host))
            _ip("link", "del", self._link(host))
        _ip("link", "del", f"{self._id}br")

    def inside(self, host: str) -> list[str]:
        """What to put before a command."""
        return ["ip", "netns", "exec", self._namespace(host)]

    def cut(self, host: str) -> None:
        """Nothing reaches it, and nobody is told."""
        assert _ip("link", "set", self._link(host), "nomaster").returncode == 0

    def heal(self, host: str) -> None:
        assert _ip("link", "set", self._link(host), "master", f"{self._id}br").returncode == 0

    def _namespace(self, host: str) -> str:
        return f"{self._id}-{host}"

    def _link(self, host: str) -> str:
        return f"{self._id}{host}o"


@contextlib.contextmanager
def network(*hosts: str) -> Iterator[Network]:
    """Until the block ends; names of hosts are short."""
    made = Network(hosts)
    try:
        made.make()
        yield made
    except FileNotFoundError:
        pytest.skip("there is no `ip` command here")
    finally:
        with contextlib.suppress(FileNotFoundError):
            made.remove()
