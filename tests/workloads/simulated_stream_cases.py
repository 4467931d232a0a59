"""What an executor does with a script's streams on a simulated CUDA device, each by its name on the command
line; prints what came of it."""

import os
import struct
import sys
from collections.abc import Callable

from simulated_member import COMMUNICATOR, OURS, SUM, Member, in_background

from executor_harness import (  # isort: skip - behind the device
    ALLOCATE,
    COMMIT,
    HOST_TO_DEVICE,
    OPERATOR,
    PHASE,
    STREAM,
    STREAM_MARK,
    STREAM_USE,
    STREAM_WAIT,
    SYNCHRONIZE,
    double,
    vector,
)

MAIN, SIDE, HIGH = 0, 2, 5
"""Streams: the default one, the first that a script makes, and the second one, with a high priority."""
FOR_MARK = 3
"""replay::WaitFor."""
DOUBLED = tuple(2 * one for one in SUM)


class Streams(Member):
    """A Member with a buffer, 2, that no collective works on, and records of streams."""

    def __init__(self, *, snapshot_bytes: int = 0) -> None:
        super().__init__(snapshot_bytes=snapshot_bytes)
        self.new(2, list(OURS))
        self.new(4, [0.0] * 4)
        self.add(2, 2)  # the first call of its kind is waited for
        self.add(2, 4)
        self.synchronize()

    def enter(self, stream: int) -> None:
        self.writer.append(STREAM, stream, [])

    def mark(self, mark: int, stream: int = MAIN, communicator: int = 0) -> None:
        self.writer.append(STREAM_MARK, mark, [stream, communicator])

    def wait_in(self, stream: int, mark: int) -> None:
        self.writer.append(STREAM_WAIT, mark, [stream])

    def next_minibatch(self) -> int:
        """The number of the commit in front of it."""
        self.commit()
        self.writer.append(PHASE, 0, [])
        self.synchronize()
        return self.log.commit_count

    def all_reduce_in(self, stream: int, mark: int) -> None:
        """That stream is the current one, and is to wait for it."""
        self.all_reduce()
        self.mark(mark, communicator=COMMUNICATOR)
        self.wait_in(stream, mark)


def overlap() -> None:
    """A stream that waits for a late peer holds up no other one, and neither does a mark in front of it."""
    with Streams() as h:
        h.mark(1, MAIN)
        h.enter(SIDE)
        h.wait_in(SIDE, 1)
        h.all_reduce_in(SIDE, 2)
        h.add(1, 1)
        h.enter(MAIN)
        h.add(2, 2)
        print(h.read(2) == tuple(4 * one for one in OURS))
        h.writer.call(SYNCHRONIZE, FOR_MARK, [1])
        print(h.log.passed_index < h.log.tail_index)
        h.mark(3, SIDE)
        h.wait_in(MAIN, 3)
        h.add(2, 1)
        reader, found = in_background(lambda: h.read(2))
        h.await_wait()
        print(found)
        h.other_comes()
        reader.join()
        print(found == [tuple(4 * one + 2 * two for one, two in zip(OURS, SUM, strict=True))])


def untold() -> None:
    """Of a collective that no stream was told to wait for: all do, once one touches what it writes."""
    with Streams() as h:
        h.enter(SIDE)
        h.all_reduce()
        h.add(1, 1)
        h.enter(MAIN)
        h.add(1, 1)
        reader, found = in_background(lambda: h.read(1))
        h.await_wait()
        print(found)
        h.other_comes()
        reader.join()
        print(found == [tuple(4 * one for one in SUM)])


def commit_and_rewind() -> None:
    """A commit is of what all streams were given; what is rewound goes on on the stream on which it was."""
    with Streams(snapshot_bytes=64 << 20) as h:
        h.enter(HIGH)
        h.writer.append(STREAM_USE, 2, [HIGH])
        for _ in range(20):
            h.add(2, 2)
        h.log.order_snapshot(1)
        h.commit()
        h.writer.append(PHASE, 0, [])
        h.add(2, 2)
        h.mark(9, HIGH)
        h.wait_in(MAIN, 9)
        h.synchronize()
        number = h.log.commit_count
        h.wait(lambda: len(h.log.snapshots()) == 1, "took no snapshot")
        wanted = tuple(2.0**22 * one for one in OURS)
        print(h.read(2) == wanted)
        for _ in range(3):
            h.executor.park()
            h.executor.rewind(number)
            h.go_on()
            print(h.read(2) == wanted)
        h.executor.detach()
        h.executor = h.new_executor()
        h.executor.restore_snapshot(number)
        h.go_on()
        h.add(2, 2)
        print(h.read(2) == tuple(2 * one for one in wanted))


def aborted() -> None:
    """What a stream was given behind a collective whose peer never came is part of no commit."""
    with Streams() as h:
        number = h.next_minibatch()
        h.enter(SIDE)
        h.all_reduce_in(SIDE, 1)
        h.add(1, 1)
        h.enter(MAIN)
        h.add(2, 2)
        h.writer.append(COMMIT, 0, [])
        h.writer.append(PHASE, 0, [])
        in_background(h.synchronize)
        h.await_wait()
        h.executor.park()
        print(h.log.commit_count == number, h.executor.state)
        h.executor.rewind(number)
        h.go_on()
        h.other_comes()
        print(h.read(1) == DOUBLED, h.read(2) == tuple(4 * one for one in OURS))


def two_halves() -> None:
    """What one stream writes while another waits for a late peer is not in the pre-image of the buffer, of
    which that one writes another half."""
    with Streams() as h:
        h.new(3, [1.0] * 8)
        number = h.next_minibatch()
        h.enter(SIDE)
        h.all_reduce_in(SIDE, 1)
        h.add(3, 1)
        h.enter(MAIN)
        second_half = [*vector(), *vector(4, 4), 17, double(1.0)]
        h.writer.append(OPERATOR, h.template("aten::add_.Tensor", second_half), [2, 3])
        eights = [struct.unpack("<Q", struct.pack("<2f", 8.0, 8.0))[0]] * 2
        h.writer.append(HOST_TO_DEVICE, 3, [16, 16, *eights])
        wanted = tuple(1 + one for one in SUM) + (8.0,) * 4, tuple(2 * one + 1 for one in OURS)
        h.run_all()
        for _ in range(2):
            h.other_comes()
            h.synchronize()
            print((h.read(3, 8), h.read(2)) == wanted)
            h.executor.park()
            h.executor.rewind(number)
            h.go_on()


def unhurried() -> None:
    """A commit waits for no peer that a stream of the script waits for: that one may wait for what comes
    next."""
    with Streams() as h:
        number = h.log.commit_count
        h.enter(SIDE)
        h.all_reduce_in(SIDE, 1)
        h.enter(MAIN)
        h.writer.append(COMMIT, 0, [])
        h.writer.append(PHASE, 0, [])
        h.add(2, 2)
        print(h.read(2) == tuple(4 * one for one in OURS), h.log.commit_count == number)
        h.other_comes()
        h.synchronize()
        h.add(2, 2)
        print(h.read(2) == tuple(8 * one for one in OURS), h.log.commit_count == number + 1)


def behind() -> None:
    """A device that has much to do waits for nobody: the commit comes where it is asked for."""
    with Streams() as h:
        number = h.log.commit_count
        peer, _ = in_background(h.other_comes)
        h.enter(SIDE)
        h.all_reduce_in(SIDE, 1)
        h.mark(2, SIDE)
        h.enter(MAIN)
        h.wait_in(MAIN, 2)
        for _ in range(1000):
            h.add(2, 4)
        h.writer.append(COMMIT, 0, [])
        h.writer.append(PHASE, 0, [])
        h.run_all()
        peer.join()
        print(h.log.commit_count == number + 1)


def senseless() -> None:
    """Marks that nobody made, handles that nobody has; and more marks than are known."""
    with Streams() as h:
        h.writer.append(STREAM_USE, 77, [SIDE])
        h.enter((1 << 64) - 1)
        h.add(2, 2)
        h.mark(6000, (1 << 64) - 1)
        h.wait_in(HIGH, 12345)
        h.wait_in(HIGH, 6000)
        h.enter(HIGH)
        h.add(2, 2)
        for mark in range(1, 5000):
            h.mark(mark, HIGH)
        h.wait_in(MAIN, 1)
        h.writer.call(SYNCHRONIZE, FOR_MARK, [1])
        h.writer.call(SYNCHRONIZE, FOR_MARK, [4999])
        h.enter(MAIN)
        print(h.read(2) == tuple(8 * one for one in OURS))
        h.mark(1, communicator=99)
        try:
            h.synchronize()
        except RuntimeError as problem:
            print("unknown communicator" in str(problem))


def memory() -> None:
    """What was freed while another stream still reads it is not used again before that is through."""
    with Streams() as h:
        h.enter(SIDE)
        h.add(2, 4)
        h.enter(MAIN)
        h.new(3, list(OURS))  # behind the first use of the stream: what was there before is kept for it
        h.enter(SIDE)
        h.all_reduce_in(SIDE, 1)
        h.writer.append(STREAM_USE, 3, [SIDE])
        h.add(1, 3)  # behind the late peer
        h.enter(MAIN)
        h.writer.free_later(3)
        for handle in range(10, 20):
            h.writer.append(ALLOCATE, handle, [16])  # zeroes, on the stream that had made it
        h.run_all()
        h.other_comes()
        h.mark(2, SIDE)
        h.wait_in(MAIN, 2)
        print(h.read(1) == tuple(one + two for one, two in zip(SUM, OURS, strict=True)))


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        overlap,
        untold,
        commit_and_rewind,
        aborted,
        two_halves,
        unhurried,
        behind,
        senseless,
        memory,
    )
}
CASES[sys.argv[1]]()
sys.stdout.flush()
os._exit(0)  # the other rank may still wait
