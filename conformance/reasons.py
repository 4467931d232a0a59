"""Written by hand: what has no bits to compare, and why what differs differs."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNINITIALISED = "its result is uninitialised memory"
NO_DEFINED_BITS = {
    "empty": _UNINITIALISED,
    "empty_like": _UNINITIALISED,
    "empty_permuted": _UNINITIALISED,
    "empty_strided": _UNINITIALISED,
    "new_empty": _UNINITIALISED,
    "new_empty_strided": _UNINITIALISED,
    "resize_": "what is added to the storage is uninitialised memory",
    "resize_as_": "what is added to the storage is uninitialised memory",
}
"""Entries of op_db of which everything is compared but the bits."""

KEPT_ON_CPU = {"tensor_split": "PyTorch demands its indices on the CPU, whatever the device of the tensor"}
"""Entries of op_db whose further arguments stay on the CPU."""


@dataclass(frozen=True)
class Reason:
    """Why cases differ. `entry`, `variant` and `dtype` are regular expressions for the whole name."""

    entry: str
    variant: str
    text: str
    dtype: str = ".*"

    def covers(self, entry: str, dtype: str, variant: str) -> bool:
        """`entry` is `database/name`."""
        pairs = ((self.entry, entry), (self.dtype, dtype), (self.variant, variant))
        return all(re.fullmatch(pattern, name) for pattern, name in pairs)


REASONS: tuple[Reason, ...] = (
    Reason(
        "op_db/to",
        "forward",
        "a CPU tensor's device has no index, so a move to `cpu:0` copies natively; `cuda:0` is where it is",
    ),
    Reason(
        "op_db/randn_like",
        "sparse_coo",
        "PyTorch has no such kernel; the error lists the ones that are registered, in the device server "
        "without those of torch's Python code",
    ),
    Reason(
        "op_db/renorm",
        "backward|autocast.*",
        "PyTorch's gradient formula accumulates in float on CUDA, in double on the CPU, by the device's name",
        dtype="float32|complex64",
    ),
    Reason(
        "module_db/nn.(LPPool3d|LocalResponseNorm|MultiMarginLoss|MultiLabelMarginLoss|RReLU|AvgPool3d)",
        "training|evaluation",
        "an element type for which CUDA has a kernel and the CPU has none: natively an error; computed by "
        "the device (tests/client/test_wider_types.py compares it with the CPU's kernel of a wider type)",
        dtype="float16|bfloat16",
    ),
    Reason(
        "op_db/linalg_lu_solve",
        "forward|backward",
        "the same numbers; natively some are conjugated by the tensor's conjugation bit, which a batched "
        "solve on the device does not have",
        dtype="complex64",
    ),
    Reason(
        "op_db/linalg_lstsq.*",
        "forward|out",
        "LAPACK's last bits depend on where memory lies: other cases differ natively from their repetition",
    ),
)


def reason_for(entry: str, dtype: str, variant: str) -> Reason | None:
    return next((reason for reason in REASONS if reason.covers(entry, dtype, variant)), None)
