"""Files that a dumped worker had open: they may be larger when it is restored, as it ran on meanwhile."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from google.protobuf.message import DecodeError

from understudy.protos import control_pb2 as pb

FILES = "files.img"
_HEADER = struct.Struct("<II")
"""Two magic numbers (CRIU, images)."""
_MAGIC = (0x54564319, 0x56303138)
"""IMG_COMMON_MAGIC and FILES_MAGIC (criu/include/magic.h)."""
_LENGTH = struct.Struct("<I")


def let_written_files_grow(images: Path) -> int:
    """CRIU restores no process if an open file has another size; answers for how many that is no matter now.

    They are those that it could write to: what it wrote since, it writes again.  Raises OSError, with a
    sentence if the image is not as CRIU writes it.
    """
    path = images / FILES
    data = path.read_bytes()
    if len(data) < _HEADER.size or _HEADER.unpack_from(data) != _MAGIC:
        raise OSError(f"{path} is no image of open files as CRIU writes it")
    written = bytearray(data[: _HEADER.size])
    position, changed = _HEADER.size, 0
    while position < len(data):
        end = position + _LENGTH.size
        length = _LENGTH.unpack_from(data, position)[0] if end <= len(data) else len(data)
        if end + length > len(data):
            raise OSError(f"{path} ends in the midst of an entry")
        entry = data[end : end + length]
        if (smaller := _without_size(entry, path)) is not None:
            entry, changed = smaller, changed + 1
        written += _LENGTH.pack(len(entry)) + entry
        position = end + length
    if changed:
        new = path.with_suffix(".new")
        new.write_bytes(written)
        new.chmod(path.stat().st_mode & 0o777)
        new.rename(path)
    return changed


def _without_size(entry: bytes, path: Path) -> bytes | None:
    """None: it stays as it is."""
    try:
        file = pb.CriuFile.FromString(entry)
    except DecodeError as problem:
        raise OSError(f"{path} has an entry that cannot be read") from problem
    if not file.HasField("reg") or not file.reg.HasField("size"):
        return None
    if file.reg.flags & os.O_ACCMODE == os.O_RDONLY:
        return None
    file.reg.ClearField("size")
    return file.SerializeToString()
