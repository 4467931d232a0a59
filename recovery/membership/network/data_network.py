"""What device servers are told of the network on which they meet those of other hosts."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from understudy.recovery.base.errors import BadInput
from understudy.recovery.membership.settings import LOOPBACK, MembershipSettings

_IP = (socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True)
class DataNetwork:
    """Where device servers of this host are reached by those of others."""

    address: str = LOOPBACK
    interface: str = "lo"
    """Which has that address; empty: none has it at present."""
    certificates: Path | None = None
    host: str = ""
    """By which device servers of other hosts know those here; None: they are not to be asked."""
    shared: Path | None = None
    """Where those find what they do not reach here; None: nowhere."""

    @property
    def options(self) -> list[str]:
        """For the spawner's command line."""
        told = ["--data-address", self.address, "--data-interface", self.interface]
        if self.certificates is not None:
            told += ["--certificates", str(self.certificates), "--host-name", self.host]
        if self.shared is not None:
            told += ["--shared-directory", str(self.shared)]
        return told


def data_network(settings: MembershipSettings, *, must: bool) -> DataNetwork:
    """As proxyd was told; `must`: raises BadInput if no interface has that address."""
    interface = interface_of(settings.data_address)
    if not interface and must:
        raise BadInput(
            f"{settings.data_address} is no address of this host: say with --data-address IP where device "
            "servers of other hosts reach those here"
        )
    certificates = settings.certificates if settings.listen else None
    return DataNetwork(settings.data_address, interface, certificates, settings.host, settings.shared)


def interface_of(address: str) -> str:
    """The one that has it; empty: none."""
    wanted = ipaddress.ip_address(address)
    if wanted.is_loopback:
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        known = (one.address.partition("%")[0] for one in addresses if one.family in _IP)
        if any(ipaddress.ip_address(one) == wanted for one in known):
            return str(name)
    return ""
