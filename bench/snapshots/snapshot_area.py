"""A state where a device server keeps it: shared memory, in huge pages where the kernel gives them."""

from __future__ import annotations

import math
import struct
import tempfile

import torch
from training_state import State, bytes_of, description_of, memory_of, offsets_of

from understudy import replay
from understudy.recovery.snapshots import Contents

CLIENT_STATE = 4  # kind of extent
HUGE_PAGE = 2 << 20
MANIFEST_MAGIC = 0x32534546494E414D


class SnapshotArea:
    """With room for states like the one that it is made of, which it holds at first."""

    def __init__(self, state: State) -> None:
        self._description = description_of(state)
        *offsets, end = offsets_of(state, 0)
        self.offsets = offsets
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            file.truncate(math.ceil(end / HUGE_PAGE) * HUGE_PAGE)
            mapped = replay.MappedArea(file.name, writable=True)
        self.memory = memoryview(mapped)
        self.in_place = mapped.back() == len(self.memory)
        self.tensors = {
            name: torch.frombuffer(
                self.memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset
            ).reshape(tensor.shape)
            for (name, tensor), offset in zip(state.items(), offsets, strict=True)
        }
        self.take(state)

    def take(self, state: State) -> None:
        """Copies it here, and digests each tensor as it lies in the caches; its handle is its number."""
        self.taken = state
        rows = []
        for number, (name, offset) in enumerate(zip(state, self.offsets, strict=True)):
            tensor = self.tensors[name]
            tensor.copy_(state[name])
            rows.append(
                struct.pack(
                    "<QQQQQ", number, tensor.nbytes, replay.content_digest(memory_of(tensor)), offset, 1
                )
            )
        content = b"".join(rows)
        counts = (len(rows), 0, 0, 0, 64 + len(content))
        self._manifest = struct.pack("<8Q", MANIFEST_MAGIC, 1, *counts, replay.digest(content)) + content

    def contents(self) -> Contents:
        """As a job's writer describes it."""
        return Contents(
            [(CLIENT_STATE, 0, self._description)],
            area=self.memory, manifest=self._manifest, in_place=self.in_place,
        )  # fmt: skip


def slot_bytes_for(state: State, chunk: int) -> int:
    """A slot with room for such a state, wherever in an area it lies."""
    count = len(description_of(state)) + bytes_of(state) + 64 * len(state)
    return Contents([(CLIENT_STATE, 0, b"")]).needed_slot_bytes(chunk_bytes=chunk) + (
        count + 40 * len(state) + 4 * 4096
    )
