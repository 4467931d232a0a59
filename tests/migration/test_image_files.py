"""Images of workers on disk, what in them is changed, and what workers print that came back from them."""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from images_of_workers import RUNTIME, header, some_parts

from understudy.protos import control_pb2 as pb
from understudy.recovery.migration.process.open_files import FILES, let_written_files_grow
from understudy.recovery.migration.relay.orphan_output import OrphanOutput
from understudy.recovery.migration.transfer import moves
from understudy.recovery.migration.transfer.header import is_home
from understudy.recovery.migration.worker_state import WorkerState
from understudy.recovery.spanning.ranks.image_file import BadImage, ImageFile, read_parts


# ------------------------------------------------------------------ what comes
def written(path: Path, found: list[pb.WorkerPart]) -> ImageFile:
    file = ImageFile(path, "j", 1)
    try:
        for part in found:
            file.take(part)
        file.finish()
    finally:
        file.close()
    return file


def test_an_image_is_read_as_it_came_behind_a_header_of_its_own(tmp_path: Path) -> None:
    found = some_parts(tmp_path)
    file = written(tmp_path / "image", found)
    assert (file.bytes, file.log_bytes) == (5000 + 4096 + 300, 4096 + 300)
    other = header(move="f" * 32)
    assert list(read_parts(tmp_path / "image", other)) == [pb.WorkerPart(header=other), *found[1:]]


def spoil(found: list[pb.WorkerPart]) -> None:
    next(part for part in found if part.HasField("data")).data.data = b"other"


def swap(found: list[pb.WorkerPart]) -> None:
    found[1], found[2] = found[2], found[1]


def twice(found: list[pb.WorkerPart]) -> None:
    found.insert(1, found[0])


def after_the_end(found: list[pb.WorkerPart]) -> None:
    found.append(found[1])


def without_the_end(found: list[pb.WorkerPart]) -> None:
    found.pop()


def without_a_file(found: list[pb.WorkerPart]) -> None:
    del found[1:4]


def of_another(found: list[pb.WorkerPart]) -> None:
    found[0].header.CopyFrom(header(0, directory=f"{RUNTIME}/j/rank-0"))


def elsewhere(found: list[pb.WorkerPart]) -> None:
    found[0].header.directory = "/etc/j/rank-1"


def empty(found: list[pb.WorkerPart]) -> None:
    found.insert(1, pb.WorkerPart())


BAD: dict[Callable[[list[pb.WorkerPart]], None], str] = {
    spoil: "has not the content that it was sent with", swap: "its parts are not in order",
    twice: "its parts are not in order", after_the_end: "its parts are not in order",
    without_the_end: "a part of it is missing", without_a_file: "a part of it is missing",
    of_another: "it is of another rank", elsewhere: "is no directory of ours",
    empty: "its parts are not in order",
}  # fmt: skip


@pytest.mark.parametrize("damage", BAD, ids=lambda one: one.__name__)
def test_an_image_that_does_not_come_as_it_should_is_refused_and_leaves_no_file(
    tmp_path: Path, damage: Callable[[list[pb.WorkerPart]], None]
) -> None:
    found = some_parts(tmp_path)
    damage(found)
    with pytest.raises(BadImage, match=BAD[damage]):
        written(tmp_path / "image", found)
    assert not (tmp_path / "image").exists()


@pytest.mark.parametrize("cut", [3, 25, 60, -1])
def test_an_image_that_was_damaged_on_disk_is_never_read_to_its_end(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "image"
    written(path, some_parts(tmp_path))
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    found: list[pb.WorkerPart] = []
    with pytest.raises(BadImage):
        found.extend(read_parts(path, header()))
        if found[-1].WhichOneof("part") != "end":  # which whoever takes it in misses
            raise BadImage("cut between two parts")


# ------------------------------------------------------------------ open files
def entry(flags: int, size: int) -> bytes:
    """Of a regular file as CRIU has it, with fields that are unknown to us."""
    regular = (
        pb.CriuRegularFile(flags=flags, size=size).SerializeToString() + b"\x32\x04/out"
    )  # field 6: name
    return b"\x08\x01\x10\x05\x1a" + bytes([len(regular)]) + regular  # type REG, id 5, reg


def files_image(*entries: bytes) -> bytes:
    head = struct.pack("<II", 0x54564319, 0x56303138)
    return head + b"".join(struct.pack("<I", len(one)) + one for one in entries)


def entries_of(data: bytes) -> list[pb.CriuFile]:
    found, at = [], 8
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        found.append(pb.CriuFile.FromString(data[at + 4 : at + 4 + length]))
        at += 4 + length
    return found


def test_files_that_a_worker_writes_may_be_larger_when_it_comes_back(tmp_path: Path) -> None:
    pipe = b"\x08\x02\x10\x07"
    wanted = entry(os.O_RDONLY, 9), entry(os.O_WRONLY | os.O_APPEND, 9), entry(os.O_RDWR, 9), pipe
    (tmp_path / FILES).write_bytes(files_image(*wanted))
    assert let_written_files_grow(tmp_path) == 2
    data = (tmp_path / FILES).read_bytes()
    found = entries_of(data)
    assert [one.reg.HasField("size") for one in found] == [True, False, False, False]
    assert [one.reg.flags for one in found[:3]] == [os.O_RDONLY, os.O_WRONLY | os.O_APPEND, os.O_RDWR]
    assert data.count(b"/out") == 3 and data.count(pipe) == 1
    assert let_written_files_grow(tmp_path) == 0 and (tmp_path / FILES).read_bytes() == data


@pytest.mark.parametrize(
    "data", [b"", b"CRIU", files_image(entry(1, 2))[:-3], files_image(b"\xff\xff\xff"), b"x" * 40]
)
def test_an_image_of_open_files_that_makes_no_sense_is_an_error_and_stays_as_it_is(
    tmp_path: Path, data: bytes
) -> None:
    (tmp_path / FILES).write_bytes(data)
    with pytest.raises(OSError, match=FILES):
        let_written_files_grow(tmp_path)
    assert (tmp_path / FILES).read_bytes() == data


# ------------------------------------------------------------------ output
class OrphanedWorker:
    """What is needed of a worker whose relay is gone; its output comes as the test says."""

    def __init__(self, relay: Path, replies: list[pb.FollowReply]) -> None:
        self.header = header(orphaned=True)
        self.places = SimpleNamespace(relay=relay)
        self.replies, self.heard = replies, list[pb.FollowRequest]()
        self.state, self.status, self.problem = WorkerState.ENDED, 0, ""

    def hear(self, request: pb.FollowRequest) -> None:
        self.heard.append(request)

    async def tell(self, request: pb.FollowRequest) -> AsyncIterator[pb.FollowReply]:
        for reply in self.replies:
            yield reply


def said(text: bytes, offset: int) -> pb.FollowReply:
    return pb.FollowReply(name="stdout", offset=offset, data=text)


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "relay"
    made.mkdir()
    (made / "stdout").write_bytes(b"printed before")
    (made / "stderr").write_bytes(b"")
    yield made


def test_output_goes_to_files_and_a_proxyd_that_follows_goes_on_where_it_was(
    tmp_path: Path, relay: Path
) -> None:
    worker = OrphanedWorker(relay, [said(b"one\n", 14), said(b"two\n", 18)])
    first = OrphanOutput(cast(Any, worker), tmp_path / "out")
    first.prepare()
    asyncio.run(first.run())
    (path,) = (tmp_path / "out").glob("j.rank-1.*.stdout")
    assert path.read_text() == "one\ntwo\n" and not path.stat().st_mode & 0o077
    assert [one.offset for one in worker.heard[0].positions] == [14, 0]
    assert worker.heard[-1].positions[0].offset == 22
    successor = OrphanedWorker(
        relay, [said(b"two\n", 18), said(b"three\n", 22)]
    )  # what comes twice is there once
    asyncio.run(OrphanOutput(cast(Any, successor), tmp_path / "out").run())
    assert path.read_text() == "one\ntwo\nthree\n"
    assert [one.offset for one in successor.heard[0].positions] == [22, 0]


def test_a_worker_whose_relay_is_gone_is_at_home_nowhere() -> None:
    assert is_home(header(), "b") and not is_home(header(), "c")
    assert not is_home(header(orphaned=True), "b")


class FromA:
    """A call of host a."""

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_common_name": [b"a"]}


async def received(made: moves.Moves, folder: Path, **more: Any) -> pb.MoveReply:
    async def stream() -> AsyncIterator[pb.WorkerPart]:
        for part in some_parts(folder, header(image_bytes=5000, log_bytes=4396, **more)):
            yield part

    return await made.ReceiveWorker(stream(), FromA())


def test_a_worker_whose_relay_has_ended_comes_back_to_the_host_where_that_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was on another host when that was lost; its directories are those of this host's own proxyd."""
    monkeypatch.setattr(moves, "check_fit", lambda *_: None)
    here: Any = SimpleNamespace(host="b", criu=None)
    own = Path(RUNTIME)
    own.mkdir()

    async def come_back() -> None:
        made = moves.Moves(here, own, cast(Any, None), images=tmp_path)
        relay = Path(header().relay)
        relay.mkdir(parents=True)
        assert "cannot be made: File exists" in (await received(made, tmp_path, orphaned=True)).error
        relay.rmdir()  # it has ended
        assert "no worker is away" in (await received(made, tmp_path)).error
        assert "is another one's" in (await received(made, tmp_path, home="c")).error
        reply = await received(made, tmp_path, orphaned=True)
        assert (reply.error, reply.state) == ("", "received")
        assert Path(header().directory, "control").exists()
        dropped = await made.AbandonMove(pb.MoveRequest(move=header().move), FromA())
        assert dropped.error == "" and not Path(header().directory).exists() and own.is_dir()
        await made.close()

    try:
        asyncio.run(come_back())
    finally:
        shutil.rmtree(own)
