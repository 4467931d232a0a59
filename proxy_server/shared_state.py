"""State of a replica by way of storage that hosts share, where the replica is not reached (paper 4.3).

The holder writes what is wanted into a file of its own, in the order in which it is wanted; who needs it
opens the file, removes its name and reads.  Storage is trusted no more than a network: records are encrypted
(AES-256-GCM), with a key of this one file that only who knows the job's token can make, and each counts in
its own place only; digests of the commit are compared behind it, as always.

    HOST.PID.START-TAG.state    records of: length (4 bytes, little-endian), encrypted ReplicaStateChunk
"""

from __future__ import annotations

import contextlib
import hmac
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError

from understudy.protos import control_pb2 as pb
from understudy.proxy_server.remote_state import Asker, StateNotFetched
from understudy.proxy_server.shared_files import clear_leftovers, is_name, new_name
from understudy.proxy_server.state_chunks import NotAsAsked, Piece, chunks_of, take
from understudy.proxy_server.state_copy import CHUNK_BYTES, State, Wanted

PREFIX = "shared:"
_LENGTH = struct.Struct("<I")
_LONGEST_RECORD = CHUNK_BYTES + 256
_NONCE_BYTES = 12


class StateNotWritten(RuntimeError):
    """Why, in a sentence."""


class SharedDirectory:
    """Where one device server leaves state for others: until that is read, or `forget`, or it is dead."""

    def __init__(self, directory: Path, host: str) -> None:
        self.directory = directory
        self._host = host
        self._left: set[Path] = set()

    def write(
        self, of: Asker, rank: int, ranges: Sequence[pb.StateRange], state: State,
        still_wanted: Callable[[], bool],
    ) -> tuple[str, int]:  # fmt: skip
        """These ranges of the state of a rank; answers the file's name and size.  Raises StateNotWritten."""
        clear_leftovers(self.directory, self._host)
        name = new_name(self._host)
        path = self.directory / name
        self._left.add(path)
        cipher = _Cipher(of, rank, name)
        try:
            with open(
                os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
            ) as file:
                for wanted in ranges:
                    for chunk in chunks_of(state, wanted) if wanted.bytes else ():
                        if not still_wanted():
                            raise StateNotWritten("nobody waits for it any more")
                        record = cipher.encrypt(chunk.SerializeToString())
                        file.write(_LENGTH.pack(len(record)))
                        file.write(record)
                file.flush()
                return name, file.tell()  # closed behind this: what NFS could not write is told then
        except OSError as problem:
            self._remove(path)
            raise StateNotWritten(
                f"the state of rank {rank} cannot be written to {self.directory}: {problem.strerror}"
            ) from problem
        except (RuntimeError, ValueError) as problem:  # as the executor refuses what is not there
            self._remove(path)
            raise StateNotWritten(f"the state of rank {rank} cannot be written: {problem}") from problem

    def forget(self) -> None:
        """What has not been read by now is not needed."""
        for path in list(self._left):
            self._remove(path)

    def _remove(self, path: Path) -> None:
        self._left.discard(path)
        with contextlib.suppress(OSError):
            path.unlink()


def fetch_shared(
    address: str, directory: Path | None, rank: int, asker: Asker, wanted: Sequence[Wanted], state: State
) -> tuple[int, list[int]]:
    """Copy these into `state` from `shared:NAME`; answers the bytes, and handles whose content was not there.

    Raises StateNotFetched.
    """
    name = address.removeprefix(PREFIX)
    if not is_name(name):
        raise StateNotFetched(f"{address[:200]!r} is no file of state on shared storage")
    if directory is None:
        raise StateNotFetched(
            f"the state of rank {rank} is on shared storage, and this host has no --shared-directory"
        )
    gone: dict[int, None] = {}

    def lost(buffer: Wanted) -> None:
        for handle in buffer.handles:
            state.mark_lost(handle)
            gone[handle] = None

    pieces = [Piece(one, 0, one.bytes) for one in wanted]
    try:
        with _opened(directory / name) as file:
            return take(_records(file, _Cipher(asker, rank, name)), pieces, state, lost), list(gone)
    except OSError as problem:
        why = problem.strerror or str(problem)
    except NotAsAsked as problem:
        why = str(problem)
    raise StateNotFetched(f"the state of rank {rank} could not be had from {directory / name}: {why}")


class _Cipher:
    """Of the records of one file, one after the other: they are numbered, and no other file has its key."""

    def __init__(self, of: Asker, rank: int, name: str) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # seldom needed

        what = repr(("understudy state", of.job, rank, of.generation, name)).encode()
        self._cipher = AESGCM(hmac.digest(of.token, what, "sha256"))
        self._number = 0

    def encrypt(self, message: bytes) -> bytes:
        return self._cipher.encrypt(self._next(), message, None)

    def decrypt(self, record: bytes) -> bytes:
        """Raises NotAsAsked."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(self._next(), record, None)
        except InvalidTag:
            raise NotAsAsked("it is not as it was written, or not of this recovery") from None

    def _next(self) -> bytes:
        self._number += 1
        return self._number.to_bytes(_NONCE_BYTES, "little")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """For reading; it has no name from here on.  Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(0, "it is not a file that only this user can write")
        path.unlink()
        yield file


def _records(file: BinaryIO, cipher: _Cipher) -> Iterator[pb.ReplicaStateChunk]:
    """Raises NotAsAsked, OSError."""
    while head := file.read(_LENGTH.size):
        count = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
        if count > _LONGEST_RECORD:
            raise NotAsAsked("it is not what was asked for")
        record = file.read(count)
        if len(head) < _LENGTH.size or len(record) < count:
            raise NotAsAsked("it ends too soon")
        try:
            yield pb.ReplicaStateChunk.FromString(cipher.decrypt(record))
        except DecodeError:
            raise NotAsAsked("it is not what was asked for") from None
