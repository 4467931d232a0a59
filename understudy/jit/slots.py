"""Each rank's generators of random numbers, at the end of each step, where they outlive the process.

A replica's checkpoint has the state that replicas share; the generators of a rank that was killed are in
none. So each rank keeps its own in a memory-mapped file, `DIR/slots/rank-<R>/<ordinal>-<attempt>`: what a
process wrote there is the kernel's, and stays when the process is killed (not when its host loses power).

A file has `SLOTS` places that are written in turn, each with step, length and digest: one that was cut short
is seen, and the steps before it are whole. An attempt has a file of its own, because nothing may be written
over before it is known with which step the job goes on. Nothing in a file is executed; it is read as
untrusted.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import re
import stat
import struct
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

SLOTS = 4
"""Steps that a file keeps: the one in progress, the last completed one, and two before it."""
_SLOT = 16384
_MAGIC = b"usdyjit2"
_HEAD = struct.Struct("<8sQI8s")
"""Of a slot: magic, step, length of what follows, digest of step and what follows."""
_PYTHON = struct.Struct("<I625I?d")
_NUMPY = struct.Struct("<624II?d")
_DEVICE = struct.Struct("<QQ")
"""The state of a CUDA generator: seed and offset, as PyTorch packs them."""
_LENGTHS = struct.Struct("<III")
"""Bytes of NumPy's part (0: it was not loaded), of PyTorch's, and of CUDA's (0: it was not in use)."""
_ATTEMPTS = 10_000
"""More files than that of one rank are no longer looked through."""
_NAME = re.compile(r"([0-9]{4,12})-.{0,250}")


@dataclass(frozen=True)
class Generators:
    """The states of Python's, NumPy's (if it is loaded) and PyTorch's generators, packed.

    Equal states have equal bytes. PyTorch's are that of the CPU and, where CUDA is in use, those of its
    devices, which lie in the host's memory: no device is waited for.
    """

    packed: bytes

    @classmethod
    def now(cls) -> Generators:
        version, numbers, gauss = random.getstate()
        python = _PYTHON.pack(version, *numbers, gauss is not None, gauss or 0.0)
        numpy, pytorch, devices = _numpy_now(), torch.get_rng_state().numpy().tobytes(), _devices_now()
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
        if numpy and (module := sys.modules.get("numpy")) is not None:
            *keys, position, has_gauss, gauss = _NUMPY.unpack(numpy)
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


def _numpy_now() -> bytes:
    """Empty where NumPy is not loaded, or its global generator is no longer the Mersenne Twister."""
    module = sys.modules.get("numpy")
    draws: Any = getattr(module, "random", None)
    if draws is None or not hasattr(draws, "get_state"):  # it is being imported just now
        return b""
    kind, keys, position, has_gauss, gauss = draws.get_state(legacy=True)
    return _NUMPY.pack(*keys.tolist(), position, bool(has_gauss), gauss) if kind == "MT19937" else b""


def _devices_now() -> bytes:
    """Of all devices, in their order. Empty where CUDA is not in use: it is not made to start."""
    if not torch.cuda.is_initialized():
        return b""
    states = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    return b"".join(states) if all(len(state) == _DEVICE.size for state in states) else b""


class SlotFile:
    """Where this rank writes, in this attempt."""

    def __init__(self, folder: Path, attempt: str) -> None:
        """`folder`: of this rank. Raises OSError where the file cannot be made, a full disk included."""
        folder.mkdir(0o700, parents=True, exist_ok=True)
        self.path = _next_path(folder, attempt)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        number = os.open(self.path, flags, 0o600)
        try:
            os.posix_fallocate(number, 0, SLOTS * _SLOT)  # a write into a hole of a full disk would be SIGBUS
            self._map = mmap.mmap(number, SLOTS * _SLOT)
        except BaseException:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(number)
        self._last: tuple[int, Generators] | None = None

    def write(self, step: int, generators: Generators) -> None:
        """Those that a process has that has completed `step`; those written before for this step are void."""
        if self._last == (step, generators) or self._map.closed:
            return
        packed = generators.packed
        if _HEAD.size + len(packed) > _SLOT:
            raise ValueError(f"The generators' states take {len(packed)} bytes, more than a slot has.")
        at = step % SLOTS * _SLOT
        self._map[at : at + _HEAD.size] = bytes(_HEAD.size)
        self._map[at + _HEAD.size : at + _HEAD.size + len(packed)] = packed
        self._map[at : at + _HEAD.size] = _HEAD.pack(_MAGIC, step, len(packed), _digest(step, packed))
        self._last = (step, generators)

    def close(self) -> None:
        self._map.close()


def find(folder: Path, step: int) -> Generators | None:
    """Those of a rank that had completed `step`, from its newest attempt that has them."""
    for path in reversed(_files(folder)):
        if (found := _read(path, step)) is not None:
            return found
    return None


def _read(path: Path, step: int) -> Generators | None:
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        info = os.fstat(number)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            return None
        slot = os.pread(number, _SLOT, step % SLOTS * _SLOT)
    except OSError:
        return None
    finally:
        os.close(number)
    if len(slot) < _HEAD.size:
        return None
    magic, found, length, digest = _HEAD.unpack_from(slot)
    packed = slot[_HEAD.size : _HEAD.size + length]
    if (magic, found, length) != (_MAGIC, step, len(packed)) or digest != _digest(step, packed):
        return None
    try:
        return Generators.of(packed)
    except ValueError:
        return None


def remove_old(folder: Path, keep: int) -> None:
    """All files but the newest `keep`."""
    for path in _files(folder)[:-keep]:
        path.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    """Of all attempts, oldest first, by their ordinals: clocks are not compared."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if match := _NAME.fullmatch(entry.name):
                    found.append((int(match[1]), entry.name))
                if len(found) == _ATTEMPTS:
                    break
    except OSError:
        return []
    return [folder / name for _, name in sorted(found)]


def _next_path(folder: Path, attempt: str) -> Path:
    files = _files(folder)
    ordinal = int(files[-1].name.split("-")[0]) + 1 if files else 0
    return folder / f"{ordinal:04d}-{re.sub('[^A-Za-z0-9_.-]', '_', attempt)[:200]}"


def _digest(step: int, packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=8, salt=struct.pack("<Q", step)).digest()
