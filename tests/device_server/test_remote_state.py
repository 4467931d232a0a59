"""State of a replica on another host: over TLS, with the job's token, and nothing else than was asked for."""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from test_state_copy import Buffers, empty

from understudy.protos import control_pb2 as pb
from understudy.protos import services as rpc
from understudy.proxy_server import remote_state
from understudy.proxy_server.host_identity import HostIdentity
from understudy.proxy_server.remote_state import (
    BATCH_BYTES,
    MOST_RANGES,
    Asker,
    RemoteReplica,
    ReplicaStateService,
    StateNotFetched,
    serve_state,
)
from understudy.proxy_server.state_copy import CHUNK_BYTES, Wanted
from understudy.recovery.membership.network.certificates import issue, make_authority
from understudy.replay import digest

NOW = datetime.now(UTC)
TOKEN = b"t" * 32


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    """For hosts a and b."""
    directory = tmp_path / "certs"
    make_authority(directory, "tests")
    for host in "ab":
        issue(directory, host)
    return directory


def refusal(request: pb.ReplicaStateRequest) -> str:
    return "" if request.token == TOKEN else "that is not the token"


@pytest.fixture
def served(certs: Path) -> Iterator[Callable[..., str]]:
    """How to serve state as host a; answers where."""
    servers: list[grpc.Server] = []

    def serve(service: Any, identity: HostIdentity | None = None) -> str:
        made = ReplicaStateService(refusal, service) if isinstance(service, Buffers) else service
        server, place = serve_state(made, "127.0.0.1", identity or HostIdentity(certs, "a"))
        servers.append(server)
        return f"tls:a@{place}"

    yield serve
    for server in servers:
        server.stop(None).wait()


def fetch(
    address: str, identity: HostIdentity | None, wanted: list[Wanted], token: bytes = TOKEN, ours: Any = None
) -> tuple[int, list[int]]:
    ours = ours if ours is not None else empty(wanted)
    return RemoteReplica(address, 0, identity, Asker("j", 1, token)).fetch(wanted, ours)


def test_buffers_of_all_sizes_arrive_as_they_were(
    served: Callable[..., str], certs: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_state, "STREAMS", 4)
    chance = random.Random(seed)
    sizes = [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * BATCH_BYTES - 5, *[7] * (MOST_RANGES + 1)]
    theirs = Buffers({number: bytearray(chance.randbytes(size)) for number, size in enumerate(sizes, 1)})
    wanted = [Wanted(n, size, (10**5 * n, 10**5 * n + 1)) for n, size in enumerate(sizes, 1)]
    ours = empty(wanted)
    copied, lost = fetch(served(theirs), HostIdentity(certs, "b"), wanted, ours=ours)
    assert copied == 2 * sum(sizes) and lost == []
    for handle, content in ours.contents.items():
        assert content == theirs.contents[handle // 10**5], handle


def test_content_that_is_not_there_is_told_of_once(served: Callable[..., str], certs: Path) -> None:
    wanted = [Wanted(1, 2 * BATCH_BYTES, (7, 8)), Wanted(2, 5, (9,))]
    theirs = Buffers({1: bytearray(2 * BATCH_BYTES), 2: bytearray(b"there")})
    theirs.gone = {1}
    ours = empty(wanted)
    assert fetch(served(theirs), HostIdentity(certs, "b"), wanted, ours=ours) == (5, [7, 8])
    assert ours.gone == {7, 8} and ours.contents[9] == b"there"


# ------------------------------------------------------------------ who may
def small(served: Callable[..., str], *identity: HostIdentity) -> tuple[str, list[Wanted]]:
    return served(Buffers({1: bytearray(b"state")}), *identity), [Wanted(1, 5, (7,))]


def test_whoever_has_another_token_gets_nothing(served: Callable[..., str], certs: Path) -> None:
    address, wanted = small(served)
    for token in (b"", b"x" * 32, TOKEN[:-1]):
        with pytest.raises(StateNotFetched, match=r"from host a at .*: that is not the token"):
            fetch(address, HostIdentity(certs, "b"), wanted, token)


def test_certificate_must_be_that_of_the_host_that_was_named(served: Callable[..., str], certs: Path) -> None:
    address, wanted = small(served, HostIdentity(certs, "b"))
    with pytest.raises(StateNotFetched, match="could not be had from host a"):
        fetch(address, HostIdentity(certs, "a"), wanted)
    assert fetch(address.replace("tls:a@", "tls:b@"), HostIdentity(certs, "a"), wanted) == (5, [])


@pytest.mark.parametrize("whose", ["the reader's", "the holder's"])
@pytest.mark.parametrize("wrong", ["another authority's", "expired", "not valid yet"])
def test_wrong_certificate_of_either_side_gets_nothing(
    wrong: str, whose: str, served: Callable[..., str], certs: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    if wrong == "another authority's":
        make_authority(bad, "others")
        issue(bad, "a")
        issue(bad, "b")
    else:
        bad.mkdir(mode=0o700)
        for name in ("ca.pem", "ca.key"):
            (bad / name).write_bytes((certs / name).read_bytes())
            (bad / name).chmod(0o600)
        now = NOW - timedelta(days=400) if wrong == "expired" else NOW + timedelta(days=1)
        issue(bad, "a", now=now)
        issue(bad, "b", now=now)
    right = {"reader": HostIdentity(certs, "b"), "holder": HostIdentity(certs, "a")}
    if whose == "the reader's":
        right["reader"] = HostIdentity(bad, "b")
    else:
        right["holder"] = HostIdentity(bad, "a")
    address, wanted = small(served, right["holder"])
    with pytest.raises(StateNotFetched, match="could not be had from host a"):
        fetch(address, right["reader"], wanted)


def test_certificates_that_are_replaced_count_from_the_next_connection_on(
    served: Callable[..., str], certs: Path, tmp_path: Path
) -> None:
    """A device server may live longer than a certificate."""
    address, wanted = small(served)
    former, renewed = tmp_path / "former", tmp_path / "renewed"
    shutil.copytree(certs, former)
    make_authority(renewed, "tests")
    for host in "ab":
        issue(renewed, host)
    assert fetch(address, HostIdentity(former, "b"), wanted) == (5, [])
    for missing in ("a.key", "a.pem", "ca.pem"):  # somebody is replacing them just now
        (certs / missing).unlink()
        assert fetch(address, HostIdentity(former, "b"), wanted) == (5, [])
    shutil.copytree(renewed, certs, dirs_exist_ok=True)
    assert fetch(address, HostIdentity(certs, "b"), wanted) == (5, [])
    with pytest.raises(StateNotFetched, match="could not be had from host a"):
        fetch(address, HostIdentity(former, "b"), wanted)
    shutil.copy(former / "a.pem", certs / "a.pem")  # not the certificate of the key beside it
    assert fetch(address, HostIdentity(renewed, "b"), wanted) == (5, [])


def test_place_that_drops_what_is_sent_is_given_up_after_some_seconds(certs: Path) -> None:
    """As behind a firewall; shared storage is tried then."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
        for _ in range(3):  # no further connection is taken, nor refused
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        began = time.monotonic()
        with pytest.raises(StateNotFetched, match="could not be had from host a"):
            fetch(f"tls:a@127.0.0.1:{full.getsockname()[1]}", HostIdentity(certs, "b"), [Wanted(1, 5, (7,))])
        print(f"{time.monotonic() - began:.1f} s")
        assert time.monotonic() - began < 15


def test_address_that_makes_no_sense_and_a_host_without_certificates_are_told(certs: Path) -> None:
    for address in (
        "tls:",
        "tls:a",
        "tls:a@10.0.0.1",
        "tls:a@host:1",
        "tls:a b@10.0.0.1:1",
        "tls:@10.0.0.1:1",
    ):
        with pytest.raises(StateNotFetched, match="is no address of a device server"):
            fetch(address, HostIdentity(certs, "b"), [])
    with pytest.raises(StateNotFetched, match="this one has no certificate"):
        fetch("tls:a@127.0.0.1:1", None, [])
    with pytest.raises(StateNotFetched, match="certificates of this host cannot be read"):
        fetch("tls:a@127.0.0.1:1", HostIdentity(certs, "c"), [Wanted(1, 5, (7,))])


# ------------------------------------------------------------------ what comes
class Hostile(rpc.ReplicaStateServicer):  # type: ignore[misc]
    """Sends what a test says."""

    def __init__(self, *chunks: pb.ReplicaStateChunk) -> None:
        self._chunks = chunks

    def ReadState(self, request: Any, context: Any) -> Iterator[pb.ReplicaStateChunk]:
        yield from self._chunks


def chunk(handle: int = 1, offset: int = 0, data: bytes = b"state", **more: Any) -> pb.ReplicaStateChunk:
    return pb.ReplicaStateChunk(
        handle=handle, offset=offset, data=data, checksum=more.pop("checksum", digest(data)), **more
    )


@pytest.mark.parametrize(
    ("chunks", "why"),
    [
        ([], "it ends too soon"),
        ([chunk(data=b"sta")], "it ends too soon"),
        ([chunk(handle=2)], "it is not what was asked for"),
        ([chunk(offset=1, data=b"tate")], "it is not what was asked for"),
        ([chunk(offset=2**64 - 1)], "it is not what was asked for"),
        ([chunk(data=b"statement")], "it is not what was asked for"),
        ([chunk(data=b"")], "it is not what was asked for"),
        ([chunk(checksum=7)], "it was damaged on its way"),
    ],
)
def test_anything_but_what_was_asked_for_is_refused(
    chunks: list[pb.ReplicaStateChunk], why: str, served: Callable[..., str], certs: Path
) -> None:
    wanted = [Wanted(1, 5, (7,))]
    ours = empty(wanted)
    with pytest.raises(StateNotFetched, match=why):
        fetch(served(Hostile(*chunks)), HostIdentity(certs, "b"), wanted, ours=ours)
    assert ours.contents[7] in (bytes(5), b"sta\0\0")


def test_a_request_for_more_than_there_is_is_refused(served: Callable[..., str], certs: Path) -> None:
    address, _ = small(served)
    with pytest.raises(StateNotFetched, match="buffer 1 is not that large"):
        fetch(address, HostIdentity(certs, "b"), [Wanted(1, 6, (7,))])


class Dying(Buffers):
    """Its host goes away in the middle."""

    def read_state(self, handle: int, offset: int, count: int) -> bytes:
        if offset >= CHUNK_BYTES:
            self.begun.set()
            self.dead.wait()
        return super().read_state(handle, offset, count)

    begun: threading.Event
    dead: threading.Event


def test_a_holder_that_dies_in_the_middle_ends_all_streams_with_a_sentence(
    certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_state, "STREAMS", 3)
    wanted = [Wanted(1, 4 * BATCH_BYTES, (7,))]
    theirs = Dying({1: bytearray(4 * BATCH_BYTES)})
    theirs.begun, theirs.dead = threading.Event(), threading.Event()
    server, place = serve_state(ReplicaStateService(refusal, theirs), "127.0.0.1", HostIdentity(certs, "a"))

    def end() -> None:
        theirs.begun.wait()
        server.stop(0)

    ending = threading.Thread(target=end)
    ending.start()
    try:
        with pytest.raises(StateNotFetched, match="the state of rank 0 could not be had from host a at"):
            fetch(f"tls:a@{place}", HostIdentity(certs, "b"), wanted)
    finally:
        theirs.dead.set()
        ending.join()
