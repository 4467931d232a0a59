"""Sockets of this machine, by inode: whom they are connected to."""

from __future__ import annotations

import ipaddress
import socket
import struct
from dataclasses import dataclass
from enum import StrEnum

LISTENING = 10
"""TCP_LISTEN, which Unix sockets use, too."""
_BY_FAMILY, _DUMP, _ERROR, _DONE = 20, 0x301, 2, 3
_SHOW_NAME, _SHOW_PEER = 1, 4
_NAME, _PEER = 0, 2


class Kind(StrEnum):
    """What /proc/PID/net knows by name."""

    UNIX = "Unix"
    TCP = "TCP"
    UDP = "UDP"


@dataclass(frozen=True)
class Socket:
    """One end."""

    inode: int
    kind: Kind
    listens: bool = False
    local: str = ""
    peer: str = ""
    """HOST:PORT; empty: none."""
    peer_inode: int = 0
    """Of a Unix socket; 0: it is not connected."""


def parse_internet(text: str, kind: Kind) -> dict[int, Socket]:
    """/proc/PID/net/tcp, tcp6, udp or udp6; lines that make no sense are left out."""
    found = {}
    for line in text.splitlines()[1:]:
        words = line.split()
        try:
            local, peer = _address(words[1]), _address(words[2])
            inode, state = int(words[9]), int(words[3], 16)
        except (IndexError, ValueError):
            continue
        nobody = peer.endswith(":0")
        found[inode] = Socket(
            inode, kind, kind is Kind.TCP and state == LISTENING, local, "" if nobody else peer
        )
    return found


def _address(text: str) -> str:
    """`0100007F:1F90` -> 127.0.0.1:8080; each word of the address has the byte order of the machine."""
    host, _, port = text.partition(":")
    words = struct.unpack(f">{len(host) // 8}I", bytes.fromhex(host))
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = getattr(address, "ipv4_mapped", None)
    address = mapped or address
    return f"[{address}]:{int(port, 16)}" if address.version == 6 else f"{address}:{int(port, 16)}"


def unix_sockets() -> dict[int, Socket]:
    """Those of our network namespace; /proc/net/unix does not say who is connected to whom."""
    request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW_NAME | _SHOW_PEER, 0, 0)
    header = struct.pack("=IHHII", 16 + len(request), _BY_FAMILY, _DUMP, 1, 0)
    found: dict[int, Socket] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 4) as diagnosis:
        diagnosis.settimeout(5)
        diagnosis.send(header + request)
        while True:
            for kind, body in _messages(diagnosis.recv(1 << 16)):
                if kind in (_ERROR, _DONE):
                    return found
                one = parse_unix(body)
                found[one.inode] = one


def _messages(data: bytes) -> list[tuple[int, bytes]]:
    messages = []
    while len(data) >= 16:
        length, kind = struct.unpack_from("=IH", data)
        messages.append((kind, data[16:length]))
        data = data[max(16, (length + 3) & ~3) :]
    return messages


def parse_unix(body: bytes) -> Socket:
    """A unix_diag_msg with its attributes."""
    state, inode = struct.unpack_from("=xxBxI", body)
    name, peer, rest = "", 0, body[16:]
    while len(rest) >= 4:
        length, attribute = struct.unpack_from("=HH", rest)
        value = rest[4:length]
        if attribute == _NAME:
            name = value.rstrip(b"\0").decode("utf-8", "replace").replace("\0", "@")
        elif attribute == _PEER and len(value) == 4:
            (peer,) = struct.unpack("=I", value)
        rest = rest[max(4, (length + 3) & ~3) :]
    return Socket(inode, Kind.UNIX, state == LISTENING, name, peer_inode=peer)
