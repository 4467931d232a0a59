"""Reads a manifest (replay/csrc/log/log_format.h: ManifestHeader) of unknown origin."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from understudy import replay

_MAGIC, _OLD_MAGIC = 0x32534546494E414D, 0x31534546494E414D
_HEADER = struct.Struct("<8Q")
_BUFFER = struct.Struct("<5Q")
_GENERATOR_BYTES, _COMMUNICATOR_BYTES, _SETTING_BYTES = 24, 56, 16


@dataclass(frozen=True)
class BufferRow:
    """A buffer that was alive at the commit; `kept`: its content is part of the snapshot."""

    handle: int
    bytes: int
    digest: int
    kept: bool


def read_manifest(content: bytes) -> list[BufferRow]:
    """Raises ValueError."""
    if len(content) < _HEADER.size:
        raise ValueError("its manifest is cut off")
    magic, _, buffers, generators, communicators, settings, total, digest = _HEADER.unpack_from(content)
    expected = (
        _HEADER.size + buffers * _BUFFER.size + generators * _GENERATOR_BYTES
        + communicators * _COMMUNICATOR_BYTES + settings * _SETTING_BYTES
    )  # fmt: skip
    if magic == _OLD_MAGIC:
        raise ValueError("its manifest is that of an older release, whose digests are other ones")
    if magic != _MAGIC or total != len(content) or expected != total:
        raise ValueError("its manifest is damaged (header)")
    if replay.digest(content[_HEADER.size :]) != digest:
        raise ValueError("its manifest is damaged (digest)")
    rows = _BUFFER.iter_unpack(content[_HEADER.size : _HEADER.size + buffers * _BUFFER.size])
    return [BufferRow(handle, count, told, kept == 1) for handle, count, told, _, kept in rows]
