"""What can be seen of one execution, and where two of them differ. Bits, never tolerances."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

_LATE = re.compile(r" \[device call [\w:.]+, record \d+\]$")
_DEVICE_IN_REPR = re.compile(r",\s+device='cuda:0'")
_DEVICE_IN_CLASS = re.compile(r"\btorch\.cuda\.(?=\w+Tensor\b)")
_DEVICE = re.compile(r"\bcuda(:0)?\b|\bcpu:0\b")
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_SHOWN = 3


@dataclass(frozen=True)
class Seen:
    """One tensor. `sharing` names the first earlier tensor of the execution that it shares memory with."""

    kind: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.layout
    offset: int
    requires_grad: bool
    conjugated: bool
    negated: bool
    view: bool
    sharing: str
    content: torch.Tensor | None = field(compare=False)


@dataclass
class Observation:
    """Either an error (class name and message), or by path: tensors as Seen, the rest as text."""

    error: tuple[str, str] | None = None
    raised_late: bool = False
    leaves: dict[str, Any] = field(default_factory=dict)
    elsewhere: list[str] = field(default_factory=list)
    """Paths of tensors that are on the CPU."""


@dataclass(frozen=True)
class Difference:
    what: str
    where: str
    detail: str


def observe_error(error: Exception) -> Observation:
    message = str(error)
    return Observation(
        error=(type(error).__name__, without_device(_LATE.sub("", message))),
        raised_late=_LATE.search(message) is not None,
    )


def without_device(text: str) -> str:
    """`cuda:0`, `cuda` and `cpu:0` become `cpu`: the one thing in which messages may differ.

    A printed CPU tensor and the name of its class do not mention the device at all.
    """
    return _DEVICE.sub("cpu", _DEVICE_IN_CLASS.sub("torch.", _DEVICE_IN_REPR.sub("", text)))


def observe(arguments: Any, results: Iterable[tuple[str, Any]], *, contents: bool = True) -> Observation:
    """Looks at a call's arguments, as they are now, and at named results.

    Without `contents`, at everything but the bits.
    """
    observer = _Observer(contents)
    observer.look("arguments", arguments)
    if contents:
        observer.look_between_elements()
    for name, value in results:
        observer.look(name, value)
    return observer.seen


class _Observer:
    def __init__(self, contents: bool) -> None:
        self.seen = Observation()
        self._contents = contents
        self._objects: dict[int, str] = {}
        self._storages: dict[int, str] = {}
        self._alive: list[Any] = []

    def look(self, path: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif isinstance(value, dict):
            self._put(path, f"{type(value).__name__} of {len(value)}")
            for key, item in value.items():
                self.look(f"{path}[{key!r}]", item)
        elif isinstance(value, list | tuple):
            self._put(path, f"{type(value).__name__} of {len(value)}")
            for i, item in enumerate(value):
                self.look(f"{path}[{i}]", item)
        elif isinstance(value, float):
            self._put(path, f"float {struct.pack('<d', value).hex()} ({value!r})")
        elif isinstance(value, complex):
            self._put(path, f"complex {struct.pack('<dd', value.real, value.imag).hex()} ({value!r})")
        else:
            text = without_device(_ADDRESS.sub("0x", repr(value)))
            self._put(path, f"{type(value).__name__} {text}")

    def look_between_elements(self) -> None:
        """The whole memory of what was looked at so far, where that is more than the elements."""
        for tensor, path in [(tensor, self._objects[id(tensor)]) for tensor in self._alive]:
            if tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            if (
                storage.nbytes() != tensor.numel() * tensor.itemsize
                and self._storages[storage._cdata] == path
            ):
                memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                self.look(f"memory of {path}", memory.set_(storage, 0, (storage.nbytes(),), (1,)))

    def _put(self, path: str, leaf: Any) -> None:
        self.seen.leaves[path] = leaf

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        self._alive.append(tensor)
        if tensor.is_cpu:
            self.seen.elsewhere.append(path)
        strided = tensor.layout is torch.strided
        same = self._objects.setdefault(id(tensor), path)
        sharing = f"is {same}" if same != path else ""
        if strided and not sharing:
            storage = tensor.untyped_storage()
            first = self._storages.setdefault(storage._cdata, path)
            sharing = f"shares memory with {first}" if first != path else ""
        self._put(
            path,
            Seen(
                kind=type(tensor).__name__,
                shape=tuple(tensor.shape),
                strides=tuple(tensor.stride()) if strided else (),
                dtype=tensor.dtype,
                layout=tensor.layout,
                offset=int(tensor.storage_offset()) if strided else 0,
                requires_grad=tensor.requires_grad,
                conjugated=tensor.is_conj(),
                negated=tensor.is_neg(),
                view=tensor._is_view(),
                sharing=sharing,
                content=_content(tensor) if strided and self._contents and same == path else None,
            ),
        )
        if not strided and same == path:
            with torch.no_grad():
                for name, part in sparse_parts(tensor.detach()):
                    self.look(f"{path}.{name}", part)


def sparse_parts(tensor: torch.Tensor) -> list[tuple[str, Any]]:
    if tensor.layout is torch.sparse_coo:
        return [
            ("coalesced", tensor.is_coalesced()),
            ("indices", tensor._indices()),
            ("values", tensor._values()),
        ]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [
            ("rows", tensor.crow_indices()),
            ("columns", tensor.col_indices()),
            ("values", tensor.values()),
        ]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [
            ("columns", tensor.ccol_indices()),
            ("rows", tensor.row_indices()),
            ("values", tensor.values()),
        ]
    return [("dense", tensor.to_dense())]


def _content(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the elements, in logical order."""
    with torch.no_grad():
        dense = torch.empty(tensor.numel(), dtype=tensor.dtype)
        return dense.copy_(tensor.detach().cpu().reshape(-1)).view(torch.uint8)


def compare(native: Observation, virtual: Observation) -> list[Difference]:
    """Empty if the two are the same."""
    if native.error or virtual.error:
        return _compare_errors(native, virtual)
    differences = []
    for path in native.leaves.keys() | virtual.leaves.keys():
        a, b = native.leaves.get(path), virtual.leaves.get(path)
        if a is None or b is None:
            present = "native" if b is None else "the device"
            differences.append(Difference("structure", path, f"only {present} has it"))
        elif isinstance(a, Seen) and isinstance(b, Seen):
            differences += _compare_tensors(path, a, b)
        elif a != b:
            differences.append(Difference("value", path, f"{a} natively, {b} on the device"))
    return sorted(differences, key=lambda d: (d.where, d.what))


def _compare_errors(native: Observation, virtual: Observation) -> list[Difference]:
    if native.error == virtual.error:
        return []
    if native.error is None or virtual.error is None:
        error, side = (virtual.error, "the device") if native.error is None else (native.error, "native")
        assert error is not None
        return [Difference("error", "", f"only {side} raised {error[0]}: {_short(error[1])}")]
    kind = "error class" if native.error[0] != virtual.error[0] else "error message"
    detail = (
        f"{native.error[0]}: {_short(native.error[1])} natively, "
        f"{virtual.error[0]}: {_short(virtual.error[1])} on the device"
    )
    return [Difference(kind, "", detail)]


def _short(message: str) -> str:
    return message if len(message) < 400 else message[:400] + "…"


def _compare_tensors(path: str, native: Seen, virtual: Seen) -> list[Difference]:
    differences = []
    for name in Seen.__dataclass_fields__:
        a, b = getattr(native, name), getattr(virtual, name)
        if name != "content" and a != b:
            differences.append(Difference(name, path, f"{a!r} natively, {b!r} on the device"))
    comparable = native.shape == virtual.shape and native.dtype == virtual.dtype
    a, b = native.content, virtual.content
    if comparable and a is not None and b is not None and not torch.equal(a, b):
        differences.append(Difference("bits", path, _where_bits_differ(native, virtual)))
    return differences


def _where_bits_differ(native: Seen, virtual: Seen) -> str:
    assert native.content is not None and virtual.content is not None
    size = max(native.dtype.itemsize, 1)
    if native.content.numel() != virtual.content.numel():
        return f"{native.content.numel()} bytes natively, {virtual.content.numel()} on the device"
    wrong = (native.content != virtual.content).reshape(-1, size).any(dim=1).nonzero().flatten()
    shown = []
    for index in wrong[:_SHOWN].tolist():
        a, b = (
            side.reshape(-1, size)[index].clone().view(native.dtype).item()
            for side in (native.content, virtual.content)
        )
        shown.append(f"[{index}] {a!r} natively, {b!r} on the device")
    return f"{len(wrong)} of {native.content.numel() // size} elements: " + "; ".join(shown)
