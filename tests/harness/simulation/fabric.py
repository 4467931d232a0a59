"""The network between simulated device servers: what their communicators do to one another."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from simulation.programs import Combine, Communicator, combined, mix

if TYPE_CHECKING:
    from simulation.device import Device

Later = Callable[[float, Callable[[], None]], object]


class Violation(AssertionError):
    """Something happened that must never happen."""


@dataclass(eq=False)
class Work:
    """One operation of one member, begun and perhaps not over."""

    device: Device
    buffers: tuple[int, ...]
    output: int | None
    done: bool = False
    failed: str = ""
    result: int | None = None
    waiting: bool = False
    """Whether its device stands still for it."""
    place: tuple[int, int] = (0, 0)
    """Of a collective: the communicator, and how many were begun on it with this one."""

    def settle(self, result: int | None) -> None:
        """It ended well."""
        self.done, self.result = True, result
        if self.waiting:
            self.device.go_on()

    def fail(self, why: str) -> None:
        """It will never end."""
        if not self.done and not self.failed:
            self.failed = why
            if self.waiting:
                self.device.go_on()


@dataclass
class _Slot:
    sequence: int
    kind: int
    root: int
    stuck: bool = False
    """It never ends by itself."""
    values: dict[int, int] = field(default_factory=dict)
    works: dict[int, Work] = field(default_factory=dict)


class Link:
    """A communicator from one meeting of its members on; it starts to count anew."""

    def __init__(self, group: Communicator, later: Later, chance: random.Random) -> None:
        self.group = group
        self.members: dict[int, Device] = {}
        self._later = later
        self._chance = chance
        self._waiting: list[Callable[[], None]] = []
        self._slots: deque[_Slot] = deque()
        self._posted: dict[int, int] = {}
        self._first = 0
        self._messages: dict[tuple[int, int], deque[tuple[int, int, Work | None]]] = {}
        self._expected: dict[tuple[int, int], deque[tuple[int, Work]]] = {}
        self.gone: set[int] = set()

    def connect(self, device: Device, member: int) -> None:
        """`member` is there."""
        if member in self.members and self.members[member].process.running:
            raise Violation(
                f"server {device.pid} of rank {device.rank} connects as member {member} of communicator "
                f"{self.group.number}, which server {self.members[member].pid} is"
            )
        self.members[member] = device
        if self.connected:
            waiting, self._waiting = self._waiting, []
            for callback in waiting:
                callback()

    @property
    def connected(self) -> bool:
        """Whether everybody has come."""
        return len(self.members) == len(self.group.ranks)

    def when_connected(self, callback: Callable[[], None]) -> None:
        """Call back once everybody has come."""
        self._waiting.append(callback)

    def collective(
        self, member: int, sequence: int, kind: int, root: int, value: int, work: Work, *, stuck: bool = False
    ) -> None:
        """Post one; `sequence`: how many the program has done before."""
        index = self._posted.get(member, 0)
        self._posted[member] = index + 1
        while index - self._first >= len(self._slots):
            self._slots.append(_Slot(sequence, kind, root))
        slot = self._slots[index - self._first]
        if (slot.sequence, slot.kind, slot.root) != (sequence, kind, root):
            raise Violation(
                f"rank {self.group.ranks[member]} posts collective {sequence} of communicator "
                f"{self.group.number} where its peers post {slot.sequence}"
            )
        slot.values[member], slot.works[member] = value, work
        slot.stuck = slot.stuck or stuck
        if self.gone - slot.works.keys() or (slot.stuck and self.gone):
            self._break(work)
        while self._slots and len(self._slots[0].works) == len(self.group.ranks) and not self._slots[0].stuck:
            self._first += 1
            self._finish(self._slots.popleft())

    def _finish(self, slot: _Slot) -> None:
        values = [slot.values[member] for member in range(len(self.group.ranks))]
        total = values[slot.root] if slot.kind == Combine.BROADCAST else 0
        pause = self._chance.uniform(0.0001, 0.001)
        for member, work in slot.works.items():
            result = total or combined(slot.kind, slot.root, values, member)
            self._later(pause, partial(work.settle, result))

    def send(self, member: int, peer: int, sequence: int, value: int, work: Work, buffered: bool) -> None:
        """Post a message."""
        if peer in self.gone:
            self._break(work)
        self._messages.setdefault((member, peer), deque()).append(
            (sequence, value, None if buffered else work)
        )
        if buffered:
            work.settle(None)
        self._deliver(member, peer)

    def receive(self, member: int, peer: int, sequence: int, work: Work) -> None:
        """Wait for a message."""
        self._expected.setdefault((peer, member), deque()).append((sequence, work))
        self._deliver(peer, member)
        if peer in self.gone and self._expected[peer, member]:
            self._break(work)

    def _deliver(self, sender: int, receiver: int) -> None:
        messages = self._messages.setdefault((sender, receiver), deque())
        expected = self._expected.setdefault((sender, receiver), deque())
        while messages and expected:
            sequence, value, sending = messages.popleft()
            wanted, work = expected.popleft()
            if sequence != wanted:
                raise Violation(
                    f"rank {self.group.ranks[receiver]} takes message {sequence} of rank "
                    f"{self.group.ranks[sender]} for message {wanted}"
                )
            pause = self._chance.uniform(0.0001, 0.001)
            self._later(pause, partial(work.settle, value))
            if sending is not None:
                self._later(pause, partial(sending.settle, None))

    def leave(self, member: int, silently: bool) -> None:
        """`member` died or aborted: who waits for it learns of it soon, or perhaps never if `silently`."""
        if member in self.gone:
            return
        if not self.connected:
            self.members.pop(member, None)  # that it is there is withdrawn
            return
        self.gone.add(member)
        pending = [
            work for slot in self._slots if slot.stuck or member not in slot.works
            for work in slot.works.values()
        ]  # fmt: skip
        for (sender, _), expected in self._expected.items():
            if sender == member:
                pending += [work for _, work in expected]
        for (_, receiver), messages in self._messages.items():
            if receiver == member:
                pending += [work for _, _, work in messages if work is not None]
        for work in pending:
            if not silently or self._chance.random() < 0.8:
                self._break(work)

    def _break(self, work: Work) -> None:
        pause = self._chance.uniform(0.0005, 0.02)
        self._later(pause, lambda: work.fail("a peer closed its connection"))


class Fabric:
    """Where servers meet: one link per communicator, and another whenever its members meet anew.

    They agree on a generation (proxy_server/backends.py), so whoever comes joins those that wait.
    """

    def __init__(self, later: Later, seed: int) -> None:
        self._later = later
        self._seed = seed
        self._links: dict[int, Link] = {}
        self._made = 0

    def link(self, group: Communicator) -> Link:
        """The place where members of `group` meet now."""
        link = self._links.get(group.number)
        if link is None or link.connected:
            self._made += 1
            chance = random.Random(mix(self._seed, group.number, self._made))
            link = self._links[group.number] = Link(group, self._later, chance)
        return link
