"""The communicators of a simulated device server, and what it has begun on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from simulation.fabric import Link, Work
from simulation.log import Commit
from simulation.programs import MASK, Communicator, Do, Record

if TYPE_CHECKING:
    from simulation.device import Device

CONNECT_WITHIN = 600.0
"""Seconds that a communicator waits for its members."""


class Blocked(Exception):
    """The record cannot run yet; who knows when calls `go_on`.

    `communicator` and `sequence` name the collective that it waits for, if it is one.
    """

    def __init__(self, communicator: int = 0, sequence: int = 0) -> None:
        super().__init__()
        self.communicator, self.sequence = communicator, sequence


class CollectiveFailed(Exception):
    """A peer or the network failed."""


class Collectives:
    """Of one server."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._joined: dict[int, tuple[Communicator, list[int], dict[tuple[int, int], int]]] = {}
        self._links: dict[int, Link] = {}
        self._in_flight: deque[Work] = deque()
        self._given_up: list[tuple[int, int]] = []
        """(uid, members) of what the program gave up since the last commit."""
        self._aborted = False
        self.stick = False
        """Whether the collective that is begun next never ends."""

    # ------------------------------------------------------------------ membership
    def join(self, group: Communicator) -> None:
        """The program has it from here on."""
        self._joined[group.number] = (group, [0], {})
        self._publish()

    def give_up(self, group: Communicator) -> None:
        """The program has it no longer."""
        self.wait_for_all()
        of_it = self._marks_of(*self._joined.pop(group.number))
        self._publish()
        self._given_up += [(uid, members) for uid, _, members in of_it]

    def leave(self, silently: bool) -> None:
        """The server is gone from all of them."""
        for link in self._links.values():
            link.leave(link.group.member(self._device.rank), silently)

    @property
    def under_way(self) -> bool:
        """Whether one was begun and not waited for."""
        return bool(self._in_flight)

    def abort(self) -> None:
        """Who waits for a peer gets an error."""
        self._aborted = True
        self.leave(silently=False)
        for work in list(self._in_flight):
            work.fail("communication was aborted")

    def forget(self) -> None:
        """The state goes back: what was begun never ends."""
        self._in_flight.clear()
        self._links = {}

    def done(self) -> dict[int, tuple[int, dict[tuple[int, int], int]]]:
        """Of each communicator: its collectives and messages so far."""
        return {n: (sequence[0], dict(messages)) for n, (_, sequence, messages) in self._joined.items()}

    def stand(self, commit: Commit | None, groups: list[Communicator]) -> None:
        """As it was at a commit; None: at the beginning."""
        joined = commit.joined if commit is not None else {}
        self._given_up = []
        self._joined = {n: (groups[n], [done], dict(messages)) for n, (done, messages) in joined.items()}
        self._publish()

    def _publish(self) -> None:
        assert self._device.log is not None
        self._device.log.joined = [
            (group.uid, 0, sequence[0], len(group.ranks)) for group, sequence, _ in self._joined.values()
        ]

    def marks(self) -> tuple[list[tuple[int, int, int]], list[int]]:
        """Communicators, and how many members each has, as Communicators::marks makes them at a commit."""
        found = [mark for joined in self._joined.values() for mark in self._marks_of(*joined)]
        found += [(uid, MASK, members) for uid, members in self._given_up]
        self._given_up = []
        return [(uid, 0, done) for uid, done, _ in found], [members for _, _, members in found]

    def _marks_of(
        self, group: Communicator, sequence: list[int], messages: dict[tuple[int, int], int]
    ) -> list[tuple[int, int, int]]:
        """(uid, done, members) of a communicator, and of the messages on it for each direction."""
        used = int(bool(sequence[0] or messages))
        marks = [(group.uid, sequence[0] + used, len(group.ranks))] if len(group.ranks) > 1 else []
        for sender, receiver in sorted({*messages, *((to, sender) for sender, to in messages)}):
            pair = (sender << 32 | receiver) + 1
            uid = group.uid ^ (pair * 0x9E3779B97F4A7C15 & MASK)
            marks.append((uid, messages.get((sender, receiver), 0), 2))
        return marks

    def rebuild(self, finished: Callable[[], None]) -> None:
        """Connect those that were in use, one after the other; then call `finished`."""
        device = self._device
        self._aborted = False
        self._links = {}
        used = sorted(
            (
                group
                for group, sequence, messages in self._joined.values()
                if (sequence[0] or messages) and len(group.ranks) > 1
            ),
            key=lambda group: group.number,
        )

        def connect() -> None:
            while used and not self._aborted and device.process.running:
                group = used[0]
                link = self._links.get(group.number)
                if link is None:
                    link = self._links[group.number] = device.world.fabric.link(group)
                    link.connect(device, group.member(device.rank))
                if not link.connected:
                    link.when_connected(connect)
                    return
                del used[0]
            finished()

        connect()

    # ------------------------------------------------------------------ records
    def run(self, do: Do, record: Record) -> None:
        """Begin a collective, a send or a receive; raises Blocked and CollectiveFailed."""
        device = self._device
        group, log = record[1], device.log
        assert log is not None
        _, sequence, messages = self._joined[group.number]
        link = self._connected(group)
        me = group.member(device.rank)
        if do is Do.COLLECTIVE:
            _, _, kind, root, given, result = record
            self.wait_for(given)
            self.wait_for(result)
            value = int.from_bytes(device.table.read(given), "little")
            device.table.write(result, b"\xee" * 8)
            work = Work(device, (given, result), result)
            self._in_flight.append(work)
            done = log.program.done(("collective", group.number), device.index)
            sequence[0] += 1
            work.place = group.uid, sequence[0]
            link.collective(me, done, kind, root, value, work, stuck=self.stick)
            self.stick = False
            self._publish()
        elif do is Do.SEND:
            _, _, peer, handle, buffered = record
            self.wait_for(handle)
            work = Work(device, (handle,), None)
            self._in_flight.append(work)
            value = int.from_bytes(device.table.read(handle), "little")
            done = log.program.done(("message", group.number, log.rank, group.ranks[peer]), device.index)
            link.send(me, peer, done, value, work, buffered)
            messages[me, peer] = messages.get((me, peer), 0) + 1
        else:
            _, _, peer, handle = record
            self.wait_for(handle)
            device.table.write(handle, b"\xee" * 8)
            work = Work(device, (handle,), handle)
            self._in_flight.append(work)
            done = log.program.done(("message", group.number, group.ranks[peer], log.rank), device.index)
            link.receive(me, peer, done, work)
            messages[peer, me] = messages.get((peer, me), 0) + 1

    def _connected(self, group: Communicator) -> Link:
        device = self._device
        link = self._links.get(group.number)
        if link is None:
            if self._aborted:
                raise CollectiveFailed("communication was aborted")
            link = self._links[group.number] = device.world.fabric.link(group)
            link.connect(device, group.member(device.rank))
        if not link.connected:
            link.when_connected(device.go_on)
            index, generation = device.index, device.generation
            device.world.later(CONNECT_WITHIN, lambda: self._not_connected(link, index, generation))
            raise Blocked
        return link

    def _not_connected(self, link: Link, index: int, generation: int) -> None:
        device = self._device
        same = (device.index, device.generation) == (index, generation)
        if device.state == "running" and not link.connected and same:
            device.collective_failed("cannot connect to the peers: wait timeout")

    def wait_for(self, *handles: int) -> None:
        """Until nothing in flight touches these; raises Blocked and CollectiveFailed."""
        for handle in handles if self._in_flight else ():
            while any(handle in work.buffers for work in self._in_flight):
                self._finish_oldest()

    def wait_for_all(self) -> None:
        """Until nothing is in flight; raises Blocked and CollectiveFailed."""
        while self._in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        work, table = self._in_flight[0], self._device.table
        if work.failed:
            raise CollectiveFailed(work.failed)
        if not work.done:
            work.waiting = True
            raise Blocked(*work.place)
        self._in_flight.popleft()
        if work.output is not None and work.output in table.handles():
            assert work.result is not None
            table.write(work.output, work.result.to_bytes(8, "little"))
