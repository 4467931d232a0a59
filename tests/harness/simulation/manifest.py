"""What a simulated commit says of the buffers, and which of them it keeps as shadows."""

from __future__ import annotations

from collections.abc import Collection

from simulation.log import BUFFER_BYTES, Commit, Row
from simulation.programs import mix
from understudy import replay


def describe(
    made: Commit, table: replay.ByteTable, replicated: Collection[int], room: int, seed: int
) -> None:
    """The rows of a commit that is being made; `room`: how many shadows there may be."""
    epoch = table.epoch
    rows, lost = made.rows, []
    for handle, content, born, available in table.rows():
        if not available:
            rows.append(Row(handle, BUFFER_BYTES, None, False))
            lost.append(handle)
            continue
        fresh = born == epoch
        digest = int.from_bytes(content, "little") if not fresh or made.optimizer else None
        shadowed = handle not in replicated
        if made.optimizer and fresh and mix(seed, handle) % 2:  # it is large
            rows.append(Row(handle, BUFFER_BYTES, digest, False))
            continue
        if shadowed and len(made.shadows) >= room:
            shadowed = made.complete = False
        if shadowed:
            made.shadows[handle] = content
        rows.append(Row(handle, BUFFER_BYTES, digest, shadowed))
    made.lost = frozenset(lost)
