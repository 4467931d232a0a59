"""Snapshots of made-up buffers in a store, and what comes back of them."""

from __future__ import annotations

from typing import Any

from understudy.recovery.snapshots import Receipt, Store

BLOCK = 4096
BUFFER, GENERATOR, MANIFEST, CLIENT, LOG = 1, 2, 3, 4, 5


def keep(store: Store, serial: int, *contents: bytes, **changes: Any) -> Receipt:
    """Persists `contents` as device buffers of ids 0, 1, …"""
    request: dict[str, Any] = {
        "job": "job",
        "rank": 0,
        "world": 1,
        "step": 10 * serial,
        "serial": serial,
        "extents": [(BUFFER, number, content) for number, content in enumerate(contents)],
        "timeout_s": 20,
    }
    return store.persist(**(request | changes))


def content_of(store: Store, sequence: int) -> list[bytes]:
    found = []
    for index, (_, _, size) in enumerate(store.extents(sequence)):
        into = bytearray(size)
        store.read(sequence, index, into)
        found.append(bytes(into))
    return found
