"""The options of proxyd that say something of other hosts; every mistake becomes one sentence."""

from __future__ import annotations

import argparse
import re
import socket
from typing import Any

from recovery.membership.settings import Endpoint, MembershipSettings, is_name
from recovery.settings import BadInput


def add_options(parser: argparse.ArgumentParser) -> None:
    """To proxyd's command line."""
    parser.add_argument(
        "--etcd", default="", metavar="URL[,URL]",
        help="where hosts know each other from: http://10.0.0.1:2379 (off: this host is by itself)",
    )  # fmt: skip
    parser.add_argument("--cluster", default="", metavar="NAME", help="which of those there (default)")
    parser.add_argument(
        "--host-name", default="", metavar="NAME", help="of this host among them (this machine's)"
    )


def membership_of(given: Any) -> MembershipSettings:
    """What they say; raises BadInput."""
    if given.cluster and not given.etcd:
        raise BadInput(f"--cluster {given.cluster} is of no use without --etcd URL")
    return MembershipSettings(
        host=parse_name(given.host_name or default_host(), "--host-name"),
        cluster=parse_name(given.cluster or "default", "--cluster"),
        endpoints=parse_endpoints(given.etcd) if given.etcd else (),
    )


def parse_name(text: str, flag: str) -> str:
    """Of a host or a cluster; raises BadInput."""
    if not is_name(text):
        raise BadInput(f"{flag} {text!r} is no name: letters, digits, . _ and - only, at most 63")
    return text


def default_host() -> str:
    """This machine's name, with what no name may have replaced."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-")[:63] or "host"


def parse_endpoints(text: str) -> tuple[Endpoint, ...]:
    """`http://10.0.0.1:2379,https://etcd-2` -> where to ask; raises BadInput."""
    found = []
    for url in text.split(","):
        match = re.fullmatch(
            r"(https?)://([A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9a-fA-F:.]+\])(?::([0-9]{1,5}))?/?", url.strip()
        )
        if not match or not 0 < int(match[3] or 2379) < 1 << 16:
            raise BadInput(
                f"--etcd {url.strip()!r} is no address of etcd: write for example http://10.0.0.1:2379"
            )
        found.append(Endpoint(match[2], int(match[3] or 2379), match[1] == "https"))
    return tuple(found)
