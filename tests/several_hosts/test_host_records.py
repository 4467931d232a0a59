"""What hosts read of each other: anybody who reaches etcd may have written it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.errors import BadInput
from understudy.recovery.config.cluster_options import default_host, parse_name
from understudy.recovery.membership.records import LARGEST, BadRecord, Keys, read, written
from understudy.recovery.membership.settings import is_name
from understudy.recovery.membership.this_host import this_machine


def some_record() -> pb.HostRecord:
    device = pb.Device(spec="cpu:0", state="idle", rank=-1)
    return pb.HostRecord(
        version=1, name="a", processor_features=["avx2"], node=pb.Node(devices=[device], spares=1),
        ranks=[pb.HostRank(job="j", rank=1, world=2)],
    )  # fmt: skip


def test_record_survives_being_written_and_read() -> None:
    assert read(written(some_record()), pb.HostRecord) == some_record()


def test_record_of_a_newer_proxyd_with_more_fields_is_read() -> None:
    plain = json.loads(written(some_record())) | {"colour": "blue"}
    assert read(json.dumps(plain).encode(), pb.HostRecord) == some_record()


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "not JSON"),
        (b'"' + b"a" * 100, "not JSON"),
        (b'{"version": "one"}', "not JSON"),
        (b'{"version": 1, "node": 7}', "not JSON"),
        (b'{"version": 1, "node": {"pid": 99999999999999}}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"version": 1, "name": ' + b"[" * 100_000, "not JSON"),
        (b"{}", "version 0"),
        (b'{"version": 2}', "version 2"),
        (b"{" + b" " * LARGEST, f"more than {LARGEST}"),
        (rb'{"version": 1, "kernel": "\u001b[2J"}', "cannot be shown"),
        (rb'{"version": 1, "processorFeatures": ["fine", "a\nb"]}', "cannot be shown"),
        (rb'{"version": 1, "node": {"devices": [{"note": "\u0007"}]}}', "cannot be shown"),
    ],
)
def test_record_that_makes_no_sense_is_refused_with_the_reason(raw: bytes, why: str) -> None:
    with pytest.raises(BadRecord, match=why):
        read(raw, pb.HostRecord)


def test_keys_of_others_below_the_prefix_are_nobodys() -> None:
    keys = Keys("c")
    for key in (keys.record("a"), keys.alive("a"), keys.absent("a")):
        assert keys.split(key) == ("a", key.rsplit("/", 1)[1])
    for rest in ("", "a", "a/", "/record", "a/record/x", "a/other", "a b/record", "../record", "\x1b/record"):
        assert keys.split(keys.hosts + rest) == ("", "")
    assert keys.split("elsewhere/a/record") == ("", "")


def test_names_are_plain_and_this_machines_is_one() -> None:
    assert is_name(default_host())
    assert parse_name("node-07.rack_b", "--host-name") == "node-07.rack_b"
    for text in ("", "-a", "a/b", "a b", "a" * 64, "ä", "a\n"):
        with pytest.raises(BadInput, match=r"--host-name .* is no name"):
            parse_name(text, "--host-name")


def test_a_machine_tells_what_chooses_its_kernels_on_either_processor(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(
        "model name\t: Xeon\nflags\t\t: fpu avx2 fma mmx avx512_bf16 aes\nflags : x\n"
    )
    machine = this_machine(tmp_path)
    assert (machine.processor, machine.features) == ("Xeon", ("avx2", "avx512_bf16", "fma"))
    (tmp_path / "cpuinfo").write_text("processor : 0\nFeatures : fp asimd sve crc32 i8mm\n")
    assert this_machine(tmp_path).features == ("asimd", "i8mm", "sve")
    assert this_machine(tmp_path / "none").features == ()
    assert this_machine().boot_id and this_machine().features
