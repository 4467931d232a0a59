"""Whether a rank could go to another host: from what hosts tell of themselves, one sentence if it cannot."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.errors import BadInput, Refused
from understudy.recovery.base.timing import Timing
from understudy.recovery.daemon.service import DaemonService
from understudy.recovery.migration.places import Place, parse_place
from understudy.recovery.migration.transfer.compatible import may_pass, no_room, refusal, why_not


def record(name: str = "node-1", state: str = "idle", **changed: Any) -> pb.HostRecord:
    node = pb.Node(
        torch_version=changed.pop("torch", "2.13.0+cpu"),
        devices=[
            pb.Device(spec="cpu:0", driver=changed.pop("driver", "cpu"), state="leased"),
            pb.Device(spec="cpu:1", driver="cpu", state=state),
        ],
        capability=changed.pop("capability", pb.Capability(driver="cpu")),
    )
    fields: dict[str, Any] = {
        "kernel": "Linux 6.18.0 x86_64", "processor": "a processor", "criu": "4.1.1",
        "processor_features": ["avx", "avx2", "fma"],
    }  # fmt: skip
    return pb.HostRecord(name=name, node=node, **(fields | changed))


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "driver": ({"driver": "cuda"}, "node-2 has devices of the kind cpu, cuda, and node-1 has cpu"),
    "PyTorch": ({"torch": "2.12.1+cpu"}, "node-2 has PyTorch 2.12.1+cpu, and node-1 has 2.13.0+cpu"),
    "GPU": (
        {"capability": pb.Capability(driver="cuda", device_name="X", major=9)},
        "node-2 has GPUs X, 9.0, and node-1 has none",
    ),
    "architecture": (
        {"kernel": "Linux 6.18.0 aarch64"},
        "node-2 has a processor of the architecture aarch64, and node-1 has x86_64",
    ),
    "CRIU": ({"criu": "4.2"}, "node-2 has CRIU 4.2, and node-1 has 4.1"),
    "no CRIU": ({"criu": ""}, "node-2 has CRIU none, and node-1 has 4.1"),
    "a feature less": (
        {"processor_features": ["avx", "fma"], "processor": "an old one"},
        "other bits on node-2 (an old one) than on node-1 (a processor): only node-1 has avx2",
    ),
    "features more": (
        {"processor_features": ["avx", "avx2", "fma", "amx1", "amx2", "amx3", "amx4", "amx5"]},
        ": only node-2 has amx1, amx2, amx3, amx4 and 1 more",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_the_first_difference_is_named_with_both_values(what: str) -> None:
    changed, sentence = DIFFERENT[what]
    assert sentence in why_not(record(), record("node-2", **changed))


def test_hosts_that_differ_in_nothing_that_counts_fit() -> None:
    assert why_not(record(), record("node-2", criu="4.1.9", kernel="Linux 6.1.0 x86_64", address="b")) == ""


def test_of_several_differences_the_first_is_told() -> None:
    assert "PyTorch" in why_not(record(), record("node-2", criu="", torch="2.12.1"))


def listing(*standings: pb.HostStanding) -> pb.HostList:
    here = pb.HostStanding(record=record(), state="alive", here=True)
    return pb.HostList(membership=pb.Membership(host="node-1"), hosts=[here, *standings])


def test_a_place_on_another_host_is_refused_for_the_first_thing_that_is_wrong() -> None:
    fine = pb.HostStanding(record=record("node-2"), state="alive")
    full = pb.HostStanding(record=record("node-3", "drained"), state="alive")
    gone = pb.HostStanding(record=record("node-4"), state="lost", why="2 of 2 do not reach it")
    odd = pb.HostStanding(record=record("node-5", criu=""), state="alive")
    hosts = listing(fine, full, gone, odd)
    said = {
        "node-2": "",
        "node-2:cpu:1": "",
        "node-2:cpu:0": "cpu:0 of node-2 is leased, not idle",
        "node-2:cpu:9": "node-2 has no device cpu:9; it has: cpu:0, cpu:1",
        "node-3": "node-3 has no free device",
        "node-4:cpu:1": "node-4 is lost: 2 of 2 do not reach it",
        "node-5": "node-5 has CRIU none, and node-1 has 4.1",
        "node-9": "there is no host node-9; known are: node-1, node-2, node-3, node-4, node-5",
    }
    assert {text: refusal(parse_place(text), hosts) for text in said} == said
    passing = {"node-2", "node-2:cpu:1", "node-2:cpu:0", "node-3"}  # the first two are no refusals
    assert {text for text in said if may_pass(parse_place(text), hosts)} == passing
    by_itself = pb.HostList(membership=pb.Membership(host="node-1"), hosts=[fine])
    assert "this host (node-1) is not registered" in refusal(parse_place("node-2"), by_itself)
    assert not may_pass(parse_place("node-2"), by_itself)
    assert no_room(record("node-2"), "cpu:1") == ""


@pytest.mark.parametrize(
    ("text", "place"),
    [("cpu:0", Place("", "cpu:0")), ("cuda:12", Place("", "cuda:12")), ("node-2", Place("node-2", "")),
     ("node-2:cpu:1", Place("node-2", "cpu:1")), ("a.b.c:cuda:0", Place("a.b.c", "cuda:0"))],
)  # fmt: skip
def test_a_place_is_a_device_a_host_or_both(text: str, place: Place) -> None:
    assert parse_place(text) == place
    assert str(place) == text


@pytest.mark.parametrize(
    "text",
    ["", ":", "cpu:", "cpu:-1", "cpu:01", "cpu:99999", "tpu:0", "node:", ":cpu:0", "node:cpu", "node:cpu:x",
     "a b", "a/b:cpu:0", "node:cpu:0:1", "node:cpu:0\n", "\x1b[31mnode", "x" * 200],
)  # fmt: skip
def test_what_is_no_place_is_refused_in_one_printable_sentence(text: str) -> None:
    with pytest.raises(BadInput, match="is no place: write a device as cpu:1") as refused:
        parse_place(text)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 300


def test_an_order_waits_for_news_of_a_device_that_a_rank_has_just_left_and_of_no_other() -> None:
    """What a host tells of its devices is up to a second old."""
    left = record("node-2")
    for device in left.node.devices:
        device.state = "idle"
    looks = [record("node-2"), record("node-2"), left]
    looked = 0

    class News:
        here = "node-1"

        async def listing(self) -> pb.HostList:
            nonlocal looked
            looked += 1
            newest = looks[min(looked, len(looks)) - 1]
            return listing(pb.HostStanding(record=newest, state="alive"))

    def asked(timing: Timing) -> DaemonService:
        nobody: Any = None
        return DaemonService(nobody, nobody, cast(Any, News()), nobody, timing)

    waiting = asked(Timing(place_again_s=0.0))
    assert asyncio.run(waiting._place("node-2:cpu:0")) == parse_place("node-2:cpu:0") and looked == 3
    looked = 0
    with pytest.raises(Refused, match="there is no host node-9"):
        asyncio.run(waiting._place("node-9"))
    assert looked == 1
    looked = 0
    with pytest.raises(Refused, match="cpu:0 of node-2 is leased, not idle"):
        asyncio.run(asked(Timing(place_within_s=-1.0))._place("node-2:cpu:0"))
