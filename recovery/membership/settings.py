"""What proxyd was told of other hosts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"
MOST_HOSTS_OF_A_JOB = 4096
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"


@dataclass(frozen=True)
class Endpoint:
    """Where an etcd listens."""

    host: str
    port: int
    encrypted: bool

    @property
    def target(self) -> str:
        """As gRPC names it."""
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class MembershipSettings:
    """Which cluster, who we are in it, and where its store is: nowhere, if this host is by itself."""

    host: str
    cluster: str = "default"
    endpoints: tuple[Endpoint, ...] = ()
    listen: str = ""
    """IP address and port for other hosts; empty: none may ask us anything."""
    address: str = ""
    """Where they find it."""
    certificates: Path | None = None
    data_address: str = LOOPBACK
    """IP address of this host at which device servers meet those of other hosts."""
    shared: Path | None = None
    """On storage that all hosts of the cluster have: what device servers cannot read of each other."""


def is_name(text: str) -> bool:
    """Whether a host or a cluster may be called so."""
    return re.fullmatch(_NAME, text) is not None
