"""Orders to a relay's init, over its Unix socket: one line of JSON, and one for an answer."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

from understudy.recovery.migration.process.worker_init import SOCKET

MOVE_S = 1300.0
"""Longer than CRIU may take to dump and to restore (moving.py)."""
LARGEST_ANSWER = 1 << 18


class OrderRefused(RuntimeError):
    """Its text is a sentence."""


def check_socket(relay: str | Path) -> None:
    """Raises OSError or ValueError."""
    state = os.lstat(relay)
    if not stat.S_ISSOCK(state.st_mode) or state.st_uid != os.geteuid():
        raise ValueError(f"{relay} is no socket of ours")


def ask_init(relay: str | Path, order: dict[str, Any]) -> dict[str, Any]:
    """One conversation; raises OSError or ValueError."""
    check_socket(relay)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(MOVE_S)
        connection.connect(str(relay))
        connection.sendall(json.dumps(order).encode() + b"\n")
        data = b""
        while not data.endswith(b"\n") and len(data) <= LARGEST_ANSWER:
            more = connection.recv(LARGEST_ANSWER)
            if not more:
                break
            data += more
    return parse(data)


def parse(line: bytes) -> dict[str, Any]:
    """Raises ValueError."""
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("it answered with no JSON object")
    return message


async def order(relay_directory: Path, what: str, **more: Any) -> dict[str, Any]:
    """Raises OrderRefused, whatever the reason."""
    try:
        done = await asyncio.to_thread(ask_init, relay_directory / SOCKET, {"do": what, **more})
    except (OSError, ValueError) as problem:
        sentence = f"the relay in {relay_directory} does not answer as it should: {problem}"
        raise OrderRefused(sentence) from problem
    if "error" in done:
        raise OrderRefused(str(done["error"])[:1000])
    return done
