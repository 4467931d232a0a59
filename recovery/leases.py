"""Which session holds which device, and which devices are never to be used again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from recovery.injector import Refused
from recovery.jobs import Session
from recovery.servers import ServerPool


class Leases:
    """The devices of a node.  A device that failed is fenced: nobody gets it until proxyd is started anew."""

    def __init__(self, names: list[str], pool: ServerPool) -> None:
        self._names = names
        self._pool = pool
        self._holders: dict[int, Session] = {}
        self._claimed: set[int] = set()
        self.fenced: dict[int, str] = {}
        """Device -> what happened to it."""

    def holder(self, index: int) -> Session | None:
        """The session that leases a device."""
        return self._holders.get(index)

    def free(self) -> list[int]:
        """Devices that somebody could get now."""
        return [
            index
            for index in range(len(self._names))
            if index not in self._holders and index not in self._claimed and index not in self.fenced
        ]

    def place(self, asked: int) -> int:
        """The device for a worker that asks for cuda:`asked`; raises Refused if none is left.

        It is that very one, but for one that has failed, or that a rank whose own failed has moved to.
        """
        holder = self._holders.get(asked)
        if asked not in self.fenced and (holder is None or holder.asked_index == asked):
            return asked
        free = self.free()
        if free:
            return free[0]
        why = self.fenced.get(asked) or f"rank {holder.rank if holder else '?'} had to move to it"
        raise Refused(f"{self._names[asked]} cannot be had ({why}), and no other device is free")

    @contextmanager
    def claim(self, index: int) -> Iterator[None]:
        """Keep others away while a session opens; raises Refused if another job is at it this very moment."""
        if index in self._claimed:
            raise Refused(f"{self._names[index]} is being leased to another job")
        self._claimed.add(index)
        try:
            yield
        finally:
            self._claimed.discard(index)

    def hold(self, session: Session) -> None:
        """The session has its device from here on."""
        self._holders[session.device_index] = session

    def release(self, session: Session) -> None:
        """The session has ended."""
        if self._holders.get(session.device_index) is session:
            del self._holders[session.device_index]
        if session.device_index not in self.fenced:
            self._pool.unlease(session.device)

    def fence(self, session: Session, reason: str) -> None:
        """Its device has failed."""
        self.fenced.setdefault(session.device_index, reason)

    def is_homeless(self, session: Session) -> bool:
        """Whether it needs another device."""
        return session.device_index in self.fenced

    def move(self, session: Session) -> bool:
        """Give a session whose device has failed a free one; whether there was one."""
        free = self.free()
        if not free:
            return False
        del self._holders[session.device_index]
        session.device_index, session.device = free[0], self._names[free[0]]
        self._holders[free[0]] = session
        self._pool.lease(session.device)
        return True
