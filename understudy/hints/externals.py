"""Objects that a function shares with whoever calls it.

They are found by walking the roots (arguments, globals …) in an order that depends on these alone, so that
the 7th object of one process is the 7th of the next. A checkpoint says "the 7th", and what was in it; a run
that goes on puts that into the caller's own object, in place. What nobody has changed is not written, but
its digest is.
"""

from __future__ import annotations

import collections
import copyreg
import ctypes
import hashlib
import logging
import random
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from . import open_files
from .blanks import blank_of, made
from .pickling import Memory, StatePickler, content_of, deeply, has_name, has_own_memory, storage_key
from .source import HintError

_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, logging.Logger)
_ORDER = (
    "storage",
    "array",
    "tensor",
    "object",
    "generator",
    "list",
    "bytes",
    "deque",
    "dict",
    "set",
    "state",
    "same",
    "cell",
)
"""In which they are filled: a dictionary asks its keys for their hashes, which may be what they hold."""
_DIGEST = 16
Content = tuple[str, str | None, Any]
Plan = tuple[list[tuple[str, Any]], dict[str, tuple[int, int]]]


@dataclass
class Externals:
    """What was found, each with its kind and its digest at the beginning (None: always written)."""

    found: list[tuple[str, Any, str | None]] = field(default_factory=list)
    known: dict[Any, Any] = field(default_factory=dict)
    roots: dict[str, tuple[int, int]] = field(default_factory=dict)
    """From which to which one each root's are."""

    def add(self, name: str, root: Any) -> str:
        """Walk a root; return its digest. Raises pickle.PicklingError, TypeError … where it has none."""
        begin = len(self.found)
        try:
            digest = deeply(lambda: self._walked(root, begin))
        except BaseException:
            self._forget(begin)
            raise
        self.roots[name] = (begin, len(self.found))
        return digest

    def _walked(self, root: Any, begin: int) -> str:
        self._forget(begin)
        return _walk(root, self)

    def _forget(self, begin: int) -> None:
        gone = {("external", number) for number in range(begin, len(self.found))}
        self.known = (
            {key: each for key, each in self.known.items() if each not in gone} if gone else self.known
        )
        del self.found[begin:]

    def record(self, key: Any, kind: str, value: Any, digest: str | None = None) -> None:
        if key not in self.known:
            self.known[key] = ("external", len(self.found))
            self.found.append((kind, value, digest))

    def contents(self, memory: Memory) -> list[Content]:
        """Kind, digest at the beginning, and content: None for what is as it was."""
        return [
            (kind, begun, None if begun and begun == _digest(kind, value) else _take(kind, value, memory))
            for kind, value, begun in self.found
        ]

    @property
    def plan(self) -> Plan:
        """What another process is to know before it reads what was in the objects."""
        return ([(kind, blank_of(kind, value)) for kind, value, _ in self.found], self.roots)

    def align(self, plan: Plan) -> None:
        """Number the objects as a checkpoint does; those that are not here are made, empty.

        Raises HintError where it is about other arguments or globals.
        """
        blanks, roots = plan
        found: list[tuple[str, Any, str | None]] = []
        for name, (begin, end) in roots.items():
            first, last = self.roots.get(name, (0, 0))
            here = self.found[first:last]
            same = [kind for kind, _, _ in here] == [kind for kind, _ in blanks[begin:end]]
            if not same and (name.startswith("argument") or not here or here[0][0] != blanks[begin][0]):
                raise HintError(
                    f"The {name} is built otherwise than when the checkpoint was taken; build it as it was, "
                    "or remove the checkpoint's folder."
                )
            found += here if same else here[:1]
            found += [(kind, made(kind, blank), None) for kind, blank in blanks[len(found) : end]]
        self.found, self.roots = found, dict(roots)

    def fill(self, contents: list[Content], storages: list[torch.UntypedStorage]) -> None:
        """Put a checkpoint's contents into the objects. Raises HintError before anything is changed."""
        for number, (_, digest, content) in enumerate(contents):
            if content is None and digest != self.found[number][2]:
                raise HintError(
                    f"The {self.root_of(number)} differs from what it was when the run began; make it as it "
                    "was (seeds set before it is made), or remove the checkpoint's folder."
                )
        filled = [(kind, number) for number, (kind, _, content) in enumerate(contents) if content is not None]
        for kind, number in sorted(filled, key=lambda each: _ORDER.index(each[0])):
            _put(kind, self.found[number][1], contents[number][2], storages)

        self.known = {
            storage_key(value) if kind == "storage" else id(value): ("external", number)
            for number, (kind, value, _) in enumerate(self.found)
        }

    def root_of(self, number: int) -> str:
        return next(name for name, (begin, end) in self.roots.items() if begin <= number < end)


def _walk(root: Any, externals: Externals) -> str:
    sink = _Sink()
    _Walker(sink, externals).dump(root)
    return sink.hash.hexdigest()


class _Sink:
    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=_DIGEST)

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return memoryview(data).nbytes


class _Walker(StatePickler):
    """A pickler that keeps the digest alone, which equal roots have in common in all processes."""

    def __init__(self, sink: Any, externals: Externals) -> None:
        super().__init__(sink, {}, Memory())
        self.externals = externals
        self._kept: list[Any] = []
        self._parts: set[int] = set()

    def persistent_id(self, value: Any) -> Any:
        if type(value) is str:  # whether two equal texts are one object says nothing
            return b"text" + value.encode(errors="surrogatepass")
        if isinstance(value, torch.UntypedStorage):
            digest = _digest("storage", value)
            self.externals.record(storage_key(value), "storage", value, digest)
            return f"memory {value.nbytes()} {value.device} {digest}".encode()
        if type(value) is frozenset:
            return _unordered(value)
        if id(value) in self._parts:
            return None
        if type(value) in open_files.KINDS:
            raise HintError("It is an open file; open it inside the function.")
        kind = _kind(value)
        if not kind:
            return None
        self.externals.record(id(value), kind, value, _digest(kind, value))
        if kind == "object":
            self._parts.add(id(getattr(value, "__dict__", None)))
        self._kept.append(value)
        if kind == "array":
            return f"array {_digest(kind, value)}".encode()
        return _unordered(value) if type(value) is set else None


def _unordered(elements: Iterable[Any]) -> bytes:
    """The same for equal sets, whose order is another one in each process."""
    return f"{type(elements)} {sorted(_walk(each, Externals()) for each in elements)}".encode()


def _kind(value: Any) -> str:
    """How the content of an object is taken and put; "" for what nobody can change."""
    cls = type(value)
    if cls is object:  # a sentinel, which is compared by what it is
        return "same"
    if cls is types.FunctionType and not has_name(value):
        return "same"
    if cls is types.CellType:
        return "cell"
    if cls in _FIXED or isinstance(value, _CODE):
        return ""
    for base, kind in _KINDS:
        if isinstance(value, base):
            return kind
    numpy = sys.modules.get("numpy")
    if numpy is not None and cls is numpy.ndarray:
        return "array" if has_own_memory(value) and not value.dtype.hasobject else ""
    plain: Any = object
    if cls.__reduce_ex__ is plain.__reduce_ex__ and cls.__reduce__ is plain.__reduce__:
        if getattr(cls, "__getstate__", None) is getattr(object, "__getstate__", None):
            return "object" if hasattr(value, "__dict__") or copyreg._slotnames(cls) else ""  # type: ignore[attr-defined]
        return "state"
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 - whatever a class raises: the pickle itself will say it
        return ""
    return "state" if isinstance(reduced, tuple) and len(reduced) > 2 and reduced[2] is not None else ""


_FIXED = {
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    tuple,
    range,
    frozenset,
    torch.dtype,
    torch.device,
}
_FIXED |= {torch.Size, slice, type(...), types.MethodType}
_KINDS: list[tuple[Any, str]] = [
    (list, "list"),
    (dict, "dict"),
    (set, "set"),
    (collections.deque, "deque"),
    (bytearray, "bytes"),
    (torch.Tensor, "tensor"),
    ((random.Random, torch.Generator), "generator"),
    (BaseException, ""),
]


def _digest(kind: str, value: Any) -> str | None:
    """Of what may be large; None for what is always written."""
    found = hashlib.blake2b(digest_size=_DIGEST)
    if kind == "storage":
        for piece in pieces(value):
            found.update(piece)
    elif kind == "array":
        found.update(f"{value.shape}{value.dtype.str}{value.strides}".encode())
        flat = value if value.flags.c_contiguous else value.T if value.flags.f_contiguous else value.copy()
        found.update(flat.reshape(-1).view("u1").data if flat.size else b"")
    else:
        return None
    return found.hexdigest()


def pieces(storage: torch.UntypedStorage) -> Iterator[memoryview]:
    """A storage's bytes; of another device, those of a copy."""
    here = storage if storage.device.type == "cpu" else storage.cpu()
    if size := here.nbytes():
        yield memoryview((ctypes.c_ubyte * size).from_address(here.data_ptr())).cast("B")


def _take(kind: str, value: Any, memory: Memory) -> Any:
    """What was in an object, without the object itself, in whose place the pickle has its number."""
    match kind:
        case "storage":
            return memory.number(value)
        case "tensor":
            grad = value.grad if value.is_leaf else None
            return (value.detach(), grad, value.requires_grad, dict(vars(value)))
        case "array":
            return value.copy()
        case "bytes":
            return bytes(value)
        case "generator":
            return value.getstate() if isinstance(value, random.Random) else value.get_state()
        case "object":
            slots = [name for name in _slots(value) if hasattr(value, name)]
            return (_attributes(value), {name: getattr(value, name) for name in slots})
        case "state":
            return value.__reduce_ex__(4)[2]
        case "cell":
            return (content_of(value),)
        case "same":
            return None
        case _:
            plain = {"list": list, "dict": dict, "set": set, "deque": tuple}[kind](value)
            return (plain, _attributes(value), getattr(value, "default_factory", None))


def _put(kind: str, value: Any, content: Any, storages: list[torch.UntypedStorage]) -> None:
    match kind:
        case "storage":
            if value.nbytes() != storages[content].nbytes():
                value.resize_(storages[content].nbytes())
            value.copy_(storages[content])
        case "tensor":
            _put_tensor(value, *content)
        case "array":
            value[...] = content
        case "bytes":
            value[:] = content
        case "generator":
            value.setstate(content) if isinstance(value, random.Random) else value.set_state(content)
        case "object":
            for name in _slots(value):
                if name in content[1]:
                    object.__setattr__(value, name, content[1][name])
                elif hasattr(value, name):
                    object.__delattr__(value, name)
            _put_attributes(value, content[0])
        case "state":
            value.__setstate__(content) if hasattr(value, "__setstate__") else vars(value).update(content)
        case "cell":
            if content[0] is not None:
                value.cell_contents = content[0][0]
        case "list":
            list.__setitem__(value, slice(None), content[0])
            _put_attributes(value, content[1])
        case _:
            value.clear()
            value.extend(content[0]) if kind == "deque" else value.update(content[0])
            if isinstance(value, collections.defaultdict):
                value.default_factory = content[2]
            _put_attributes(value, content[1])


def _put_tensor(
    tensor: torch.Tensor,
    data: torch.Tensor,
    grad: torch.Tensor | None,
    requires_grad: bool,
    attributes: dict[str, Any],
) -> None:
    def place(of: torch.Tensor) -> tuple[Any, ...]:
        return (storage_key(of.untyped_storage()), of.storage_offset(), of.size(), of.stride(), of.dtype)

    if place(tensor) != place(data):
        tensor.data = data
    if tensor.is_leaf:
        tensor.requires_grad_(requires_grad)
        tensor.grad = grad
    _put_attributes(tensor, attributes)


def _slots(value: Any) -> list[str]:
    return list(copyreg._slotnames(type(value)))  # type: ignore[attr-defined]


def _attributes(value: Any) -> dict[str, Any] | None:
    return dict(vars(value)) if hasattr(value, "__dict__") else None


def _put_attributes(value: Any, attributes: dict[str, Any] | None) -> None:
    if attributes is not None:
        vars(value).clear()
        vars(value).update(attributes)
