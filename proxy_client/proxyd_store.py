"""The `torch.distributed` store of a worker below a relay: proxyd serves it, one connection per request.

A worker that holds no connection can be dumped at any moment it waits. It takes the place of the TCPStore
that env:// and tcp:// make; a store that a script makes itself stays what it is.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import itertools
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

_RETURN_S = 60.0
"""How long a proxyd that died may take to come back; one that lives, as long as the store allows."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
_ANSWER_S = 60.0
_LONGEST_ANSWER = 64 << 20
_PEER = struct.Struct("3i")
"""struct ucred: pid, uid, gid of who listens."""
_ONCE = ("set", "add", "append", "compare", "delete")
"""What must not be done twice, lest it undo what others have done since."""
_MOST_COUNTED = 1 << 16
_alive: list[object] = []
"""C++ keeps only its own half of a store, and calls methods of this one as long as the process lives."""


def install(rendezvous: ModuleType) -> None:
    """Replaces what makes stores, where there is a relay, and proxyd's reaches all ranks."""
    if not os.environ.get("UNDERSTUDY_RELAY") or not os.environ.get("UNDERSTUDY_RELAYS"):
        return
    make_tcp_store: Callable[..., Any] = rendezvous._create_c10d_store

    def make_store(
        hostname: str,
        port: int,
        rank: int,
        world_size: int,
        timeout: datetime.timedelta,
        *more: Any,
        **named: Any,
    ) -> Any:
        spans = {"do": "spans"}
        if not _on_one_host(world_size) and not ask(_path(), spans, timeout.total_seconds())["spans"]:
            return make_tcp_store(hostname, port, rank, world_size, timeout, *more, **named)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return _store_class()(f"{hostname}:{port}/{attempt}/", timeout)

    rendezvous._create_c10d_store = make_store  # type: ignore[attr-defined]


def _on_one_host(world_size: int) -> bool:
    here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("UNDERSTUDY_DEVICE_COUNT") or "0"
    return here.isascii() and here.isdigit() and world_size <= int(here)


def _path() -> str:
    return os.path.join(os.environ["UNDERSTUDY_RELAYS"], "store")


class _Later(Exception):
    """Proxyd lives, and waits itself: for etcd, or for the host that leads the job; the text says which."""


def ask(path: str, request: dict[str, Any], limit_s: float, return_s: float = _RETURN_S) -> dict[str, Any]:
    """One request over a connection of its own, sent again until it is answered; raises RuntimeError.

    `limit_s`: for a proxyd that lives; `return_s`: for one that died.
    """
    line = json.dumps(request).encode() + b"\n"
    began = lived = time.monotonic()
    while True:
        why: Exception
        try:
            return _ask_once(path, line)
        except _Later as problem:
            why, lived = problem, time.monotonic()
        except (OSError, ValueError) as problem:
            why = problem
        now = time.monotonic()
        if now > lived + return_s or now > began + max(limit_s, return_s):
            raise RuntimeError(f"proxyd's store does not answer at {path}: {why}") from why
        time.sleep(_LONGEST_PAUSE_S)


def _ask_once(path: str, line: bytes) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_S)
        connection.connect(path)
        _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if uid != os.geteuid():
            raise RuntimeError(f"a process of another user (uid {uid}) listens at {path}")
        connection.sendall(line)
        data = bytearray()
        while not data.endswith(b"\n"):
            try:
                more = connection.recv(1 << 20)
            except TimeoutError as problem:
                raise _Later(f"it has not answered for {_ANSWER_S:g} s") from problem
            data += more
            if not more or len(data) > _LONGEST_ANSWER:
                raise ValueError("its answer has no end")
    return _checked(json.loads(data))


def _checked(reply: Any) -> dict[str, Any]:
    """An answer; raises _Later, RuntimeError, and ValueError if it makes no sense."""
    if not isinstance(reply, dict):
        raise ValueError("its answer makes no sense")
    if "error" in reply:
        raise RuntimeError(str(reply["error"]))
    if "later" in reply:
        raise _Later(str(reply["later"]))
    return reply


class _Numbers:
    """Ids of requests, by which whoever has done one knows it again.

    A worker that comes back from an image asks all again that it has asked since then, by the same ids.  Its
    threads may take turns in another way than before, so the third addition of 1 to a key is that, whatever
    has been asked between: a common count would give one request the id of another.
    """

    def __init__(self) -> None:
        self._name = secrets.token_hex(8)
        self._counts: dict[tuple[str, str], Iterator[int]] = {}
        self._emptied = 0

    def next(self, what: str, key: str, content: dict[str, Any]) -> str:
        """Of the request that is to be sent."""
        if len(self._counts) >= _MOST_COUNTED:
            self._counts, self._emptied = {}, self._emptied + 1
        number = next(self._counts.setdefault((what, key), itertools.count()))  # one step each: for threads
        said = json.dumps([self._emptied, what, key, content], sort_keys=True).encode()
        digest = hashlib.blake2b(said, digest_size=12).hexdigest()
        return f"{self._name}.{os.getpid()}.{digest}.{number}"


def _store_class() -> type:
    """Made late: its base is torch's."""
    from torch.distributed import DistStoreError, Store

    class ProxydStore(Store):  # type: ignore[misc]
        """What TCPStore does, without its server and its connections."""

        def __init__(self, prefix: str, timeout: datetime.timedelta) -> None:
            super().__init__()
            self._prefix, self._limit = prefix, timeout
            self._numbers = _Numbers()
            _alive.append(self)
            self._path = _path()

        def _do(self, what: str, key: str = "", **more: Any) -> dict[str, Any]:
            key = self._prefix + key
            if what in _ONCE:
                more["id"] = self._numbers.next(what, key, more)
            return ask(self._path, {"do": what, "key": key, **more}, self._limit.total_seconds())

        def set_timeout(self, timeout: datetime.timedelta) -> None:
            self._limit = timeout

        @property
        def timeout(self) -> datetime.timedelta:
            return self._limit

        def set(self, key: str, value: str | bytes) -> None:
            self._do("set", key, value=_text(value))

        def get(self, key: str) -> bytes:
            self.wait([key])
            value = self._do("get", key)["value"]
            if value is None:
                raise DistStoreError(f"the key {key} was deleted while it was read")
            return base64.b64decode(value)

        def add(self, key: str, amount: int) -> int:
            return int(self._do("add", key, amount=amount)["count"])

        def append(self, key: str, value: str | bytes) -> None:
            self._do("append", key, value=_text(value))

        def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
            value = self._do("compare", key, expected=_text(expected), value=_text(desired))["value"]
            return base64.b64decode(value)

        def check(self, keys: list[str]) -> bool:
            return bool(self._do("check", keys=[self._prefix + key for key in keys])["found"])

        def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
            limit_s = (timeout or self._limit).total_seconds()
            deadline, pause_s = time.monotonic() + limit_s, _FIRST_PAUSE_S
            while not self.check(keys):
                if time.monotonic() >= deadline:
                    raise DistStoreError(
                        f"wait timeout after {limit_s * 1000:.0f}ms, keys: {', '.join(keys)}"
                    )
                time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

        def delete_key(self, key: str) -> bool:
            return bool(self._do("delete", key)["found"])

        def num_keys(self) -> int:
            return int(self._do("count")["count"])

        deleteKey, getNumKeys = delete_key, num_keys  # as C++ calls them

        def multi_get(self, keys: list[str]) -> list[bytes]:
            return [self.get(key) for key in keys]

        def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
            for key, value in zip(keys, values, strict=True):
                self.set(key, value)

        def has_extended_api(self) -> bool:
            return True

        def clone(self) -> ProxydStore:
            return type(self)(self._prefix, self._limit)

    return ProxydStore


def _text(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else bytes(value)).decode()
