"""What a simulated device server tells a proxyd that follows another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from understudy.protos import control_pb2 as pb

Tell = Callable[[int, int], None]
"""Tells proxyd something of a rank in a generation."""


@dataclass
class Account:
    """As `_account` of proxy_server/device_server.py."""

    attached_generation: int = 0
    holds_state: bool = False
    parked: bool = False
    """Whether it was told to stand still."""
    restored_commit: int = 0
    fault: pb.FaultReport | None = None
    """At which it stands, of which it has told."""
