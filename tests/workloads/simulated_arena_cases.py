"""What a simulated CUDA device's allocator is asked for where pre-images are kept, each case by its name on
the command line; prints what came of it.

With SIMULATED_CUDA_LIBRARY in the environment, which names it.
"""

import struct
import sys
from collections.abc import Callable
from typing import NamedTuple

import simulated_device

simulated_device.load()

from executor_harness import (  # noqa: E402 - the device comes first
    ALLOCATE,
    MEMORY,
    OPERATOR,
    PHASE,
    RESIZE,
    Harness,
    double,
    vector,
)

FORWARD, OPTIMIZER = 0, 1
LAST = 8
LENGTHS = {handle: 120_000 + 2 * handle for handle in range(1, LAST + 1)}
"""Of the program's buffers, in floats; no multiples of what a piece of an arena is one of. Two blocks of an
arena are needed where pre-images of two commits are kept.
"""
TENSOR_LIST, CONSTANT_DOUBLE, DOUBLE = 4, 17, 7
BLOCK = 4 << 20
"""Bytes of an arena's blocks."""
LONG = 64
"""Commits, after which an arena that nobody used goes, and that it stays away once it was in the way."""


class Memory(NamedTuple):
    """Of the device's allocator: blocks taken so far, bytes that are out, and those that are left."""

    taken: int
    bytes: int
    free: int


class Trainer(Harness):
    """Adds one to each of its buffers in each step, by one call. Peers follow a commit later."""

    def __init__(self) -> None:
        super().__init__()
        self.values = {handle: float(handle) for handle in LENGTHS}
        self.committed: dict[int, dict[int, float]] = {}
        self.lengths = dict(LENGTHS)
        for handle, value in self.values.items():
            self.writer.append(ALLOCATE, handle, [4 * LENGTHS[handle]])
            self.fill(handle, value)
        self.end_step()

    def fill(self, handle: int, value: float) -> None:
        key = [*vector(self.lengths[handle]), DOUBLE]
        self.writer.append(OPERATOR, self.template("aten::fill_.Scalar", key), [handle, double(value)])
        self.values[handle] = value

    def add_one(self, handles: list[int] | None = None) -> None:
        handles = handles or list(self.values)
        words = [word for handle in handles for word in vector(self.lengths[handle])]
        key = [TENSOR_LIST | len(handles) << 8, *words, CONSTANT_DOUBLE, double(1.0)]
        self.writer.append(OPERATOR, self.template("aten::_foreach_add_.Scalar", key, outputs=[]), handles)
        for handle in handles:
            self.values[handle] += 1

    def begin_step(self) -> None:
        self.writer.append(PHASE, OPTIMIZER, [])
        self.synchronize()

    def end_step(self) -> None:
        """With the next record comes a commit, where what the peers have passed by then goes."""
        self.log.floor_commit = self.log.commit_count
        self.commit()
        self.writer.append(PHASE, FORWARD, [])
        self.synchronize()
        self.committed[self.log.commit_count] = dict(self.values)

    def idle(self, commits: int) -> None:
        """Nothing is written, and peers keep up."""
        self.log.floor_commit = 1 << 40
        for _ in range(commits):
            self.commit()
            self.writer.append(PHASE, FORWARD, [])
        self.synchronize()
        self.log.floor_commit = self.log.commit_count
        self.committed[self.log.commit_count] = dict(self.values)

    def step(self) -> int:
        """Answers how often its pre-images asked the allocator."""
        self.begin_step()
        before = self.memory().taken
        self.add_one()
        asked = self.memory().taken - before
        self.end_step()
        return asked

    def settle(self) -> None:
        """Until pre-images of as many commits as are kept find place."""
        for _ in range(4):
            self.step()

    def memory(self) -> Memory:
        words = struct.unpack("<14Q", self.writer.call(MEMORY, 0, []))
        return Memory(words[6], words[0], words[12])

    def take(self, handle: int, beyond: int) -> tuple[int, int]:
        """A buffer of so many bytes more than are free. Answers what was taken from the arena for it, in its
        blocks, and whether no way leads back to the last commit any more.
        """
        before = self.memory()
        self.writer.append(ALLOCATE, handle, [before.free + beyond])
        after = self.memory()
        return round((before.bytes + before.free + beyond - after.bytes) / BLOCK), self.log.sealed

    def holds(self, values: dict[int, float]) -> bool:
        """A server that stands still."""
        return all(
            self.executor.read_state(handle, 0, 4 * LENGTHS[handle])
            == struct.pack("<f", value) * LENGTHS[handle]
            for handle, value in values.items()
        )

    def goes_back(self, to: int) -> bool:
        """And comes to where it was again."""
        self.synchronize()
        self.executor.park()
        self.executor.rewind(to)
        then = self.holds(self.committed[to])
        self.executor.resume()
        self.synchronize()
        self.executor.park()
        now = self.holds(self.values)
        self.executor.resume()
        return then and now


def steady_steps() -> None:
    """How often pre-images ask the allocator in each step, and blocks that its commit takes."""
    asked, taken = [], []
    with Trainer() as h:
        for _ in range(10):
            before = h.memory().bytes
            asked.append(h.step())
            taken.append(round((h.memory().bytes - before) / BLOCK, 1))
    print(asked)
    print(taken)


def one_launch() -> None:
    """For all pre-images of a call, wherever they lie; the call itself is one for each of its tensors."""
    found = []
    with Trainer() as h:
        for _ in range(6):
            h.begin_step()
            before = simulated_device.counters().launches
            h.add_one()
            h.synchronize()
            found.append(simulated_device.counters().launches - before)
            h.end_step()
    print(found)


def way_back() -> None:
    """By one commit and by two, past buffers that were resized and freed meanwhile."""
    with Trainer() as h:
        h.settle()
        h.add_one([3, 4])
        print(h.goes_back(h.log.commit_count))
        h.settle()
        h.add_one([3, 4])
        h.step()
        h.add_one([2, 3, 4])
        h.writer.append(RESIZE, 3, [4 * LENGTHS[3] + 4096])
        h.writer.free_later(4)
        del h.values[4]
        h.add_one([2])
        print(h.goes_back(h.log.commit_count))
        print(h.goes_back(h.log.commit_count - 1))


def a_rewind_leaves_none() -> None:
    """Contents that come back from there are where they were, and new connections find its memory."""
    with Trainer() as h:
        before = h.memory().bytes
        h.settle()
        h.idle(2)
        h.add_one()
        h.synchronize()
        h.executor.park()
        h.executor.rewind(h.log.commit_count)
        h.executor.resume()
        print(round((h.memory().bytes - before) / BLOCK, 1))
        print([h.step() for _ in range(5)])


def room_for_the_program() -> None:
    """Of an arena in which nothing lies: the way back stays, and for long there is no arena."""
    with Trainer() as h:
        h.settle()
        h.idle(2)
        print(h.take(101, 4096))
        h.add_one()
        print(h.goes_back(h.log.commit_count))
        h.writer.free_later(101)
        print([h.step() for _ in range(4)])
        h.idle(LONG)
        print([h.step() for _ in range(5)])


def room_amid_a_step() -> None:
    """Of one in which there are pre-images: they go too. Then there is nothing more to be had."""
    with Trainer() as h:
        h.settle()
        h.begin_step()
        h.add_one()
        print(h.take(101, 4096))
        h.executor.park()
        print(h.holds(h.values))
        h.executor.resume()
        try:
            h.take(102, 4096)
        except RuntimeError as problem:
            print("out of memory" in str(problem))


def no_more_use() -> None:
    """After long without pre-images it goes, and comes back with them."""
    with Trainer() as h:
        before = h.memory().bytes
        h.settle()
        print(round((h.memory().bytes - before) / BLOCK, 1))
        h.idle(2 * LONG)
        print(round((h.memory().bytes - before) / BLOCK, 1))
        print([h.step() for _ in range(5)])


def a_full_device() -> None:
    """There is none where the program leaves little, and one that is there makes way before it must."""
    with Trainer() as h:
        h.settle()
        before = h.memory()
        h.writer.append(ALLOCATE, 101, [before.free - (1 << 20)])
        h.idle(2)
        print(round((before.bytes + before.free - (1 << 20) - h.memory().bytes) / BLOCK, 1))
        print([h.step() for _ in range(3)])


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        steady_steps,
        one_launch,
        way_back,
        a_rewind_leaves_none,
        room_for_the_program,
        room_amid_a_step,
        no_more_use,
        a_full_device,
    )
}
CASES[sys.argv[1]]()
