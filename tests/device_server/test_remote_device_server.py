"""A real device server as other hosts meet it: what it lets them read, when, and how it speaks to them."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import ssl
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from executor_harness import Harness
from test_state_copy import empty

from understudy.proxy_server.host_identity import HostIdentity
from understudy.proxy_server.remote_state import Asker, RemoteReplica, StateNotFetched
from understudy.proxy_server.shared_state import PREFIX, fetch_shared
from understudy.proxy_server.state_copy import NO_CONTENT, Wanted
from understudy.recovery.base.control import blocking_channel, pb, rpc
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.machine.processes import start_ticks
from understudy.recovery.membership.network.certificates import issue, make_authority

TOKEN = b"t" * 32
VALUES = [1.0, 2.0, 3.0, 4.0]
LONG_S = 60


class NotExecuted(Harness):
    """A log that nobody in this process executes."""

    def new_executor(self) -> Any:
        class Nobody:
            def resume(self) -> None: ...
            def detach(self) -> None: ...

        return Nobody()


class Served:
    """A spawner of host a, and device servers of it."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.folder = folder
        me = str(os.getpid())
        self.spawner = subprocess.Popen(
            [*module_command("proxy_server.spawner"), "--daemon-socket", str(folder / "none"),
             "--runtime", str(folder), "--driver", "cpu", "--parent", me, "--grace", "5", "--exact", "off",
             "--data-address", "127.0.0.1", "--data-interface", "lo", *more],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._servers: list[int] = []
        assert "ready" in self._answer()

    def _answer(self) -> Any:
        assert self.spawner.stdout is not None
        return json.loads(self.spawner.stdout.readline())

    def spawn(self, name: str) -> Any:
        """One more; answers how to steer it."""
        assert self.spawner.stdin is not None
        path = self.folder / name
        self.spawner.stdin.write(json.dumps({"spawn": {"socket": str(path), "device": "cpu:0"}}) + "\n")
        self.spawner.stdin.flush()
        self.pid = int(self._answer()["spawned"]["pid"])
        self._servers.append(self.pid)
        return rpc.DeviceServerStub(blocking_channel(path))

    def end(self) -> None:
        for pid in self._servers:  # they outlive their spawner
            os.kill(pid, signal.SIGKILL)
        self.spawner.terminate()
        self.spawner.communicate(timeout=LONG_S)


@pytest.fixture
def certs(folder: Path) -> Path:
    directory = folder / "certs"
    make_authority(directory, "tests")
    for host in "ab":
        issue(directory, host)
    return directory


@pytest.fixture
def spawned(folder: Path, certs: Path) -> Iterator[Served]:
    made = Served(folder, "--certificates", str(certs), "--host-name", "a")
    yield made
    made.end()


def attach(server: Any, log: Harness, generation: int, token: bytes, run: bool = True) -> None:
    me = pb.Process(pid=os.getpid(), start_ticks=start_ticks(os.getpid()))
    request = pb.AttachRequest(
        job="j", rank=1, world=2, log_directory=log.directory, threads=1, generation=generation, run=run,
        policy=pb.Policy(protect=True), worker=me, token=token,
    )  # fmt: skip
    assert server.Attach(request, timeout=LONG_S).error == ""


def read(place: str, certs: Path, rank: int = 1, **asker: Any) -> bytes:
    """As a device server of host b does."""
    wanted = [Wanted(1, 16, (7,))]
    ours = empty(wanted)
    who = dataclasses.replace(Asker("j", 3, TOKEN), **asker)
    RemoteReplica(f"tls:a@{place}", rank, HostIdentity(certs, "b"), who).fetch(wanted, ours)
    return bytes(ours.contents[7])


def test_state_is_read_by_those_only_who_name_job_rank_and_generation_while_it_stands_still(
    spawned: Served, certs: Path
) -> None:
    with NotExecuted() as log:
        log.new(1, VALUES)
        log.commit()
        server = spawned.spawn("s")
        place = server.Health(pb.HealthRequest(), wait_for_ready=True, timeout=LONG_S).data_address
        assert place.startswith("127.0.0.1:")
        with pytest.raises(StateNotFetched, match="not the token of a job whose state is here"):
            read(place, certs)  # it has none
        attach(server, log, 2, TOKEN)
        log.synchronize()
        with pytest.raises(StateNotFetched, match="generation 3 asks for state, and generation 2 is"):
            read(place, certs)
        with pytest.raises(StateNotFetched, match="parked"):
            read(place, certs, generation=2)
        assert server.Park(pb.ParkRequest(generation=3), timeout=LONG_S).error == ""
        assert read(place, certs) == struct.pack("<4f", *VALUES)
        for wrong, why in (
            ({"token": b"x" * 32}, "token"),
            ({"job": "k"}, "here is the state of rank 1"),
            ({"rank": 0}, "here is the state of rank 1, not of rank 0"),
            ({"generation": 2}, "generation 2 asks for state, and generation 3 is"),
        ):
            with pytest.raises(StateNotFetched, match=why):
                read(place, certs, **wrong)


def test_state_for_who_does_not_reach_it_goes_by_storage_while_it_stands_still(
    folder: Path, certs: Path
) -> None:
    shared = folder / "shared"
    shared.mkdir()
    dead = shared / f"a.{2**22 + 1}.5-{'0' * 32}.state"  # no process has that number
    dead.touch()
    made = Served(folder, "--certificates", str(certs), "--host-name", "a", "--shared-directory", str(shared))
    try:
        assert not dead.exists()
        server = made.spawn("s")
        server.Health(pb.HealthRequest(), wait_for_ready=True, timeout=LONG_S)
        ranges = [pb.StateRange(handle=1, bytes=16)]
        wanted = [Wanted(1, 16, (7,))]

        def write(generation: int) -> Any:
            request = pb.WriteStateRequest(generation=generation, ranges=ranges)
            return server.WriteState(request, timeout=LONG_S)

        assert "no state of generation 3 for other hosts" in write(3).error  # it has none
        with NotExecuted() as log:
            log.new(1, VALUES)
            log.commit()
            attach(server, log, 2, TOKEN)
            log.synchronize()
            assert "parked" in write(2).error
            assert server.Park(pb.ParkRequest(generation=3), timeout=LONG_S).error == ""
            assert "no state of generation 2" in write(2).error
            ours = empty(wanted)
            name = write(3).name
            fetch_shared(PREFIX + name, shared, 1, Asker("j", 3, TOKEN), wanted, ours)
            assert bytes(ours.contents[7]) == struct.pack("<4f", *VALUES)
            assert write(3).error == "" and len(os.listdir(shared)) == 1
            assert server.Resume(pb.ResumeRequest(generation=3), timeout=LONG_S).error == ""
            assert os.listdir(shared) == []
    finally:
        made.end()


def test_a_host_without_shared_storage_says_so(spawned: Served) -> None:
    server = spawned.spawn("s")
    request = pb.WriteStateRequest(generation=1)
    reply = server.WriteState(request, wait_for_ready=True, timeout=LONG_S)
    assert reply.error == "its host has no --shared-directory"


def test_nobody_reads_the_state_of_a_job_without_a_token(spawned: Served, certs: Path) -> None:
    with NotExecuted() as log:
        log.new(1, VALUES)
        server = spawned.spawn("s")
        place = server.Health(pb.HealthRequest(), wait_for_ready=True, timeout=LONG_S).data_address
        attach(server, log, 3, b"")
        with pytest.raises(StateNotFetched, match="not the token"):
            read(place, certs, token=b"")


def test_it_speaks_tls_1_3_and_nothing_less(spawned: Served, certs: Path) -> None:
    server = spawned.spawn("s")
    place = server.Health(pb.HealthRequest(), wait_for_ready=True, timeout=LONG_S).data_address

    def answered(version: ssl.TLSVersion, *, shows: bool) -> bytes:
        context = ssl.create_default_context(cafile=str(certs / "ca.pem"))
        if shows:
            context.load_cert_chain(certs / "b.pem", certs / "b.key")
        context.minimum_version = context.maximum_version = version
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(("127.0.0.1", int(place.rpartition(":")[2])), 10) as plain,
            context.wrap_socket(plain, server_hostname="a") as secure,
        ):
            try:
                return secure.recv(1)
            except OSError:
                return b""

    assert answered(ssl.TLSVersion.TLSv1_3, shows=True)
    assert not answered(ssl.TLSVersion.TLSv1_3, shows=False)
    with pytest.raises(OSError, match=r"EOF|alert"):
        answered(ssl.TLSVersion.TLSv1_2, shows=True)


def test_without_certificates_it_listens_nowhere(folder: Path) -> None:
    made = Served(folder)
    try:
        server = made.spawn("s")
        health = server.Health(pb.HealthRequest(), wait_for_ready=True, timeout=LONG_S)
        assert health.data_address == ""
        inodes = {os.readlink(file) for file in Path(f"/proc/{made.pid}/fd").iterdir() if file.exists()}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{made.pid}/net/{table}").read_text().splitlines()[1:]:
                assert f"socket:[{line.split()[9]}]" not in inodes
    finally:
        made.end()


def test_certificates_that_cannot_be_read_keep_it_from_listening_and_from_nothing_else(
    folder: Path, tmp_path: Path
) -> None:
    made = Served(folder, "--certificates", str(tmp_path), "--host-name", "a")
    try:
        server = made.spawn("s")
        health = server.Health(pb.HealthRequest(), wait_for_ready=True, timeout=LONG_S)
        assert health.data_address == "" and health.pid == made.pid
    finally:
        made.end()


@pytest.mark.parametrize("others", [[2], []])
def test_what_a_replica_has_no_more_comes_from_another_buffer_of_equal_content(
    folder: Path, spawned: Served, others: list[int]
) -> None:
    """It freed one that it would not read again, and went back: equal by chance, it is wanted here."""
    content = struct.pack("<4f", *VALUES)
    with NotExecuted() as log, Harness() as wanting:
        log.new(1, VALUES)
        log.new(2, VALUES)
        log.commit()
        replica = spawned.spawn("replica")
        replica.Health(pb.HealthRequest(), wait_for_ready=True, timeout=LONG_S)
        attach(replica, log, 2, TOKEN)
        log.synchronize()
        log.writer.free_later(1)
        log.synchronize()
        assert replica.Park(pb.ParkRequest(generation=3), timeout=LONG_S).error == ""
        assert replica.Rewind(pb.RewindRequest(commit=1, generation=3), timeout=LONG_S).error == ""
        wanting.new(7, VALUES)
        wanting.commit()
        wanting.synchronize()
        wanting.executor.park()
        (digest,) = wanting.log.digests(1, [7])
        wanting.executor.detach()
        server = spawned.spawn("server")
        server.Health(pb.HealthRequest(), wait_for_ready=True, timeout=LONG_S)
        attach(server, wanting, 2, TOKEN, run=False)
        copy = pb.ReplicaCopy(
            handle=7, source_handle=1, bytes=len(content), digest=digest, other_source_handles=others
        )
        source = pb.ReplicaSource(address=f"unix:{folder / 'replica'}", rank=0, copies=[copy])
        request = pb.RestoreRequest(commit=1, sources=[source], generation=3)
        assert server.Restore(request, timeout=LONG_S).error == ""
        (chunk,) = server.ReadState(pb.ReadStateRequest(handles=[7]), timeout=LONG_S)
        assert chunk.data == (content if others else b"")
        assert (chunk.offset == NO_CONTENT) == (not others)
