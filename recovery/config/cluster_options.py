"""The options of proxyd that say something of other hosts; every mistake becomes one sentence."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from pathlib import Path

from understudy.recovery.base.errors import BadInput
from understudy.recovery.config.proxyd_options import ProxydOptions
from understudy.recovery.membership.settings import LOOPBACK, Endpoint, MembershipSettings, is_name


def membership_of(given: ProxydOptions) -> MembershipSettings:
    """What they say; raises BadInput."""
    if given.cluster and not given.etcd:
        raise BadInput(f"--cluster {given.cluster} is of no use without --etcd URL")
    host = parse_name(given.host_name or default_host(), "--host-name")
    endpoints = parse_endpoints(given.etcd) if given.etcd else ()
    listen = address = ""
    data_address = LOOPBACK
    if given.listen:
        if not given.etcd:
            raise BadInput(
                f"--listen {given.listen} is of no use without --etcd URL: nobody would know of it"
            )
        if given.certs is None:
            raise BadInput(
                f"--listen {given.listen} needs --certs DIRECTORY: recoveryctl certs init and issue fill one"
            )
        listen, address = parse_listen(given.listen, host, anywhere=given.listen_anywhere)
        data_address = parse_data_address(given.data_address, listen, anywhere=given.listen_anywhere)
    elif given.data_address:
        raise BadInput(f"--data-address {given.data_address} is of no use without --listen IP:PORT")
    elif given.shared_directory is not None:
        raise BadInput(f"--shared-directory {given.shared_directory} is of no use without --listen IP:PORT")
    elif given.listen_anywhere:
        raise BadInput("--listen-anywhere is of no use without --listen IP:PORT")
    encrypted = any(endpoint.encrypted for endpoint in endpoints)
    if encrypted and given.certs is None:
        raise BadInput("--etcd https://… needs --certs DIRECTORY: recoveryctl certs init and issue fill one")
    if given.certs is not None and not (given.listen or encrypted):
        raise BadInput(f"--certs {given.certs} is of no use without --listen IP:PORT or --etcd https://…")
    certificates = given.certs.absolute() if given.certs is not None else None
    cluster = parse_name(given.cluster or "default", "--cluster")
    return MembershipSettings(
        host, cluster, endpoints, listen, address, certificates, data_address,
        _shared_directory(given.shared_directory, cluster),
    )  # fmt: skip


def _shared_directory(given: Path | None, cluster: str) -> Path | None:
    """That of the cluster in it; raises BadInput."""
    if given is None:
        return None
    directory = given.absolute() / cluster
    try:  # perhaps it is not mounted: never make one in its place
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.stat()
    except FileNotFoundError:
        raise BadInput(f"--shared-directory {given}: there is no such directory") from None
    except OSError as problem:
        raise BadInput(f"--shared-directory {given} cannot be used: {problem.strerror}") from problem
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise BadInput(
            f"--shared-directory {given}: {directory} must be this user's, and nobody else's (0700)"
        )
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):  # mounted read-only, say
        raise BadInput(f"--shared-directory {given}: {directory} cannot be written")
    return directory


def parse_listen(text: str, host: str, *, anywhere: bool) -> tuple[str, str]:
    """`10.0.0.1:9400` -> where to listen, and where others find it; raises BadInput."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([0-9.]+)):([0-9]{1,5})", text.strip())
    try:
        address = ipaddress.ip_address(match[1] or match[2] if match else "")
    except ValueError:
        address = None
    if match is None or address is None or not 0 < int(match[3]) < 1 << 16:
        raise BadInput(f"--listen {text!r} is no IP address and port: write for example 10.0.0.1:9400")
    if address.is_multicast:
        raise BadInput(f"--listen {text} is a multicast address, where nobody can listen")
    if (address.is_unspecified or address.is_global) and not anywhere:
        raise BadInput(
            f"--listen {text} may be reached from everywhere: name an address of your own network, or say "
            "--listen-anywhere"
        )
    return text.strip(), f"{host}:{match[3]}" if address.is_unspecified else text.strip()


def parse_data_address(text: str, listen: str, *, anywhere: bool) -> str:
    """An IP address, or that of --listen; raises BadInput."""
    control = ipaddress.ip_address(listen.rpartition(":")[0].strip("[]"))
    if not text and control.is_unspecified:
        raise BadInput(f"--listen {listen} names no interface: name with --data-address IP the one for state")
    told = f"--data-address {text}" if text else f"--listen {listen}"
    try:
        address = ipaddress.ip_address(text.strip().strip("[]")) if text else control
    except ValueError:
        raise BadInput(f"--data-address {text!r} is no IP address: write for example 10.0.1.1") from None
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_unspecified or address.is_multicast or (address.version == 6 and address.is_link_local):
        raise BadInput(f"{told} is no address by which another host could find this one")
    if address.is_loopback and not control.is_loopback:
        raise BadInput(f"{told} is not reached by other hosts, and --listen {listen} is for them")
    if address.is_global and not anywhere:
        raise BadInput(
            f"{told} may be reached from everywhere: name an address of your own network, or say "
            "--listen-anywhere"
        )
    return str(address)


def parse_name(text: str, flag: str) -> str:
    """Checks the name of a host or a cluster; raises BadInput."""
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
