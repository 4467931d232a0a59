"""Pings over the data network: who answers whom, what hostile ones get, and hosts whose links are cut."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import tempfile
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from etcd_server import free_port, running_etcd
from namespaces import network
from proxied import until
from running_proxyd import running_proxyd
from test_several_hosts import PORT, seen_by, states
from training_run import installed

from understudy.recovery.base.control import pb, rpc
from understudy.recovery.base.errors import BadInput
from understudy.recovery.membership.network.certificates import Credentials, issue, load, make_authority
from understudy.recovery.membership.network.data_probe import MOST_AT_ONCE, MOST_HOSTS, DataProbe, carrier_of
from understudy.recovery.membership.network.endpoint import HostsService, listen
from understudy.recovery.membership.network.links import Links
from understudy.recovery.planning.link_judgement import Seen, judge_links

NOW = datetime.now(UTC)


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    directory = tmp_path / "certs"
    make_authority(directory, "tests")
    for host in "abc":
        issue(directory, host)
    return directory


class Host:
    """That answers pings, and tells others whom it reaches."""

    def __init__(self, credentials: Credentials, known: dict[str, pb.HostRecord]) -> None:
        name = credentials.host
        self._credentials = credentials
        self.links = Links(known.get, credentials)
        self.probe = DataProbe(name, "127.0.0.1", credentials, known.get, self.links)
        self.record = pb.HostRecord(name=name, address=f"127.0.0.1:{free_port()}", data_address="127.0.0.1")
        known[name] = self.record

    async def __aenter__(self) -> Host:
        await self.probe.start()
        self.record.data_port = self.probe.port
        hosts = HostsService("tests", lambda: self.record, None)  # type: ignore[arg-type]
        self._server = await listen(self.record.address, self._credentials, hosts, [self.probe.add_to])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.probe.close()
        await self.links.close()
        await self._server.stop(0)


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await scene()

    asyncio.run(main())


def test_hosts_tell_each_other_whom_they_reach(certs: Path) -> None:
    known: dict[str, pb.HostRecord] = {}

    async def scene() -> None:
        async with Host(load(certs, "a"), known) as a, Host(load(certs, "b"), known):
            both = {"a": Seen({"b": True}, "up"), "b": Seen({"a": True}, "up")}
            assert await a.probe.probe(["a", "b"]) == both
            assert await a.probe.probe(["a", "b", "unknown"]) == {
                "a": Seen({"b": True, "unknown": None}, "up"), "b": Seen({"a": True, "unknown": None}, "up"),
            }  # fmt: skip

    run(scene)


def test_host_that_refuses_or_is_another_says_neither_and_one_without_an_answer_is_not_reached(
    certs: Path,
) -> None:
    known: dict[str, pb.HostRecord] = {}

    async def scene() -> None:
        async with Host(load(certs, "a"), known) as a, Host(load(certs, "b"), known) as b:
            port = b.record.data_port
            b.record.data_port = free_port()
            assert (await a.probe.look(["b"])).reaches == {"b": None}, "refused"
            known["c"] = pb.HostRecord(name="c", data_address="127.0.0.1", data_port=port)
            assert (await a.probe.look(["c"])).reaches == {"c": None}, "b answers in place of c"
            known["c"] = pb.HostRecord(name="c", data_address="192.0.2.1", data_port=0)
            assert (await a.probe.look(["c"])).reaches == {"c": None}, "it has none"
            silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
            b.record.data_port = silent.sockets[0].getsockname()[1]
            assert (await a.probe.look(["b"])).reaches == {"b": False}, "no answer"
            silent.close()

    run(scene)


@pytest.mark.parametrize("wrong", ["another authority's", "expired"])
def test_whoever_shows_a_wrong_certificate_is_not_answered(wrong: str, certs: Path, tmp_path: Path) -> None:
    known: dict[str, pb.HostRecord] = {}
    bad = tmp_path / "bad"
    now = NOW - timedelta(days=400)
    make_authority(bad, "others", now=NOW - timedelta(days=500))
    issue(bad, "b", now=now if wrong == "expired" else None)
    authority = certs if wrong == "expired" else bad
    pem = (bad / "b.pem").read_bytes()
    credentials = Credentials("b", (authority / "ca.pem").read_bytes(), pem, b"", NOW, bad)

    async def scene() -> None:
        async with Host(load(certs, "a"), known) as a:
            other = DataProbe("b", "127.0.0.1", credentials, known.get, Links(known.get, None))
            assert (await other.look(["a"])).reaches == {"a": None}
            await other.start()
            known["b"] = pb.HostRecord(name="b", data_address="127.0.0.1", data_port=other.port)
            assert (await a.probe.look(["b"])).reaches == {"b": None}
            await other.close()

    run(scene)


def test_hostile_pings_harm_nobody(certs: Path) -> None:
    known: dict[str, pb.HostRecord] = {}

    async def scene() -> None:
        async with Host(load(certs, "a"), known) as a, Host(load(certs, "b"), known) as b:
            context = a.probe._context(ssl.PROTOCOL_TLS_CLIENT)
            place = ("127.0.0.1", b.record.data_port)
            for line in (b"\n", b"hello\n", b"x" * 100_000, b"\0\xff\n"):
                reader, writer = await asyncio.open_connection(*place, ssl=context, server_hostname="b")
                writer.write(line)
                with contextlib.suppress(OSError):
                    assert await reader.read() == b""
                writer.close()
            plain, writer = await asyncio.open_connection(*place)
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            with contextlib.suppress(OSError):
                await plain.read()
            writer.close()
            silent = [
                await asyncio.open_connection(*place, ssl=context, server_hostname="b")
                for _ in range(MOST_AT_ONCE)
            ]
            votes = set()
            while True not in votes:  # the silent ones are let go in time
                votes |= set((await a.probe.look(["b"])).reaches.values())
            for _, one in silent:
                one.close()
            with pytest.raises(grpc.RpcError, match="names of at most"):
                stub = rpc.DataProbeStub(a.links.to("b"))
                await stub.TryReach(pb.TryReachRequest(hosts=["a"] * (MOST_HOSTS + 1)))
            with pytest.raises(grpc.RpcError, match="names of at most"):
                await stub.TryReach(pb.TryReachRequest(hosts=["../a"]))

    run(scene)


class Liar(rpc.DataProbeServicer):  # type: ignore[misc]
    """Tells of hosts that nobody asked for, and in words that nobody knows."""

    async def TryReach(self, request: Any, context: Any) -> pb.TryReachReply:
        pairs = [("a", "perhaps"), ("z", "not reached"), ("b", "not reached")]
        reaches = [pb.DataReach(host=host, answer=answer) for host, answer in pairs]
        return pb.TryReachReply(carrier="\x1b[31m", reaches=reaches)


def test_what_a_host_tells_of_others_than_was_asked_is_left_out(certs: Path) -> None:
    known: dict[str, pb.HostRecord] = {}

    async def scene() -> None:
        async with Host(load(certs, "a"), known) as a:
            known["b"] = pb.HostRecord(name="b", address=f"127.0.0.1:{free_port()}")
            hosts = HostsService("tests", lambda: known["b"], None)  # type: ignore[arg-type]
            add = [lambda server: rpc.add_DataProbeServicer_to_server(Liar(), server)]
            server = await listen(known["b"].address, load(certs, "b"), hosts, add)
            assert (await a.probe.probe(["a", "b"]))["b"] == Seen({"a": None}, "")
            await server.stop(0)

    run(scene)


def test_address_that_cannot_be_had_is_told(certs: Path) -> None:
    async def scene() -> None:
        known: dict[str, pb.HostRecord] = {}
        probe = DataProbe("a", "192.0.2.1", load(certs, "a"), known.get, Links(known.get, None))
        with pytest.raises(BadInput, match=r"cannot listen at --data-address 192\.0\.2\.1"):
            await probe.start()

    run(scene)


def test_carrier_is_what_the_kernel_tells(tmp_path: Path) -> None:
    def interface(name: str, **files: str) -> str:
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_text(content + "\n")
        return carrier_of(name, tmp_path)

    assert interface("a", operstate="up", carrier="1") == "up"
    assert interface("b", operstate="unknown", carrier="1") == "up"
    assert interface("c", operstate="down", carrier="0") == "down"
    assert interface("d", operstate="lowerlayerdown", carrier="0") == "down"
    assert interface("e", operstate="up", carrier="0") == "down"
    assert carrier_of("none", tmp_path) == "" and carrier_of("", tmp_path) == "down"


# ------------------------------------------------------------------ three hosts
@pytest.mark.drawn(2)
def test_host_that_is_cut_off_from_data_alone_is_found_within_two_seconds() -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="understudy-test-", dir="/tmp")))
        net = stack.enter_context(network("a", "b", "c", data=True))
        certs = folder / "certs"
        make_authority(certs, "tests")
        for host in ("a", "b", "c", "test"):
            issue(certs, host)
        etcd = stack.enter_context(running_etcd(folder, net.gateway))
        sockets = []
        for host in "abc":
            options = (
                "--etcd", etcd.url, "--host-name", host, "--certs", str(certs),
                "--listen", f"{net.addresses[host]}:{PORT}", "--data-address", net.data_addresses[host],
            )  # fmt: skip
            program = [*net.inside(host), *installed("proxyd")]
            one = running_proxyd(folder / f"{host}.sock", 1, options, folder / host, program=program)
            sockets.append(stack.enter_context(one).socket)
        all_alive = dict.fromkeys("abc", "alive")
        until(lambda: all(states(socket) == all_alive for socket in sockets), "all see all", 30)
        known = {name: host.record for name, host in seen_by(sockets[0]).items()}
        assert {name: record.data_address for name, record in known.items()} == net.data_addresses

        async def scene() -> None:
            links = Links(known.get, load(certs, "test"))
            probe = DataProbe("test", "127.0.0.1", load(certs, "test"), known.get, links)

            async def cut_off(expected: set[str]) -> Any:
                begin = asyncio.get_running_loop().time()
                matrix = await probe.probe(["a", "b", "c"])
                assert asyncio.get_running_loop().time() - begin < 4  # PROBE_S, on a machine that is busy
                assert set(matrix) == set("abc"), "the other network is as it was"
                assert judge_links(matrix) == expected
                return matrix

            await cut_off(set())
            net.cut_data("b")
            matrix = await cut_off({"b"})
            assert matrix["a"] == Seen({"b": False, "c": True}, "up")
            assert matrix["b"] == Seen({"a": False, "c": False}, "up")
            net.heal_data("b")
            await cut_off(set())
            net.unplug_data("c")
            matrix = await cut_off({"c"})
            assert matrix["c"].carrier == "down"
            net.plug_data("c")
            await links.close()

        asyncio.run(scene())
        assert all(states(socket) == all_alive for socket in sockets)
