"""Records and a control page as no worker of ours would write them; fuzz/ tries what needs no PyTorch."""

from __future__ import annotations

import datetime
import struct
from pathlib import Path

import pytest
import torch.distributed as dist
from executor_harness import (
    COLLECTIVE,
    COMMUNICATOR_CREATE,
    GENERATOR_GET,
    GENERATOR_SET,
    GROUP_BEGIN,
    GROUP_END,
    OPERATOR,
    SYNCHRONIZE,
    Harness,
    vector,
)

from understudy.proxy_server import _server
from understudy.replay import Log, LogError, RemoteError


class WithPeers(Harness):
    """Its communicators have one member: the executor itself."""

    def new_executor(self) -> _server.Executor:
        def connect(uid: str, generation: int, rank: int, size: int, timeout_ms: int) -> object:
            return dist.ProcessGroupGloo(dist.HashStore(), rank, size, datetime.timedelta(seconds=10))

        executor = _server.Executor(connect)
        executor.attach(self.directory, device="cpu:0", threads=1, generation=0, **self.options)
        return executor


def patch(harness: Harness, old: bytes, new: bytes) -> None:
    """Writes over a place of the control page that only `old` marks."""
    control = Path(harness.directory) / "control"
    at = control.read_bytes().index(old)
    with control.open("r+b") as file:
        file.seek(at)
        file.write(new)


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ([8, 1], "wrong size"),
        ([24, 1, 2, 3], "wrong size"),
        ([16, 1, (1 << 64) - 1], "Invalid offset"),
    ],
)
def test_a_generator_state_that_none_can_be_in_is_refused(state: list[int], problem: str) -> None:
    with Harness() as h:
        h.writer.append(GENERATOR_SET, 5, state)
        with pytest.raises(RemoteError, match=problem):
            h.synchronize()


@pytest.mark.parametrize("drawn", [0, 1, 2, 622, 623, 624, 625, 1247, 1248, 100_000])
def test_a_generator_is_set_to_any_number_of_its_draws_and_knows_it(drawn: int) -> None:
    with Harness() as h:
        h.writer.append(GENERATOR_SET, 5, [16, 7, drawn])
        assert struct.unpack("<2Q", h.writer.call(GENERATOR_GET, 5, [])) == (7, drawn)


def all_reduce(h: Harness, size: int, stride: int) -> None:
    header = [1, 0, 0, 0, 1, 0, 1, 0]  # kind, reduction, peer, tag, sequence, inputs, outputs, splits
    h.writer.append(COLLECTIVE, 7, [*header, 1 | 6 << 8 | 1 << 16, 1, 0, size, stride])


def test_a_collective_reaches_no_further_than_its_buffer_whatever_the_strides() -> None:
    with WithPeers() as h:
        h.new(1, [1, 2, 3, 4])
        h.writer.append(COMMUNICATOR_CREATE, 7, [1, 2, 0, 1, 10_000])
        all_reduce(h, size=4, stride=1)
        assert h.read(1) == (1, 2, 3, 4)
        all_reduce(h, size=1 << 20, stride=0)
        with pytest.raises(RemoteError, match="more elements than its buffer"):
            h.synchronize()


@pytest.mark.cpu_driver
def test_marks_of_a_group_mean_nothing_where_messages_do_not_wait_for_each_other() -> None:
    with WithPeers() as h:
        h.new(1, [1, 2, 3, 4])
        h.writer.append(COMMUNICATOR_CREATE, 7, [1, 2, 0, 1, 10_000])
        for kind in (GROUP_END, GROUP_BEGIN, GROUP_BEGIN):
            h.writer.append(COLLECTIVE, 7, [kind, *[0] * 7])
        all_reduce(h, size=4, stride=1)
        h.commit()
        assert h.read(1) == (1, 2, 3, 4)
        h.synchronize()  # the commit waits for a record with no collective under way
        assert h.log.commit_count == 1


def test_splits_that_only_add_up_are_refused() -> None:
    with WithPeers() as h:
        h.new(1, [1, 2, 3, 4])
        h.new(2, [1, 2, 3, 4])
        h.writer.append(COMMUNICATOR_CREATE, 7, [1, 2, 0, 1, 10_000])
        tensor = [1 | 6 << 8 | 1 << 16, 1, 0, 4, 1]
        other = [tensor[0], 2, *tensor[2:]]
        h.writer.append(COLLECTIVE, 7, [9, 0, 0, 0, 1, 1, 1, 4, *tensor, *other, 2**64 - 4, 8, 4, 0])
        with pytest.raises(RemoteError, match="splits its tensors impossibly"):
            h.synchronize()


def failed(h: Harness, message: bytes) -> None:
    """A program error whose text the worker then writes over."""
    h.new(1, [1, 2, 3, 4])
    h.writer.append(OPERATOR, h.template("aten::no_such_operator", vector()), [1])
    with pytest.raises(RemoteError, match="no operator"):
        h.synchronize()
    patch(h, h.log.error_message.encode(), message)


def last_reply(h: Harness) -> bytes:
    control = (Path(h.directory) / "control").read_bytes()
    (reply_at,) = struct.unpack_from("<I", control, 12)
    (size,) = struct.unpack_from("<Q", control, reply_at)
    return control[reply_at + 16 :][:size]


def test_an_error_text_without_an_end_is_answered_with_as_much_as_its_field_holds() -> None:
    with Harness() as h:
        failed(h, b"x" * (4096 + 48))  # and what follows, up to the next field
        h.writer.append(SYNCHRONIZE, 0, [1 << 40, 0])
        while h.log.cursor_index < h.log.tail_index:
            assert h.executor.wait_for_fault(1) is None
        assert last_reply(h).startswith(b"x" * 4096 + b" [device call operator, record ")
        assert h.log.error_message == "x" * 4096


def test_an_error_text_that_ends_within_a_character_can_be_read() -> None:
    with Harness() as h:
        failed(h, "é".encode()[:1] + b"\0")
        assert h.log.error_message == "�"


def test_a_dump_names_only_operators_that_lie_in_the_dictionary() -> None:
    with Harness() as h:
        h.executor.park()
        outside = [2**64 - 8, 2**64 - 16, 2**64 - 24, 1 << 40]
        for aux in outside:
            h.writer.append(OPERATOR, aux, [])
        h.writer.append(OPERATOR, h.template("aten::\xff", []), [])
        assert [row["operator"] for row in h.log.dump()][:4] == ["?"] * 4


def test_a_log_that_claims_more_records_than_it_has_room_for_is_not_dumped() -> None:
    with Harness() as h:
        h.executor.park()
        for i in range(3):
            h.writer.append(SYNCHRONIZE, i, [1, 2])
        tail = h.log.tail
        patch(h, struct.pack("<QQ", tail, 3), struct.pack("<QQ", 1 << 62, 3))
        with pytest.raises(LogError, match="more than it has room for"):
            Log(h.directory).dump()
