"""What an executor does on a simulated CUDA device, each by its name on the command line; prints what came
of it.

With SIMULATED_CUDA_LIBRARY in the environment, which names it. Of the two ranks of its communicator the
other one is a thread, so that it comes when the case says so.
"""

import os
import struct
import sys
from collections.abc import Callable

import simulated_device
from simulated_device import counters, fail
from simulated_member import COMMUNICATOR, OURS, SUM, THEIRS, Member, OwnPeer, in_background

import torch  # isort: skip - behind the device
from executor_harness import (  # isort: skip
    ALLOCATE,
    COLLECTIVE,
    COMMUNICATOR_CREATE,
    COMMUNICATOR_DESTROY,
    END,
    ENVIRONMENT,
    FLOAT,
    GROUP_BEGIN,
    GROUP_END,
    OPERATOR,
    PHASE,
    COMMIT,
    Harness,
    double,
    vector,
)

from understudy.replay import content_digest  # isort: skip

OUT_OF_MEMORY = 2
SEND, RECEIVE = 12, 13
RECEIPT = 1 << 20
"""The tag of what answers a message of tag 0 (tests/csrc/simulated_cuda/process_group.cpp)."""


def aborted_commit() -> None:
    """A commit behind a collective whose peer never comes is not made of what the abort left."""
    with Member(optimizer_preimages=False) as h:
        h.all_reduce()
        h.commit()
        h.writer.append(PHASE, 0, [])
        h.await_wait()
        h.executor.park()
        print(h.log.commit_count, h.executor.state)
        h.executor.rewind(1)
        h.go_on()
        h.other_comes()
        print(h.read(1) == SUM)


def snapshot_beside_a_collective() -> None:
    """What the device still has to do does not hold it up: it is taken while a peer is late."""
    with Member(snapshot_bytes=64 << 20) as h:
        h.writer.append(ALLOCATE, 2, [16 << 20])
        h.add(2, 2)  # the first call of its kind is waited for
        h.synchronize()
        h.log.order_snapshot(1)
        h.commit()
        h.all_reduce()
        h.add(1, 1)  # behind it, on the device
        h.wait(lambda: len(h.log.snapshots()) == 1, "took no snapshot")
        print(h.log.passed_index < h.log.tail_index)
        h.other_comes()
        print(h.read(1) == tuple(2 * one for one in SUM))
        restart = h.log.snapshots()[0].commit.number
        h.executor.park()
        h.executor.restore_snapshot(restart)
        h.go_on()
        h.other_comes()
        print(h.read(1) == tuple(2 * one for one in SUM))


def aborted_read() -> None:
    """A value behind such a collective is not told before it is computed, by a replay."""
    with Member() as h:
        h.all_reduce()
        reader, found = in_background(lambda: h.read(1))
        h.await_wait()
        h.executor.park()
        h.executor.rewind(1)
        print(found)
        h.go_on()
        h.other_comes()
        reader.join()
        print(found == [SUM])


def given_up_group() -> None:
    """A communicator that is given up behind a collective is given up when that has ended."""
    with Member() as h:
        h.all_reduce()
        h.writer.append(COMMUNICATOR_DESTROY, COMMUNICATOR, [])
        reader, found = in_background(lambda: h.read(1))
        h.await_wait()
        print(found)
        h.other_comes()
        reader.join()
        print(found == [SUM])


def end_behind_a_collective() -> None:
    """The session ends when the peer has what it waits for."""
    with Member() as h:
        h.all_reduce()
        end, found = in_background(lambda: h.writer.call(END, 0, []))
        h.await_wait()
        print(found)
        print(tuple(h.other_comes().tolist()) == SUM)
        end.join()


class Correspondent(Member):
    """A Member with messages to and from its peer: it sends buffer 1, and receives into buffer 2."""

    def mark(self, kind: int) -> None:
        self.writer.append(COLLECTIVE, COMMUNICATOR, [kind, *[0] * 7])

    def send(self) -> None:
        header = [SEND, 0, 1, 0, 1, 1, 0, 0]  # kind, reduction, peer, tag, sequence, inputs, outputs, splits
        self.writer.append(COLLECTIVE, COMMUNICATOR, [*header, 1 | 6 << 8 | 1 << 16, 1, 0, 4, 1])

    def receive(self) -> None:
        header = [RECEIVE, 0, 1, 0, 2, 0, 1, 0]
        self.writer.append(COLLECTIVE, COMMUNICATOR, [*header, 1 | 6 << 8 | 1 << 16, 2, 0, 4, 1])

    def exchange(self) -> tuple[float, ...]:
        """The other rank does the same at once; answers what it got."""
        peer = self.other()
        if isinstance(peer, OwnPeer):
            return tuple(peer.exchange(torch.tensor(THEIRS)).tolist())
        got, receipts = [torch.empty(4)], [[torch.zeros(1, dtype=torch.uint8)] for _ in range(2)]
        for work in (peer.send([torch.tensor(THEIRS)], 0, 0), peer.recv(got, 0, 0)):
            work.wait()
        for work in (peer.recv(receipts[0], 0, RECEIPT), peer.send(receipts[1], 0, RECEIPT)):
            work.wait()
        return tuple(got[0].tolist())


def messages_together() -> None:
    """A send before a receive, on both sides, in a group."""
    with Correspondent() as h:
        h.new(2, [0.0] * 4)
        for append in (lambda: h.mark(GROUP_BEGIN), h.send, h.receive, lambda: h.mark(GROUP_END)):
            append()
        print(h.exchange() == OURS)
        print(h.read(2) == THEIRS)


def left_amid_a_group() -> None:
    """Nothing is committed where a group is open, and nobody stands still there but for a fault."""
    with Correspondent() as h:
        h.new(2, [0.0] * 4)
        h.commit()
        h.writer.append(PHASE, 0, [])
        h.mark(GROUP_BEGIN)
        h.send()
        h.run_all()
        h.executor.hold()
        print(h.executor.state, h.log.commit_count)
        h.executor.let_go()
        h.commit()
        h.add(1, 1)
        h.run_all()
        print(h.log.commit_count, h.joining is None)
        h.executor.park()
        h.executor.rewind(2)
        print(h.executor.state)
        h.go_on()
        h.receive()
        h.mark(GROUP_END)
        print(h.exchange() == tuple(2 * one for one in OURS))
        print(h.read(2) == THEIRS)


def groups_that_make_no_sense() -> None:
    """They end no session and harm no device server."""
    with Correspondent() as h:
        h.new(2, [0.0] * 4)
        h.mark(GROUP_END)
        h.mark(GROUP_BEGIN)
        h.mark(GROUP_BEGIN)
        h.mark(GROUP_END)
        h.mark(GROUP_END)
        h.mark(GROUP_BEGIN)
        h.send()
        h.writer.append(COMMUNICATOR_CREATE, COMMUNICATOR + 1, [3, 4, 0, 1, 60_000])
        h.add(2, 1)
        h.receive()
        h.writer.append(COMMUNICATOR_DESTROY, COMMUNICATOR + 1, [])
        print(h.exchange() == OURS)
        print(h.read(2) == THEIRS)
        h.mark(GROUP_END)
        h.mark(GROUP_BEGIN)
        h.writer.append(COMMUNICATOR_DESTROY, COMMUNICATOR, [])
        print(h.read(1) == OURS)
        h.mark(GROUP_BEGIN)
        try:
            h.synchronize()
        except RuntimeError as problem:
            print("unknown communicator" in str(problem))


def no_room() -> None:
    """For a copy of what is about to change: the program goes on, and cannot be taken back."""
    with Harness() as h:
        h.new(1, list(OURS))
        h.commit()
        h.synchronize()
        fail(simulated_device.ALLOCATE, OUT_OF_MEMORY)  # there is no arena yet, which needs none
        h.add(1, 1)
        print(h.read(1) == tuple(2 * one for one in OURS))
        h.executor.park()
        try:
            h.executor.rewind(h.log.commit_count)
        except RuntimeError as problem:
            print("out of reach" in str(problem))
        h.executor.resume()
        h.commit()
        h.writer.append(PHASE, 0, [])
        h.add(1, 1)
        h.synchronize()
        h.executor.park()
        h.executor.rewind(h.log.commit_count)
        h.executor.resume()
        print(h.read(1) == tuple(4 * one for one in OURS))


def no_room_in_a_step() -> None:
    """For pre-images: from the next commit on the rank does without, as its next server does."""
    with Harness() as h:
        h.new(1, list(OURS))
        h.commit()
        h.writer.append(PHASE, 1, [])
        h.synchronize()
        fail(simulated_device.ALLOCATE, OUT_OF_MEMORY)
        h.add(1, 1)
        h.synchronize()
        h.executor.park()
        print(h.log.sealed, h.log.final_steps)
        h.executor.resume()
        h.writer.append(COMMIT, 1, [])
        h.writer.append(PHASE, 0, [])
        h.synchronize()
        h.executor.park()
        print(h.log.sealed, h.log.final_steps)
        h.executor.resume()
        before = h.log.commit_count
        h.writer.append(PHASE, 1, [])
        h.add(1, 1)
        h.synchronize()
        print(h.log.commit_count - before, h.read(1) == tuple(4 * one for one in OURS))
        h.executor.detach()
        h.executor = h.new_executor()
        print(h.log.final_steps)


def the_program_needs_room() -> None:
    """More than there is beside what is kept of the last commit: it gets that."""
    key = [*vector(4), *vector(4), 17, double(1.0)]
    result = [1 | 1 << 8, FLOAT << 8 | 1 << 16, 0, 16, 4, 1]
    with Harness() as h:
        h.new(1, list(OURS))
        h.commit()
        h.add(1, 1)
        h.synchronize()
        fail(simulated_device.ALLOCATE, OUT_OF_MEMORY)
        h.writer.append(ALLOCATE, 2, [16])
        h.synchronize()
        h.executor.park()
        print(h.log.sealed)
        h.executor.resume()
        print(h.read(2))
        h.commit()
        h.add(1, 1)
        h.synchronize()
        fail(simulated_device.ALLOCATE, OUT_OF_MEMORY)
        h.writer.append(OPERATOR, h.template("aten::add.Tensor", key, result), [1, 1, 3])
        print(h.read(3) == tuple(8 * one for one in OURS))
        fail(simulated_device.ALLOCATE, OUT_OF_MEMORY)
        try:
            h.writer.append(ALLOCATE, 4, [16])
            h.synchronize()
        except RuntimeError as problem:  # there is nothing more to be had
            print("out of memory" in str(problem))


def digests() -> None:
    """A commit's, of what it changed: right, and few bytes of it come to the host."""
    sizes = {1: 1, 2: 1024, 3: 1025, 4: 0, 5: 30_000, 6: 5}
    with Harness(shadow_bytes=64 << 10) as h:  # room for a manifest, and for no shadow
        for handle, count in sizes.items():
            h.new(handle, [float(i % 97) for i in range(count)])
        h.commit()  # of what is new no commit takes digests
        for handle, count in sizes.items():
            h.add(handle, handle, count)
        h.synchronize()
        before = counters().to_host
        h.commit()
        h.writer.append(PHASE, 0, [])
        h.synchronize()
        came = counters().to_host - before
        contents = [struct.pack(f"<{n}f", *(2.0 * (i % 97) for i in range(n))) for n in sizes.values()]
        print(h.log.digests(h.log.commit_count, list(sizes)) == [content_digest(one) for one in contents])
        print(came < sum(map(len, contents)) / 10)


def the_scripts_environment() -> None:
    """Its allocator's settings, and launches that block."""

    def waits_of_three_calls(h: Harness) -> int:
        before = counters().waits
        for _ in range(3):
            h.add(1, 1)
        h.synchronize()
        return counters().waits - before

    def says(h: Harness, text: bytes) -> None:
        padded = text + bytes(-len(text) % 8)
        words = [int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8)]
        h.writer.append(ENVIRONMENT, 0, [len(text), *words])

    with Harness() as h:
        h.new(1, list(OURS))
        waits_of_three_calls(h)
        before = waits_of_three_calls(h)
        says(h, b"CUDA_LAUNCH_BLOCKING=1\0PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64\0")
        print(waits_of_three_calls(h) - before, torch._C._accelerator_getAllocatorSettings())
        h.commit()
        h.synchronize()
        h.executor.detach()
        h.executor = h.new_executor()
        h.executor.restore(1)
        h.executor.resume()
        waits_of_three_calls(h)
        print(waits_of_three_calls(h) - before)
    with Harness() as h:
        h.new(1, list(OURS))
        h.commit()
        h.synchronize()
        h.executor.detach()
        h.options["block_until_commit"] = 3  # as proxyd asks for behind a second failure
        h.executor = h.new_executor()
        h.executor.restore(1)
        h.executor.resume()
        h.run_all()  # a record that waits is behind that commit
        found = []
        for _ in range(3):
            found.append(waits_of_three_calls(h) - before)
            h.commit()
            h.synchronize()
        print(found)


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        aborted_commit,
        aborted_read,
        given_up_group,
        end_behind_a_collective,
        messages_together,
        left_amid_a_group,
        groups_that_make_no_sense,
        snapshot_beside_a_collective,
        no_room,
        no_room_in_a_step,
        the_program_needs_room,
        digests,
        the_scripts_environment,
    )
}
CASES[sys.argv[1]]()
sys.stdout.flush()
os._exit(0)  # the other rank may still wait
