"""A snapshot as it lies in an area: its contents with gaps and other bytes between them, and its manifest."""

from __future__ import annotations

import mmap
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from understudy.recovery.snapshots import Contents
from understudy.replay import content_digest, digest

MAGIC = 0x32534546494E414D
BLOCK = 64
ROW_OF_BUFFER = "<QQQQQ"


@dataclass(frozen=True)
class Area:
    """Buffers 0, 1, … of a snapshot."""

    memory: mmap.mmap
    offsets: tuple[int, ...]
    manifest: bytes

    def contents(self, *, in_place: bool, shortest_run: int = 4096) -> Contents:
        return Contents(
            [], area=self.memory, manifest=self.manifest, in_place=in_place, shortest_run=shortest_run
        )


def in_area(
    contents: Sequence[bytes],
    chance: random.Random,
    gaps: Sequence[int] = (0, 0, 0, 64, 4096, 8192),
    digest_of: Callable[[int, bytes], int] = lambda _, content: content_digest(content),
) -> Area:
    """In any order, anything between them. `digest_of`: what is said of buffer n; 0: nothing."""
    offsets, end = {}, BLOCK * chance.randrange(100)
    for number in chance.sample(range(len(contents)), len(contents)):
        offsets[number] = end
        end += -(-max(len(contents[number]), 1) // BLOCK) * BLOCK + chance.choice(gaps)
    memory = mmap.mmap(-1, end + 4096)
    memory[:] = chance.randbytes(len(memory))
    for number, content in enumerate(contents):
        memory[offsets[number] : offsets[number] + len(content)] = content
    rows = b"".join(
        struct.pack(ROW_OF_BUFFER, number, len(content), said, offsets[number], 1 if said else 0)
        for number, content in enumerate(contents)
        for said in [digest_of(number, content)]
    )
    header = struct.pack("<QQQQQQQQ", MAGIC, 1, len(contents), 0, 0, 0, 64 + len(rows), digest(rows))
    return Area(memory, tuple(offsets[number] for number in range(len(contents))), header + rows)
