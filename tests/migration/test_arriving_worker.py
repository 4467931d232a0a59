"""What another host sends is checked before it is believed: no file outside, none twice, none damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from understudy.protos import control_pb2 as pb
from understudy.recovery.machine.criu import Criu
from understudy.recovery.membership.this_host import Machine
from understudy.recovery.migration.transfer import header as header_module
from understudy.recovery.migration.transfer.delivery import Delivery
from understudy.recovery.migration.transfer.header import Here, Refusal, check_fit, check_form
from understudy.recovery.migration.transfer.stream import Checksum, StreamPart, extents, parts

RUNTIME = f"understudy-{os.getuid()}-12-345-abcdefgh"


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As shared memory."""
    folder = tmp_path / "shm"
    (folder / RUNTIME).mkdir(parents=True)
    monkeypatch.setattr(header_module, "SHARED_MEMORY", folder)
    return folder


def a_header(memory: Path, **changes: object) -> pb.WorkerHeader:
    known: dict[str, object] = {
        "version": 1, "move": "0" * 32, "job": "j", "rank": 3, "world": 4, "home": "a", "worker": 2,
        "pids": [2, 5], "directory": f"{memory}/{RUNTIME}/j/rank-3-1", "image_bytes": 1 << 20,
        "log_bytes": 1 << 20, "relay": f"{memory}/{RUNTIME}/r.01234567/rabc_1",
        "working_directory": str(memory), "program": "/bin/sh", "kernel": "Linux 6.1.0 x86_64",
        "processor_features": ["avx2"], "torch_version": "2.13.0", "criu_version": "4.1",
    }  # fmt: skip
    return pb.WorkerHeader(**(known | changes))


def test_a_worker_goes_only_where_directories_of_ours_are(memory: Path) -> None:
    assert check_form(a_header(memory)).log == memory / RUNTIME / "j" / "rank-3-1"
    directories = [
        "", "/etc", f"{memory}/{RUNTIME}/j/../../rank-3", f"{memory}/{RUNTIME}/j/rank-3/x",
        f"{memory}/x/j/rank-3", f"{memory}/{RUNTIME}/j/rank-3\n",
        f"{memory}/{RUNTIME}/k/rank-3", f"{memory}/{RUNTIME}/j/rank-4", f"{memory}//{RUNTIME}/j/rank-3",
        f"{memory}/understudy-{os.getuid() + 1}-12-345-abcdefgh/j/rank-3",
        f"{memory}/understudy-{os.getuid()}-12-345-another/j/rank-3",
    ]  # fmt: skip
    for directory in directories:
        with pytest.raises(Refusal):
            check_form(a_header(memory, directory=directory))
    for relay in ("/tmp/r", f"{memory}/{RUNTIME}/r.01234567", f"{memory}/{RUNTIME}/r.01234567/../j"):
        with pytest.raises(Refusal):
            check_form(a_header(memory, relay=relay))


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2}, {"move": "../x"}, {"job": "j/k"}, {"rank": 4}, {"rank": -1}, {"world": 0},
        {"home": "-a"}, {"worker": 7}, {"pids": [1, 2]}, {"stopped": [9]}, {"image_bytes": 1 << 60},
        {"pids": [2, 1 << 23]}, {"threads": -1},
    ],
    ids=str,
)  # fmt: skip
def test_what_makes_no_sense_is_refused(change: dict[str, object], memory: Path) -> None:
    with pytest.raises(Refusal):
        check_form(a_header(memory, **change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"criu_version": "4.2"}, "dumped by CRIU 4.2"),
        ({"torch_version": "2.12.1"}, "PyTorch 2.12.1, and here is 2.13.0"),
        ({"torch_version": "2.13.0+cu128"}, ""),
        ({"kernel": "Linux 6.2.0 x86_64"}, "an older one, 6.1.9"),
        ({"kernel": "Linux 5.10 x86_64"}, ""),
        ({"kernel": "Linux 6.1.0 aarch64"}, "here is Linux 6.1.9 x86_64"),
        ({"kernel": ""}, "an unknown kernel"),
        ({"processor_features": ["avx2", "avx512f"]}, "(Xeon) lacks avx512f"),
        ({"working_directory": "/no/such"}, "/no/such is not here"),
        ({"program": "/no/python"}, "/no/python is not here"),
        ({"program": "x" * 5000}, "makes no sense"),
    ],
)
def test_a_host_says_what_it_lacks(
    change: dict[str, object], words: str, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header_module, "trouble_of_machine", lambda _: "")
    machine = Machine("boot", "Linux 6.1.9 x86_64", "Xeon", ("avx2", "fma"))
    here = Here("b", machine, "2.13.0", Criu(Path("/criu"), "PATH", (4, 1, 1)))
    if not words:
        return check_fit(a_header(memory, **change), here)
    with pytest.raises(Refusal) as refusal:
        check_fit(a_header(memory, **change), here)
    assert words in str(refusal.value)
    return None


# ------------------------------------------------------------------ files
@pytest.fixture
def source(tmp_path: Path) -> list[StreamPart]:
    """An image, and a log with holes."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "pages-1.img").write_bytes(os.urandom(3 << 20))
    with open(folder / "segments", "wb") as file:
        file.truncate(64 << 20)
        for offset in (0, 9 << 20, (64 << 20) - 5):
            file.seek(offset)
            file.write(b"there")
    (folder / "empty").touch()
    kinds = {"pages-1.img": "image", "segments": "log", "empty": "log"}
    return [StreamPart(kind, folder / name) for name, kind in kinds.items()]


def a_delivery(memory: Path, tmp_path: Path, *, at_home: bool = False, log_bytes: int = 1 << 20) -> Delivery:
    header = a_header(memory, image_bytes=3 << 20, log_bytes=log_bytes)
    images = tmp_path / "images"
    images.mkdir()
    delivery = Delivery(header, check_form(header), images, at_home)
    delivery.begin()
    return delivery


def test_what_arrives_is_what_was_sent_and_holes_stay_holes(
    memory: Path, tmp_path: Path, source: list[StreamPart]
) -> None:
    delivery = a_delivery(memory, tmp_path)
    _, *sent = parts(delivery.header, source)
    for part in sent:
        delivery.take(part)
    assert delivery.complete
    for packed in source:
        folder = delivery.images if packed.kind == "image" else delivery.places.log
        assert (folder / packed.path.name).read_bytes() == packed.path.read_bytes()
        assert (folder / packed.path.name).stat().st_mode == packed.path.stat().st_mode
    assert (delivery.places.log / "segments").stat().st_blocks * 512 < 1 << 20
    delivery.discard()
    assert not delivery.images.exists()
    assert list((memory / RUNTIME).iterdir()) == []


def test_zeros_of_a_log_do_not_travel_and_its_memory_is_reserved_all_the_same(
    memory: Path, tmp_path: Path
) -> None:
    control = tmp_path / "control"
    control.write_bytes(bytes(3 << 20) + b"orders" + bytes((1 << 20) - 6))
    delivery = a_delivery(memory, tmp_path, log_bytes=4 << 20)
    _, *sent = parts(delivery.header, [StreamPart("log", control)])
    for part in sent:
        delivery.take(part)
    arrived = delivery.places.log / "control"
    assert delivery.complete and delivery.bytes == 1 << 20
    assert arrived.read_bytes() == control.read_bytes()
    assert arrived.stat().st_blocks * 512 >= 4 << 20
    delivery.discard()


def test_extents_of_a_file_are_where_it_has_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for size in (0, 1, 10 << 20):
        with open(path, "wb") as file:
            file.truncate(size)
        with open(path, "rb") as file:
            assert list(extents(file.fileno(), size)) == []


def file(name: str, kind: str = "log", size: int = 8, *, reserved: bool = False) -> pb.WorkerPart:
    entry = pb.WorkerFile(kind=kind, name=name, bytes=size, mode=0o600, reserved=reserved)
    return pb.WorkerPart(file=entry)


def data(content: bytes, offset: int = 0) -> pb.WorkerPart:
    return pb.WorkerPart(data=pb.WorkerData(offset=offset, data=content))


def file_end(content: bytes = b"", offset: int = 0) -> pb.WorkerPart:
    checksum = Checksum()
    if content:
        checksum.add(offset, content)
    return pb.WorkerPart(file_end=pb.WorkerFileEnd(checksum=checksum.value))


def end(files: int, size: int) -> pb.WorkerPart:
    return pb.WorkerPart(end=pb.WorkerEnd(files=files, bytes=size))


@pytest.mark.parametrize(
    ("arriving", "words"),
    [
        ([file("../x")], "no place here"),
        ([file("a/b")], "no place here"),
        ([file("")], "no place here"),
        ([file(".x")], "no place here"),
        ([file("x", "other")], "no place here"),
        ([file("s", "output")], "no place here"),
        ([file("x"), file_end(), file("x")], "twice"),
        ([file("x", size=1 << 60)], "too large"),
        ([data(b"x")], "not in order"),
        ([file("x"), file("y")], "not in order"),
        ([file_end()], "not in order"),
        ([pb.WorkerPart()], "not in order"),
        ([pb.WorkerPart(header=pb.WorkerHeader())], "not in order"),
        ([file("x"), data(b"123456789")], "more of x comes"),
        ([file("x"), data(b"1", 8)], "more of x comes"),
        ([file("x", size=2 << 20), data(bytes(1 << 20)), data(b"1", 1 << 20)], "more of x comes"),
        ([file("x", size=2 << 20, reserved=True)], "reserves more"),
        ([file("x", "image", reserved=True)], "reserves more"),
        ([file("x", size=1 << 20, reserved=True), file_end(), file("y"), data(b"1")], "more of y comes"),
        ([file("x"), data(b"12", 2), data(b"1", 1)], "not in order"),
        ([file("x"), data(b"12", 2), file_end(b"12", 3)], "not the content"),
        ([file("x"), data(b"12", 2), file_end(b"13", 2)], "not the content"),
        ([file("x"), file_end(), end(2, 0)], "is missing"),
        ([file("x"), file_end(), end(1, 1)], "is missing"),
        ([file("x"), file_end(), end(1, 0), file("y")], "not in order"),
    ],
)
def test_parts_that_are_not_right_are_refused_and_nothing_stays(
    arriving: list[pb.WorkerPart], words: str, memory: Path, tmp_path: Path
) -> None:
    delivery = a_delivery(memory, tmp_path)
    with pytest.raises(Refusal, match=words):
        for part in arriving:
            delivery.take(part)
    delivery.discard()
    assert not delivery.images.exists()
    assert list((memory / RUNTIME).iterdir()) == []


def test_a_thread_that_comes_after_the_end_makes_and_takes_nothing(memory: Path, tmp_path: Path) -> None:
    """It was left behind by a request that was cancelled."""
    header = a_header(memory)
    images = tmp_path / "images"
    images.mkdir()
    delivery = Delivery(header, check_form(header), images, at_home=False)
    delivery.discard()
    images.mkdir()
    with pytest.raises(Refusal, match="not awaited any more"):
        delivery.begin()
    with pytest.raises(Refusal, match="not awaited any more"):
        delivery.take(pb.WorkerPart(file=pb.WorkerFile(kind="image", name="a")))
    assert list((memory / RUNTIME).iterdir()) == [] == list(images.iterdir())


def test_what_is_there_already_is_neither_overwritten_nor_removed(memory: Path, tmp_path: Path) -> None:
    there = memory / RUNTIME / "j" / "rank-3-1"
    there.mkdir(parents=True)
    (there / "control").touch()
    header = a_header(memory)
    (tmp_path / "images").mkdir()
    delivery = Delivery(header, check_form(header), tmp_path / "images", at_home=False)
    with pytest.raises(Refusal, match="File exists"):
        delivery.begin()
    delivery.discard()
    assert (there / "control").exists()


def test_output_that_comes_home_goes_behind_what_is_there_and_is_there_once(
    memory: Path, tmp_path: Path
) -> None:
    relay = memory / RUNTIME / "r.01234567" / "rabc_1"
    relay.mkdir(parents=True)
    (relay / "stdout").write_bytes(b"0123")
    delivery = a_delivery(memory, tmp_path, at_home=True)
    with pytest.raises(Refusal, match="missing"):
        for part in (file("stdout", "output"), data(b"56", 5)):
            delivery.take(part)
    delivery.discard()
    delivery = a_delivery(memory, tmp_path, at_home=True)
    for part in (file("stdout", "output"), data(b"234567", 2), file_end(b"234567", 2), end(1, 6)):
        delivery.take(part)
    delivery.discard()
    assert (relay / "stdout").read_bytes() == b"01234567"
