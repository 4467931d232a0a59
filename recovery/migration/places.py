"""Where something is to go: `cpu:1` here, `node-2:cpu:1` on another host, `node-2` wherever there is room."""

from __future__ import annotations

import re
from dataclasses import dataclass

from understudy.recovery.config.settings import DRIVERS, BadInput
from understudy.recovery.membership.settings import is_name

_DEVICE = re.compile(rf"({'|'.join(DRIVERS)}):(0|[1-9][0-9]{{0,3}})")


@dataclass(frozen=True)
class Place:
    """`host`: empty for the one that is asked; `device`: empty for any."""

    host: str
    device: str

    def __str__(self) -> str:
        return ":".join(filter(None, [self.host, self.device]))


def parse_place(text: str) -> Place:
    """DEVICE, HOST:DEVICE or HOST; raises BadInput."""
    if _DEVICE.fullmatch(text):
        return Place("", text)
    host, _, device = text.partition(":")
    if not is_name(host) or (device and not _DEVICE.fullmatch(device)) or text.endswith(":"):
        raise BadInput(
            f"{text[:80]!r} is no place: write a device as cpu:1, another host's as node-2:cpu:1, or a host"
        )
    return Place(host, device)
