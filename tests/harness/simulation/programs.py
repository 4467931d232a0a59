"""Programs for simulated ranks, written in one global order, with what an undisturbed run makes of them.

A buffer's content is a 64-bit hash of everything that went into it, so two runs that differ anywhere differ
at the end.  The global order is a witness that the program cannot wait for itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

MASK = (1 << 64) - 1

Record = tuple[Any, ...]
Key = tuple[Any, ...]
"""What ranks count together: a communicator's collectives, or the messages from one rank to another."""


class Do(IntEnum):
    """First item of a record."""

    NEW = 0  # handle, content
    MIX = 1  # handle, sources, salt: the content becomes a hash of the sources'
    FREE = 2  # handle
    RANDOM = 3  # handle: content from the generator
    OPTIMIZER = 4
    COMMIT = 5  # whether an optimizer step ends here
    JOIN = 6  # communicator
    LEAVE = 7  # communicator
    COLLECTIVE = 8  # communicator, kind, input, output
    SEND = 9  # communicator, member, handle, whether it is buffered
    RECEIVE = 10  # communicator, member, handle
    READ = 11  # handle: the worker waits for the content
    END = 12


class Combine(IntEnum):
    """What a collective computes."""

    ALL_REDUCE = 0
    BROADCAST = 1
    REDUCE_SCATTER = 2


def mix(*parts: int) -> int:
    """A hash of integers, the same in every process."""
    return hash(parts) & MASK


def combined(kind: int, root: int, values: list[int], member: int) -> int:
    """The result of a collective at one member."""
    if kind == Combine.BROADCAST:
        return values[root]
    total = mix(kind, *values)
    return mix(total, member) if kind == Combine.REDUCE_SCATTER else total


@dataclass(frozen=True)
class Communicator:
    """A group of ranks."""

    number: int
    ranks: tuple[int, ...]

    @property
    def uid(self) -> int:
        """By which control pages and commits name it; 0 is none."""
        return self.number + 1

    def member(self, rank: int) -> int:
        """A rank's place in it."""
        return self.ranks.index(rank)


@dataclass
class Program:
    """What one rank runs, and what must come out."""

    records: list[Record] = field(default_factory=list)
    reads: dict[int, int] = field(default_factory=dict)
    """Record -> value that the worker is told."""
    contents: dict[int, int] = field(default_factory=dict)
    """Handle -> content, at the end."""
    marks: dict[Key, list[int]] = field(default_factory=dict)
    """Records that count, in order."""
    first_uses: dict[int, int] = field(default_factory=dict)
    """Number of a communicator -> its first collective or message."""
    leaves: dict[int, int] = field(default_factory=dict)
    """Number of a communicator -> record at which it is given up."""

    def done(self, key: Key, position: int) -> int:
        """How many of `key` lie before a record."""
        return bisect_left(self.marks[key], position)


class Writer:
    """Writes the programs of all ranks at once, executing them as it goes."""

    def __init__(self, world: int, seed: int) -> None:
        self.programs = [Program() for _ in range(world)]
        self.communicators: list[Communicator] = []
        self._next = [1] * world
        self._random = [mix(seed, 7)] * world
        self._salt = seed
        self._posted: dict[tuple[int, int, int], deque[int]] = {}

    def _put(self, rank: int, *record: Any) -> None:
        self.programs[rank].records.append(record)

    def _count(self, rank: int, key: Key) -> None:
        program = self.programs[rank]
        program.marks.setdefault(key, []).append(len(program.records))
        program.first_uses.setdefault(key[1], len(program.records))

    def _handle(self, rank: int) -> int:
        self._next[rank] += 1
        return self._next[rank]

    def value(self, rank: int, handle: int) -> int:
        """Content now."""
        return self.programs[rank].contents[handle]

    def new(self, rank: int, content: int) -> int:
        """A buffer of given content."""
        handle = self._handle(rank)
        self._put(rank, Do.NEW, handle, content)
        self.programs[rank].contents[handle] = content
        return handle

    def mix(self, rank: int, handle: int | None, *sources: int, salt: int | None = None) -> int:
        """Overwrite `handle` (None: a fresh buffer) with a hash of `sources`; it may be one of them."""
        if salt is None:
            self._salt += 1
            salt = self._salt
        if handle is None:
            handle = self.new(rank, 0)
        self._put(rank, Do.MIX, handle, sources, salt)
        contents = self.programs[rank].contents
        contents[handle] = mix(salt, *(contents[source] for source in sources))
        return handle

    def random(self, rank: int) -> int:
        """A buffer of random content."""
        handle = self._handle(rank)
        self._put(rank, Do.RANDOM, handle)
        self.programs[rank].contents[handle] = self._random[rank]
        self._random[rank] = mix(self._random[rank], 3)
        return handle

    def seed(self, rank: int) -> int:
        """The generator's state now."""
        return self._random[rank]

    def free(self, rank: int, *handles: int) -> None:
        """Buffers end."""
        for handle in handles:
            self._put(rank, Do.FREE, handle)
            del self.programs[rank].contents[handle]

    def optimizer(self, rank: int) -> None:
        """The optimizer's phase begins."""
        self._put(rank, Do.OPTIMIZER)

    def commit(self, rank: int, step: bool = True) -> None:
        """A commit; `step` ends the optimizer's phase."""
        self._put(rank, Do.COMMIT, step)

    def group(self, *ranks: int) -> Communicator:
        """A communicator; every member has yet to join."""
        made = Communicator(len(self.communicators), ranks)
        self.communicators.append(made)
        return made

    def join(self, group: Communicator, rank: int) -> None:
        """`rank` learns of it."""
        self._put(rank, Do.JOIN, group)

    def leave(self, group: Communicator, rank: int) -> None:
        """`rank` gives it up."""
        self.programs[rank].leaves[group.number] = len(self.programs[rank].records)
        self._put(rank, Do.LEAVE, group)

    def collective(
        self, group: Communicator, kind: Combine, root: int, buffers: dict[int, tuple[int, int]]
    ) -> None:
        """Everybody's (input, output)."""
        values = [self.value(rank, buffers[rank][0]) for rank in group.ranks]
        for member, rank in enumerate(group.ranks):
            given, result = buffers[rank]
            self._count(rank, ("collective", group.number))
            self._put(rank, Do.COLLECTIVE, group, kind, root, given, result)
            self.programs[rank].contents[result] = combined(kind, root, values, member)

    def send(self, group: Communicator, sender: int, receiver: int, handle: int, buffered: bool) -> None:
        """A message; unless it is buffered, `receive` must follow before the sender does anything else."""
        self._count(sender, ("message", group.number, sender, receiver))
        self._put(sender, Do.SEND, group, group.member(receiver), handle, buffered)
        self._posted.setdefault((group.number, sender, receiver), deque()).append(self.value(sender, handle))

    def receive(self, group: Communicator, sender: int, receiver: int, handle: int) -> None:
        """The oldest message that was not received yet."""
        self._count(receiver, ("message", group.number, sender, receiver))
        self._put(receiver, Do.RECEIVE, group, group.member(sender), handle)
        content = self._posted[group.number, sender, receiver].popleft()
        self.programs[receiver].contents[handle] = content

    def read(self, rank: int, handle: int) -> None:
        """The worker asks for a content."""
        program = self.programs[rank]
        program.reads[len(program.records)] = program.contents[handle]
        self._put(rank, Do.READ, handle)

    def end(self) -> list[Program]:
        """All ranks end."""
        for rank in range(len(self.programs)):
            self._put(rank, Do.END)
        return self.programs
