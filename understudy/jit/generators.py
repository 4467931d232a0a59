"""The generators of random numbers of this process, packed and put back: Python's, NumPy's, PyTorch's.

They are read twice in a step. Python and NumPy answer with a number of Python's for each of the 624 words of
a Mersenne Twister, and few trainings draw from them in every step: so they are asked only where the memory of
the objects that have the state has changed.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

_PYTHON = struct.Struct("<I625I?d")
_NUMPY = struct.Struct("<624II?d")
_BEHIND_KEYS = struct.Struct("<I?d")
_DEVICE = struct.Struct("<QQ")
"""The state of a CUDA generator: seed and offset, as PyTorch packs them."""
_LENGTHS = struct.Struct("<III")
"""Bytes of NumPy's part (0: it was not loaded), of PyTorch's, and of CUDA's (0: it was not in use)."""
_HEAD = object.__basicsize__
"""Bytes that an object begins with, which change with each reference to it."""


@dataclass(frozen=True)
class Generators:
    """The states of Python's, NumPy's (if it is loaded) and PyTorch's generators, packed.

    Equal states have equal bytes. PyTorch's are that of the CPU and, where CUDA is in use, those of its
    devices, which lie in the host's memory: no device is waited for.
    """

    packed: bytes

    @classmethod
    def now(cls) -> Generators:
        python, numpy = _PYTHONS.packed(_has_python()), _NUMPYS.packed(_has_numpy())
        pytorch, devices = _bytes_of(torch.get_rng_state()), _devices_now()
        lengths = _LENGTHS.pack(len(numpy), len(pytorch), len(devices))
        return cls(b"".join((lengths, python, numpy, pytorch, devices)))

    @classmethod
    def of(cls, packed: bytes) -> Generators:
        """Raises ValueError for what no `Generators` has packed."""
        made = cls(packed)
        made._parts()
        return made

    def put_back(self) -> None:
        """Into the generators of this process. Those of NumPy and of devices are left alone where either side
        lacks them."""
        python, numpy, pytorch, devices = self._parts()
        version, *numbers, has_gauss, gauss = _PYTHON.unpack(python)
        random.setstate((version, tuple(numbers), gauss if has_gauss else None))
        if numpy and _numpy_now():
            *keys, position, has_gauss, gauss = _NUMPY.unpack(numpy)
            module = sys.modules["numpy"]
            keys = module.array(keys, dtype="uint32")
            module.random.set_state(("MT19937", keys, position, int(has_gauss), gauss))
        torch.set_rng_state(torch.frombuffer(bytearray(pytorch), dtype=torch.uint8))
        for number in range(min(len(devices) // _DEVICE.size, torch.cuda.device_count() if devices else 0)):
            state = bytearray(devices[number * _DEVICE.size : (number + 1) * _DEVICE.size])
            torch.cuda.set_rng_state(torch.frombuffer(state, dtype=torch.uint8), number)

    def _parts(self) -> tuple[bytes, bytes, bytes, bytes]:
        rest = len(self.packed) - _LENGTHS.size - _PYTHON.size
        if rest < 0:
            raise ValueError("they are cut short")
        numpy, pytorch, devices = _LENGTHS.unpack_from(self.packed)
        if numpy + pytorch + devices != rest or numpy not in (0, _NUMPY.size) or devices % _DEVICE.size:
            raise ValueError("their lengths do not fit together")
        ends = [_LENGTHS.size]
        for length in (_PYTHON.size, numpy, pytorch, devices):
            ends.append(ends[-1] + length)
        python, of_numpy, of_pytorch, of_devices = (self.packed[a:b] for a, b in pairwise(ends))
        return python, of_numpy, of_pytorch, of_devices


class _Remembered:
    """The state of one generator: read again only where the memory that has it is another.

    Nothing is known about where in that memory a state lies, but that it is there: the words of the state
    must be found in it, or every call reads.
    """

    def __init__(self, read: Callable[[], bytes], words: slice) -> None:
        """`words`: where what `read` answers has those of the Mersenne Twister."""
        self._read, self._words = read, words
        self._last: tuple[list[bytes], bytes] | None = None

    def packed(self, has_it: tuple[object, ...]) -> bytes:
        """`has_it`: the objects that have the state and nothing of it anywhere else; none: not known."""
        before = [_memory(one).raw for one in has_it]
        if (last := self._last) is not None and last[0] == before:
            return last[1]
        found = self._read()
        still = before == [_memory(one).raw for one in has_it]  # another thread may have drawn
        if still and (words := found[self._words]) and any(words in one for one in before):
            self._last = before, found
        return found


@functools.lru_cache(maxsize=8)  # which keeps them: an address is no other object's
def _memory(thing: object) -> ctypes.Array[ctypes.c_char]:
    """Of an object of a type in C, as it is whenever it is looked at; but for what Python begins it with."""
    return _bytes_at(id(thing) + _HEAD, type(thing).__basicsize__ - _HEAD)


def _bytes_at(address: int, size: int) -> ctypes.Array[ctypes.c_char]:
    """Faster than `ctypes.string_at`, which calls a function of C."""
    return (ctypes.c_char * size).from_address(address)


def _has_python() -> tuple[object, ...]:
    """The number that `gauss` keeps for its next call is an attribute: with one, the state is not in here."""
    owner: Any = getattr(random.getstate, "__self__", None)
    in_store = getattr(owner, "gauss_next", None)
    return (owner,) if type(owner) is random.Random and in_store is None else ()


def _python_now() -> bytes:
    version, numbers, gauss = random.getstate()
    return _PYTHON.pack(version, *numbers, gauss is not None, gauss or 0.0)


def _has_numpy() -> tuple[object, ...]:
    draws: Any = getattr(sys.modules.get("numpy"), "random", None)
    owner = getattr(getattr(draws, "get_state", None), "__self__", None)
    bits = getattr(owner, "_bit_generator", None)
    if bits is None or type(owner) is not draws.RandomState or type(bits) is not draws.MT19937:
        return ()
    return owner, bits


def _numpy_now() -> bytes:
    """Empty where NumPy is not loaded, or its global generator is no longer the Mersenne Twister."""
    draws: Any = getattr(sys.modules.get("numpy"), "random", None)
    if draws is None or not hasattr(draws, "get_state"):  # it is being imported just now
        return b""
    state = draws.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return b""
    keys, position = state["state"]["key"].astype("<u4").tobytes(), state["state"]["pos"]
    return keys + _BEHIND_KEYS.pack(position, bool(state["has_gauss"]), state["gauss"])


_PYTHONS = _Remembered(_python_now, slice(4, 4 + 4 * 624))
_NUMPYS = _Remembered(_numpy_now, slice(0, 4 * 624))


def _bytes_of(state: torch.Tensor) -> bytes:
    return _bytes_at(state.data_ptr(), state.numel()).raw


def _devices_now() -> bytes:
    """Of all devices, in their order. Empty where CUDA is not in use: it is not made to start."""
    if not torch.cuda.is_initialized():
        return b""
    states = [_bytes_of(state) for state in torch.cuda.get_rng_state_all()]
    return b"".join(states) if all(len(state) == _DEVICE.size for state in states) else b""
