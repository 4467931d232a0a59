"""State that goes from one device server of a host to another."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from executor_harness import PHASE, Harness
from training_run import Training

from understudy.protos import control_pb2 as pb
from understudy.protos import services as rpc
from understudy.proxy_server.state_copy import (
    MOST_PARTS,
    PIECE_BYTES,
    PIECES,
    Receiver,
    Sender,
    Wanted,
    WindowUnusable,
    fetch_state,
    memory_of,
    pieces_of,
)


class Buffers:
    """The state of a rank: a buffer without content is in `gone`.

    It lies `on_device` memory, or is read by whoever is `permitted`.
    """

    def __init__(
        self, contents: dict[int, bytearray], *, on_device: bool = False, permitted: bool = True
    ) -> None:
        self.contents = contents
        self.gone: set[int] = set()
        self.on_device, self.permitted = on_device, permitted

    def locate(self) -> list[tuple[int, int, int]] | None:
        there = {one: content for one, content in self.contents.items() if self.has_content(one)}
        places = [(one, address_of(content), len(content)) for one, content in there.items()]
        return None if self.on_device else places

    def read_from_process(self, pid: int, places: Sequence[tuple[int, int]]) -> bool:
        assert pid == os.getpid()
        for handle, address in places if self.permitted else ():
            content = self.contents[handle]
            content[:] = ctypes.string_at(address, len(content))
        return self.permitted

    def has_content(self, handle: int) -> bool:
        return handle not in self.gone

    def read_state_into(self, handle: int, offset: int, count: int, memory: mmap.mmap, at: int) -> None:
        memory[at : at + count] = bytes(self.contents[handle][offset : offset + count])

    def buffer_bytes(self, handle: int) -> int:
        return len(self.contents[handle])

    def read_state(self, handle: int, offset: int, count: int) -> bytes:
        return bytes(self.contents[handle][offset : offset + count])

    def adopt_replica(self, handle: int, offset: int, data: memoryview | bytes) -> None:
        self.contents[handle][offset : offset + len(data)] = data

    def mark_lost(self, handle: int) -> None:
        self.gone.add(handle)


def address_of(content: bytearray) -> int:
    return ctypes.addressof((ctypes.c_char * len(content)).from_buffer(content)) if content else 0


class Replica(rpc.DeviceServerServicer):  # type: ignore[misc]
    """A device server as far as it sends state."""

    def __init__(self, state: Buffers) -> None:
        self.state, self.sender = state, Sender()
        self.in_messages: list[int] = []
        self.asked: list[str] = []

    def LocateState(
        self, request: pb.LocateStateRequest, context: grpc.ServicerContext
    ) -> pb.LocateStateReply:
        self.asked.append("LocateState")
        return pb.LocateStateReply(memory=memory_of(self.state))

    def CopyState(self, request: pb.CopyStateRequest, context: grpc.ServicerContext) -> pb.CopyStateReply:
        self.asked.append("CopyState")
        try:
            return self.sender.copy(request, self.state)
        except Exception as error:  # noqa: BLE001 - as a device server does
            return pb.CopyStateReply(error=str(error))

    def ReadState(
        self, request: pb.ReadStateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StateChunk]:
        self.asked.append("ReadState")
        self.in_messages += list(request.handles)
        yield from self.sender.messages(request.handles, self.state)


@contextmanager
def served(replica: Replica, folder: Path) -> Iterator[rpc.DeviceServerStub]:
    server = grpc.server(futures.ThreadPoolExecutor(8))
    rpc.add_DeviceServerServicer_to_server(replica, server)
    server.add_insecure_port(f"unix:{folder}/replica.sock")
    server.start()
    try:
        with grpc.insecure_channel(f"unix:{folder}/replica.sock") as channel:
            yield rpc.DeviceServerStub(channel)
    finally:
        server.stop(None)


def empty(wanted: list[Wanted]) -> Buffers:
    return Buffers({handle: bytearray(buffer.bytes) for buffer in wanted for handle in buffer.handles})


def test_buffers_of_many_pieces_arrive_as_they_were(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    sizes = [1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECES * PIECE_BYTES - 5]
    theirs = Buffers({number: bytearray(chance.randbytes(size)) for number, size in enumerate(sizes, 1)})
    wanted = [Wanted(number, size, (10 * number, 10 * number + 1)) for number, size in enumerate(sizes, 1)]
    ours = empty(wanted)
    with served(Replica(theirs), tmp_path) as sender, Receiver() as receiver:
        copied = receiver.fetch(sender, wanted, ours, lambda handle: pytest.fail(f"{handle} is lost"))
    assert copied == 2 * sum(sizes)
    for handle, content in ours.contents.items():
        assert content == theirs.contents[handle // 10], handle


def test_small_buffers_come_many_in_a_piece(tmp_path: Path, seed: int) -> None:
    """Among them empty ones, and some that the sender has lost."""
    chance = random.Random(seed)
    sizes = {number: chance.choice((0, 4, 1000, 40_000)) for number in range(1, 2 * MOST_PARTS)}
    theirs = Buffers({number: bytearray(chance.randbytes(size)) for number, size in sizes.items()})
    theirs.gone = set(chance.sample(sorted(sizes), 20))
    wanted = [Wanted(number, size, (number,)) for number, size in sizes.items()]
    ours, lost = empty(wanted), list[int]()
    pieces = list(pieces_of(wanted))
    assert all(sum(part.bytes for part in piece) <= PIECE_BYTES for piece in pieces)
    assert max(len(piece) for piece in pieces) <= MOST_PARTS
    assert len(pieces) <= 2 + sum(sizes.values()) // PIECE_BYTES + len(sizes) // MOST_PARTS
    with served(Replica(theirs), tmp_path) as sender, Receiver() as receiver:
        receiver.fetch(sender, wanted, ours, lost.append)
    assert set(lost) == theirs.gone == ours.gone and len(lost) == 20
    assert all(ours.contents[one] == theirs.contents[one] for one in sizes if one not in theirs.gone)


def test_content_that_the_sender_does_not_have_is_told_of_once(tmp_path: Path) -> None:
    wanted = [Wanted(1, 4 * PIECE_BYTES, (7, 8)), Wanted(2, 5, (9,))]
    theirs = Buffers({1: bytearray(4 * PIECE_BYTES), 2: bytearray(b"there")})
    theirs.gone.add(1)
    ours, lost = empty(wanted), list[int]()
    with served(Replica(theirs), tmp_path) as sender, Receiver() as receiver:
        assert receiver.fetch(sender, wanted, ours, lost.append) == 5
    assert (lost, ours.gone, ours.contents[9]) == ([7, 8], {7, 8}, b"there")


def test_what_fails_on_the_senders_side_fails_on_the_receivers(tmp_path: Path) -> None:
    wanted = [Wanted(5, 10, (5,))]
    with (
        served(Replica(Buffers({})), tmp_path) as sender,
        Receiver() as receiver,
        pytest.raises(RuntimeError, match="5"),
    ):
        receiver.fetch(sender, wanted, empty(wanted), lambda handle: None)


def test_nothing_is_written_into_a_file_that_is_no_window(tmp_path: Path) -> None:
    """A request may come late, when the descriptor it names is something else."""
    sender, theirs = Sender(), Buffers({1: bytearray(b"secret")})
    (foreign := tmp_path / "foreign").write_bytes(b"precious" * 1000)
    growing = os.memfd_create("growing")
    os.truncate(growing, 1 << 20)
    with foreign.open("r+b") as file:
        for descriptor, inode in (
            (file.fileno(), os.fstat(file.fileno()).st_ino),
            (growing, os.fstat(growing).st_ino),
            (growing, 1),
            (1 << 20, 1),
        ):
            window = pb.Window(pid=os.getpid(), file=descriptor, inode=inode)
            request = pb.CopyStateRequest(window=window, parts=[pb.StatePart(handle=1, bytes=6)])
            reply = sender.copy(request, theirs)
            assert reply.no_window and reply.error, descriptor
    assert foreign.read_bytes() == b"precious" * 1000
    assert os.pread(growing, 6, 0) == bytes(6)
    os.close(growing)


def test_a_window_that_cannot_be_opened_is_told_before_anything_is_copied(tmp_path: Path) -> None:
    wanted = [Wanted(1, 10, (1,))]
    ours = empty(wanted)
    with served(Replica(Buffers({1: bytearray(b"0123456789")})), tmp_path) as sender:
        receiver = Receiver()
        with receiver:
            pass
        receiver._file = os.open(os.devnull, os.O_RDWR)
        with receiver, pytest.raises(WindowUnusable):
            receiver.fetch(sender, wanted, ours, lambda handle: None)
    assert ours.contents[1] == bytes(10)


@pytest.mark.parametrize("window", ("usable", "refused by the sender", "not to be had"))
def test_state_arrives_whether_or_not_there_is_a_window(
    window: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that the sender does not have is told of in both ways."""
    sizes = {1: 1000, 2: PIECE_BYTES, 3: 3 * PIECE_BYTES + 1, 4: PIECE_BYTES, 5: 8}
    chance = random.Random(seed)
    theirs = Buffers({number: bytearray(chance.randbytes(size)) for number, size in sizes.items()})
    theirs.gone = {4, 5}
    replica = Replica(theirs)
    wanted = [Wanted(number, size, (number,)) for number, size in sizes.items()]
    ours = empty(wanted)
    ours.permitted = False
    if window == "refused by the sender":
        monkeypatch.setattr("understudy.proxy_server.state_copy._SEALS", 0)
    if window == "not to be had":
        monkeypatch.setattr(os, "memfd_create", lambda *_: os.open("/nowhere", os.O_RDWR))
    with served(replica, tmp_path) as sender:
        copied, lost = fetch_state(sender, wanted, ours)
    assert copied == sizes[1] + sizes[2] + sizes[3]
    assert sorted(lost) == [4, 5] and ours.gone == {4, 5}
    assert all(ours.contents[number] == theirs.contents[number] for number in (1, 2, 3))
    assert replica.in_messages == ([] if window == "usable" else list(sizes))
    assert ("state comes in messages" in capfd.readouterr().err) == (window != "usable")


def test_state_is_read_where_it_lies_with_one_request(tmp_path: Path, seed: int) -> None:
    """However much it is.  Of a buffer that the sender does not have, it is told."""
    chance = random.Random(seed)
    sizes = {1: 0, 2: 1, 3: 40_000, 4: 3 * PIECES * PIECE_BYTES, 5: 7}
    theirs = Buffers({number: bytearray(chance.randbytes(size)) for number, size in sizes.items()})
    theirs.gone = {5}
    wanted = [Wanted(number, size, (10 * number, 10 * number + 1)) for number, size in sizes.items()]
    replica, ours = Replica(theirs), empty(wanted)
    with served(replica, tmp_path) as sender:
        copied, lost = fetch_state(sender, wanted, ours)
    assert (copied, lost, ours.gone) == (2 * sum(sizes[one] for one in range(1, 5)), [50, 51], {50, 51})
    assert all(ours.contents[one] == theirs.contents[one // 10] for one in ours.contents if one < 50)
    assert replica.asked == ["LocateState"]


def test_state_in_a_devices_memory_comes_through_a_window(tmp_path: Path) -> None:
    replica, ours = Replica(Buffers({1: bytearray(b"ours")}, on_device=True)), Buffers({1: bytearray(4)})
    with served(replica, tmp_path) as sender:
        assert fetch_state(sender, [Wanted(1, 4, (1,))], ours) == (4, [])
    assert ours.contents[1] == b"ours" and replica.asked == ["LocateState", "CopyState"]


def test_a_replica_whose_buffer_has_another_size_is_not_read(tmp_path: Path) -> None:
    ours = Buffers({1: bytearray(4)})
    with (
        served(Replica(Buffers({1: bytearray(b"longer")})), tmp_path) as sender,
        pytest.raises(RuntimeError, match="buffer 1 of a replica is not of 4 bytes"),
    ):
        fetch_state(sender, [Wanted(1, 4, (1,))], ours)
    assert ours.contents[1] == bytes(4)


def test_the_executor_reads_buffers_from_the_memory_of_another_process(seed: int) -> None:
    chance = random.Random(seed)
    contents = [float(chance.randrange(1000)) for _ in range(2000)]
    with Harness() as theirs, Harness() as ours:
        for h, values in ((theirs, contents), (ours, [0.0] * len(contents))):
            for handle in range(1, 1100):  # more than the kernel takes in one call
                h.new(handle, values[: 1 + handle % 7])
            h.new(2000, values)
            h.commit()
            h.writer.append(PHASE, 0, [])
            h.synchronize()
            h.executor.park()
        handles = [*range(1, 1100), 2000]
        places = theirs.executor.locate()
        assert {place[0] for place in places} == {*handles}
        reads = [(handle, address) for handle, address, _ in places]
        assert ours.executor.read_from_process(os.getpid(), reads)
        for handle, _, size in places:
            assert ours.executor.read_state(handle, 0, size) == theirs.executor.read_state(handle, 0, size)
        with pytest.raises(RuntimeError, match="could not be read"):
            ours.executor.read_from_process(os.getpid(), [(1, 4096)])
        with pytest.raises(RuntimeError, match="4711"):
            ours.executor.read_from_process(os.getpid(), [(4711, reads[0][1])])
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        with pytest.raises(RuntimeError, match="could not be read"):
            ours.executor.read_from_process(gone.pid, reads)


def test_windows_leave_neither_files_nor_mappings_behind() -> None:
    service = Replica(Buffers({1: bytearray(PIECE_BYTES)}))
    assert held() == (0, 0)
    with Receiver() as receiver:
        inode = os.fstat(receiver._file).st_ino
        window = pb.Window(pid=os.getpid(), file=receiver._file, inode=inode)
        for _ in range(3):
            request = pb.CopyStateRequest(window=window, parts=[pb.StatePart(handle=1, bytes=PIECE_BYTES)])
            assert service.CopyState(request, None).error == ""
        assert held() == (2, 3)  # Python's mappings keep a descriptor of their own
    service.sender.forget()
    assert held() == (0, 0)


def held() -> tuple[int, int]:
    """Mappings and descriptors of windows in this process."""
    name = "understudy-copy"
    files = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it
            files.append(os.readlink(path))
    return Path("/proc/self/maps").read_text().count(name), sum(name in file for file in files)


def test_the_executor_writes_state_only_where_there_is_room() -> None:
    with Harness() as h:
        h.new(1, [1.0, 2.0, 3.0, 4.0])
        h.commit()
        h.writer.append(PHASE, 0, [])
        h.synchronize()
        h.executor.park()
        memory = bytearray(20)
        h.executor.read_state_into(1, 0, 16, memory, 4)
        assert memory == bytes(4) + h.executor.read_state(1, 0, 16)
        for offset, count, at in ((0, 16, 5), (0, 21, 0), (8, 16, 0), (0, 16, 1 << 63), (1 << 63, 8, 0)):
            with pytest.raises((ValueError, RuntimeError)):
                h.executor.read_state_into(1, offset, count, memory, at)
        with pytest.raises((ValueError, BufferError)):
            h.executor.read_state_into(1, 0, 16, bytes(20), 0)
        with pytest.raises(ValueError, match="contiguous"):
            h.executor.read_state_into(1, 0, 8, memoryview(memory)[::2], 0)


@pytest.mark.drawn(3)
def test_a_large_buffer_of_a_killed_rank_comes_from_its_replica_with_the_same_bits(tmp_path: Path) -> None:
    size = 3 * PIECES * PIECE_BYTES + 4096
    training = Training("bench/workloads/wide_state.py", 2, 120, ["--bytes", str(size)])
    unfaulted = training.run(tmp_path / "unfaulted", proxied=True)
    drills = ("kill-server rank=1 step=80 call=3", "kill-server rank=0 step=100 call=3")
    faulted = training.run(tmp_path / "faulted", proxied=True, drills=drills)
    assert faulted.losses == unfaulted.losses
    recoveries = faulted.report["recoveries"]
    assert [recovery["plan"] for recovery in recoveries] == ["restart-copy-replay"] * 2
    assert max(recovery["copied_bytes"] for recovery in recoveries) >= size
    assert faulted.report["replies_different"] == 0
