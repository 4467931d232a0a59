"""PyTorch's own descriptions of what it can do: `op_db`, `module_db`, `optim_db`, as the wheel has them."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

DATABASES = ("op_db", "module_db", "optim_db")
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64,
)  # fmt: skip
FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Of modules and optimizers, whatever their rows say: half precision is what they are trained in."""


@dataclass(frozen=True)
class Entry:
    """One row of a database."""

    database: str
    name: str
    info: Any
    dtypes: tuple[torch.dtype, ...]

    @property
    def seed(self) -> int:
        """The same in every run and process."""
        return zlib.crc32(f"{self.database}/{self.name}".encode())


@dataclass(frozen=True)
class Unit:
    """One entry with one dtype: what a shard does in one go."""

    entry: Entry
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.entry.database}/{self.entry.name}/{dtype_name(self.dtype)}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load() -> list[Entry]:
    """All entries, in the databases' order.

    The databases are read as a CPU-only PyTorch reads them: they ask `torch.cuda.is_available()` while they
    are imported, and would use the device then, of which the process that only starts others must keep away.
    """
    with mock.patch.object(torch.cuda, "is_available", lambda: False):
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.common_modules import module_db
        from torch.testing._internal.common_optimizers import optim_db
    entries = []
    for op in op_db:
        entries.append(Entry("op_db", op.formatted_name, op, _wanted(op.supported_dtypes("cpu"))))
    for module in module_db:
        entries.append(Entry("module_db", module.name, module, FLOATING))
    for optimizer in optim_db:
        entries.append(Entry("optim_db", optimizer.name, optimizer, FLOATING))
    return entries


def _wanted(supported: Any) -> tuple[torch.dtype, ...]:
    """Those of DTYPES that the entry supports on the CPU; of an entry that supports none of them, its own."""
    wanted = tuple(dtype for dtype in DTYPES if dtype in supported)
    return wanted or tuple(sorted(supported, key=str)[:1])


def units(
    entries: list[Entry],
    *,
    only: str = "",
    dtype: str = "",
    database: str = "",
    shard: tuple[int, int] = (1, 1),
) -> list[Unit]:
    """What a sweep consists of. `only` is a regular expression searched for in `database/entry`."""
    number, count = shard
    chosen = [
        entry
        for entry in entries
        if (not database or entry.database == database) and re.search(only, f"{entry.database}/{entry.name}")
    ]
    return [
        Unit(entry, each)
        for entry in chosen[number - 1 :: count]
        for each in entry.dtypes
        if not dtype or dtype_name(each) == dtype
    ]
