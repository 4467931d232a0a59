"""Hosts that ask each other over TLS: real handshakes, right and wrong certificates, silent addresses."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest
from etcd_server import EtcdServer, free_port, running_etcd
from running_proxyd import running_proxyd

from understudy.recovery.base.control import pb, rpc
from understudy.recovery.base.errors import BadInput
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.config.cluster_options import membership_of, parse_listen
from understudy.recovery.config.proxyd_settings import options_of
from understudy.recovery.membership.network.certificates import Credentials, issue, load, make_authority
from understudy.recovery.membership.network.endpoint import HostsService, listen
from understudy.recovery.membership.network.peers import TlsPeers
from understudy.recovery.membership.settings import MembershipSettings
from understudy.recovery.planning.agreement import Vote

NOW = datetime.now(UTC)
REFUSED = "it refuses our certificate, as another authority's or not valid by its clock"


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    """For hosts a, b and c."""
    directory = tmp_path / "certs"
    make_authority(directory, "tests")
    for host in "abc":
        issue(directory, host, ["127.0.0.1"])
    return directory


def unchecked(directory: Path, host: str, authority: Path) -> Credentials:
    """Whatever lies there, with the authority of another directory."""
    return Credentials(
        host=host,
        authority=(authority / "ca.pem").read_bytes(),
        certificate=(directory / f"{host}.pem").read_bytes(),
        key=(directory / f"{host}.key").read_bytes(),
        expires=NOW,
        directory=directory,
    )


class Served:
    """An endpoint of a host, in this process."""

    def __init__(
        self, credentials: Credentials, calls_itself: str = "", knows: dict[str, Vote] | None = None
    ) -> None:
        self.record = pb.HostRecord(
            version=1, name=calls_itself or credentials.host, address=f"127.0.0.1:{free_port()}"
        )
        self._credentials = credentials
        self._knows = knows or {}

    async def _reach(self, name: str) -> Vote:
        return self._knows.get(name, Vote(None, "not known"))

    async def __aenter__(self) -> pb.HostRecord:
        service = HostsService("tests", lambda: self.record, self._reach)
        self._server = await listen(self.record.address, self._credentials, service)
        return self.record

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(scene(), 60)

    asyncio.run(main())


def test_hosts_of_one_authority_reach_each_other(certs: Path) -> None:
    async def scene() -> None:
        async with Served(load(certs, "b")) as b:
            assert await TlsPeers("a", load(certs, "a")).reach(b) == Vote(True)

    run(scene)


def test_certificate_must_be_that_of_the_host_whatever_its_address(certs: Path) -> None:
    async def scene() -> None:
        async with Served(load(certs, "c"), calls_itself="b") as b:
            vote = await TlsPeers("a", load(certs, "a")).reach(b)
            assert vote == Vote(None, "b cannot be asked: its certificate is for another host")

    run(scene)


def test_wrong_certificate_of_either_side_is_told_in_a_sentence_and_says_nothing_about_the_host(
    certs: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    make_authority(other, "others")
    issue(other, "b")
    bad = {"old": NOW - timedelta(days=400), "new": NOW + timedelta(days=1)}
    for name, now in bad.items():
        make_authority(tmp_path / name, "tests", now=NOW - timedelta(days=500))
        issue(tmp_path / name, "b", now=now)
        issue(tmp_path / name, "a", now=now)

    async def scene() -> None:
        async def met(theirs: Credentials, ours: Credentials) -> str:
            async with Served(theirs) as b:
                vote = await TlsPeers("a", ours).reach(b)
            assert vote.reaches is None
            return vote.why.removeprefix("b cannot be asked: ")

        a, b = load(certs, "a"), load(certs, "b")
        assert await met(unchecked(other, "b", certs), a) == "its certificate is another authority's"
        old, new = tmp_path / "old", tmp_path / "new"
        ours = unchecked(certs, "a", old)
        assert await met(unchecked(old, "b", certs), ours) == "its certificate has expired"
        ours = unchecked(certs, "a", new)
        told = await met(unchecked(new, "b", certs), ours)
        assert told == "its certificate is not valid yet: compare the clocks"
        assert await met(b, unchecked(other, "b", certs)) == REFUSED
        issue(certs, "expired", days=1, now=NOW - timedelta(days=2))
        told = await met(b, unchecked(certs, "expired", certs))
        assert told == REFUSED

    run(scene)


def test_host_is_not_reached_only_if_its_machine_gives_no_answer(certs: Path) -> None:
    async def scene() -> None:
        peers = TlsPeers("a", load(certs, "a"))

        def at(address: str) -> pb.HostRecord:
            return pb.HostRecord(name="b", address=address)

        refused = await peers.reach(at(f"127.0.0.1:{free_port()}"))
        assert refused == Vote(None, "the machine of b answers, its proxyd does not")
        with socket.create_server(("127.0.0.1", 0), backlog=8) as silent:  # as a proxyd that was stopped
            hung = await peers.reach(at(f"127.0.0.1:{silent.getsockname()[1]}"))
        assert hung == Vote(None, "b cannot be asked: it accepts connections, and does not answer")
        for nowhere in ("", "nonsense", "127.0.0.1:", "127.0.0.1:x", ":1"):
            assert (await peers.reach(at(nowhere))).reaches is None
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
            place = full.getsockname()
            with socket.socket() as one, socket.socket() as two:  # its queue is full: nothing is answered
                for filler in (one, two):
                    filler.setblocking(False)
                    filler.connect_ex(place)
                gone = await peers.reach(at(f"127.0.0.1:{place[1]}"))
        assert gone.reaches is False

    run(scene)


def test_peers_tell_what_they_found_and_those_that_cannot_be_asked_are_not_counted(certs: Path) -> None:
    async def scene() -> None:
        target = pb.HostRecord(name="t")
        async with (
            Served(load(certs, "b"), knows={"t": Vote(False, "no answer within 2 s")}) as b,
            Served(load(certs, "c"), knows={"t": Vote(True)}) as c,
        ):
            d = pb.HostRecord(name="d")
            e = pb.HostRecord(name="e", address=f"127.0.0.1:{free_port()}")
            votes = await TlsPeers("a", load(certs, "a")).votes(target, {"b": b, "c": c, "d": d, "e": e})
        assert {name: vote.reaches for name, vote in votes.items()} == {
            "a": None, "b": False, "c": True, "d": None, "e": None,
        }  # fmt: skip

    run(scene)


def test_client_without_certificate_gets_no_answer(certs: Path) -> None:
    async def scene() -> None:
        async with Served(load(certs, "b")) as b:
            for secret in (
                grpc.ssl_channel_credentials((certs / "ca.pem").read_bytes()),
                None,
            ):
                options = [("grpc.ssl_target_name_override", "b")]
                channel = (
                    grpc.aio.secure_channel(b.address, secret, options=options)
                    if secret
                    else grpc.aio.insecure_channel(b.address)
                )
                async with channel:
                    with pytest.raises(grpc.RpcError):
                        await rpc.HostsStub(channel).Ping(pb.PingRequest(), timeout=5)

    run(scene)


def test_address_that_is_taken_is_told(certs: Path) -> None:
    async def scene() -> None:
        async with Served(load(certs, "b")) as b:
            with pytest.raises(BadInput, match="cannot listen at"):
                await listen(b.address, load(certs, "c"), HostsService("t", pb.HostRecord, Served._reach))  # type: ignore[arg-type]

    run(scene)


# ------------------------------------------------------------------ the command line
def options(*arguments: str) -> MembershipSettings:
    return membership_of(options_of(["--devices", "cpu:1", "--host-name", "a", *arguments]))


@pytest.mark.parametrize("text", ["0.0.0.0:1", "[::]:1", "8.8.8.8:1", "[2606:4700::1111]:1"])
def test_addresses_that_everybody_may_reach_need_a_word_more(text: str) -> None:
    with pytest.raises(BadInput, match="--listen-anywhere"):
        parse_listen(text, "a", anywhere=False)
    listen_at, told = parse_listen(text, "a", anywhere=True)
    assert listen_at == text
    assert told == ("a:1" if text.startswith(("0.", "[::]")) else text)


@pytest.mark.parametrize("text", ["127.0.0.1:9400", "10.1.2.3:1", "192.168.0.1:2", "[fd00::1]:3", "[::1]:4"])
def test_addresses_of_own_networks_are_taken_as_they_are(text: str) -> None:
    assert parse_listen(text, "a", anywhere=False) == (text, text)


@pytest.mark.parametrize(
    "text",
    ["", "9400", "host:9400", "10.0.0.1", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.256:1", "[10.0.0.1]x:1"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="is no IP address and port"):
        parse_listen(text, "a", anywhere=False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--cluster", "c"), "--cluster c is of no use without --etcd"),
        (("--listen", "127.0.0.1:1"), "of no use without --etcd"),
        (("--listen", "127.0.0.1:1", "--etcd", "http://h"), "needs --certs"),
        (("--etcd", "https://h"), "needs --certs"),
        (("--certs", "/x"), "--certs /x is of no use"),
        (("--certs", "/x", "--etcd", "http://h"), "--certs /x is of no use"),
        (("--listen-anywhere",), "--listen-anywhere is of no use"),
    ],
)
def test_options_that_need_each_other_say_so(arguments: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        options(*arguments)
    assert options().listen == ""


# ------------------------------------------------------------------ proxyd
@pytest.fixture
def etcd(folder: Path, certs: Path) -> Iterator[EtcdServer]:
    """That speaks TLS, and only with those who have a certificate of the cluster."""
    issue(certs, "etcd", ["127.0.0.1"])
    more = (
        "--cert-file", str(certs / "etcd.pem"), "--key-file", str(certs / "etcd.key"),
        "--trusted-ca-file", str(certs / "ca.pem"), "--client-cert-auth",
    )  # fmt: skip
    with running_etcd(folder, scheme="https", more=more) as server:
        yield server


def listening(etcd: EtcdServer, certs: Path, host: str, port: int) -> tuple[str, ...]:
    return ("--etcd", etcd.url, "--certs", str(certs), "--host-name", host, "--listen", f"127.0.0.1:{port}")


def test_proxyd_speaks_tls_1_3_with_etcd_and_hosts_and_nothing_less(
    folder: Path, certs: Path, etcd: EtcdServer
) -> None:
    port = free_port()

    def handshake(version: ssl.TLSVersion) -> str | None:
        context = ssl.create_default_context(cafile=str(certs / "ca.pem"))
        context.load_cert_chain(certs / "a.pem", certs / "a.key")
        context.minimum_version = context.maximum_version = version
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(("127.0.0.1", port), 10) as plain,
            context.wrap_socket(plain, server_hostname="b") as secure,
        ):
            assert secure.recv(1)
            return secure.version()

    with running_proxyd(folder / "b.sock", 1, listening(etcd, certs, "b", port)):
        assert handshake(ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
        with pytest.raises(OSError, match=r"EOF|alert"):
            handshake(ssl.TLSVersion.TLSv1_2)
        record = pb.HostRecord(name="b", address=f"127.0.0.1:{port}")
        assert asyncio.run(TlsPeers("a", load(certs, "a")).reach(record)) == Vote(True)


def test_proxyd_with_wrong_certificates_ends_with_one_sentence_and_never_listens(
    folder: Path, certs: Path, etcd: EtcdServer
) -> None:
    issue(certs, "d", days=1, now=NOW - timedelta(days=2))
    done = subprocess.run(
        [*module_command("recovery.proxyd"), "--devices", "cpu:1", "--socket", str(folder / "s"),
         *listening(etcd, certs, "d", free_port())],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    (sentence,) = done.stderr.strip().splitlines()
    assert "d.pem has expired on" in sentence


def test_proxyd_without_listen_has_no_socket_but_its_own(folder: Path) -> None:
    with running_proxyd(folder / "a.sock", 1) as proxyd:
        inodes = {os.readlink(file) for file in Path(f"/proc/{proxyd.pid}/fd").iterdir() if file.exists()}
        for table in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path(f"/proc/{proxyd.pid}/net/{table}").read_text().splitlines()[1:]:
                assert f"socket:[{line.split()[9]}]" not in inodes
        proxyd.process.send_signal(signal.SIGTERM)
