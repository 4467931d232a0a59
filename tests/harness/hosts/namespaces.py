"""Hosts for tests: network namespaces on a bridge of their own, whose links can be cut; root is needed."""

from __future__ import annotations

import contextlib
import secrets
import string
import subprocess
from collections.abc import Iterator, Sequence

import pytest


def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)


class Network:
    """A bridge at .1, and a namespace at .2, .3, … for each host; if wanted another bridge for data."""

    def __init__(self, hosts: Sequence[str], data: bool = False) -> None:
        # Not by our pid: another run may be in a namespace of pids.
        self._id = "us" + "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(4))
        self._subnet = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}"
        self.gateway = f"{self._subnet}.1"
        self.addresses = {host: f"{self._subnet}.{number}" for number, host in enumerate(hosts, 2)}
        subnet = f"172.{16 + secrets.randbelow(16)}.{secrets.randbelow(250)}"
        self.data_addresses = (
            {host: f"{subnet}.{number}" for number, host in enumerate(hosts, 2)} if data else {}
        )

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
        if self.data_addresses:
            steps += [
                ("link", "add", self._data_bridge, "type", "bridge"),
                ("link", "set", self._data_bridge, "up"),
            ]
        for host, address in self.data_addresses.items():
            inside, outside, namespace = f"{self._id}{host}j", self._data_link(host), self._namespace(host)
            steps += [
                ("link", "add", outside, "type", "veth", "peer", "name", inside),
                ("link", "set", inside, "netns", namespace),
                ("link", "set", outside, "master", self._data_bridge),
                ("link", "set", outside, "up"),
                ("-n", namespace, "addr", "add", f"{address}/24", "dev", inside),
                ("-n", namespace, "link", "set", inside, "up"),
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
            _ip("link", "del", self._data_link(host))
        _ip("link", "del", self._data_bridge)
        _ip("link", "del", f"{self._id}br")

    def inside(self, host: str) -> list[str]:
        """What to put before a command."""
        return ["ip", "netns", "exec", self._namespace(host)]

    def machine(self, host: str) -> list[str]:
        """The same, with shared memory and /run of its own, as another machine has."""
        private = 'mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /run && exec "$@"'
        return [*self.inside(host), "unshare", "--mount", "sh", "-c", private, "sh"]

    def cut(self, host: str) -> None:
        """Nothing reaches it, and nobody is told."""
        assert _ip("link", "set", self._link(host), "nomaster").returncode == 0

    def heal(self, host: str) -> None:
        assert _ip("link", "set", self._link(host), "master", f"{self._id}br").returncode == 0

    def cut_data(self, host: str) -> None:
        """Nothing reaches it over the data network; the other one is as it was."""
        assert _ip("link", "set", self._data_link(host), "nomaster").returncode == 0

    def heal_data(self, host: str) -> None:
        assert _ip("link", "set", self._data_link(host), "master", self._data_bridge).returncode == 0

    def unplug_data(self, host: str) -> None:
        """Its interface has no carrier."""
        assert _ip("link", "set", self._data_link(host), "down").returncode == 0

    def plug_data(self, host: str) -> None:
        assert _ip("link", "set", self._data_link(host), "up").returncode == 0

    def forbid(self, host: str, place: str) -> None:
        """It may not open a TCP connection to that IP:PORT, and is told so."""
        address, _, port = place.rpartition(":")
        rule = ("rule", "add", "to", address, "ipproto", "tcp", "dport", port, "prohibit")
        assert _ip("-n", self._namespace(host), *rule).returncode == 0

    @property
    def _data_bridge(self) -> str:
        return f"{self._id}db"

    def _namespace(self, host: str) -> str:
        return f"{self._id}-{host}"

    def _link(self, host: str) -> str:
        return f"{self._id}{host}o"

    def _data_link(self, host: str) -> str:
        return f"{self._id}{host}p"


@contextlib.contextmanager
def network(*hosts: str, data: bool = False) -> Iterator[Network]:
    """Until the block ends; names of hosts are short.  `data`: with a network of its own for data."""
    made = Network(hosts, data)
    try:
        made.make()
        yield made
    except FileNotFoundError:
        pytest.skip("there is no `ip` command here")
    finally:
        with contextlib.suppress(FileNotFoundError):
            made.remove()
