"""Which session holds which device, which are kept for a session, and which nobody gets any more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from understudy.recovery.base.errors import Refused
from understudy.recovery.host.gpu_health import GpuHealth
from understudy.recovery.host.servers import ServerPool
from understudy.recovery.state.jobs import Session


class Leases:
    """The devices of a node.  A device that failed is fenced: nobody gets it until somebody lifts that, or
    until the job ends that had it fail in a drill.  One that is worn is given last.

    One that is drained is kept free until that is undone; while a session holds it, it is yet to leave.
    """

    def __init__(self, names: list[str], pool: ServerPool, health: GpuHealth | None = None) -> None:
        self._names = names
        self._pool = pool
        self.health = health or GpuHealth()
        self._holders: dict[int, Session] = {}
        self._claimed: set[int] = set()
        self.fenced: dict[int, str] = {}
        """Device -> what happened to it."""
        self.worn: dict[int, str] = {}
        """Device -> why another one is better."""
        self._rehearsed: dict[int, tuple[str, int]] = {}
        """Fenced device -> job and rank of the drill that did it."""
        self.draining: set[int] = set()
        self._kept: dict[int, Session] = {}
        """Device -> who is on its way there."""

    def holder(self, index: int) -> Session | None:
        """The session that leases a device."""
        return self._holders.get(index)

    def free(self) -> list[int]:
        """Devices that somebody could get now, those that are worn last."""
        return [index for index in self._unheld() if index not in self.draining]

    def for_arrivals(self) -> list[int]:
        """Likewise; if there is none, those that are drained.

        A worker that was on its way when the last one was drained has nowhere else to go: that device is yet
        to be left then.
        """
        return self.free() or self._unheld()

    def _unheld(self) -> list[int]:
        """Sound devices that nobody has or is to have, drained or not."""
        taken = self._holders.keys() | self._claimed | self.fenced.keys() | self._kept.keys()
        found = (index for index in range(len(self._names)) if index not in taken)
        return sorted(found, key=lambda index: index in self.worn)

    def has_better(self) -> bool:
        """Whether somebody could get a device now that is not worn."""
        return any(index not in self.worn for index in self.free())

    def keep(self, index: int, session: Session) -> None:
        """Nobody but that session gets it."""
        self._kept[index] = session

    def let_go(self, index: int) -> None:
        """Keeps a device no longer."""
        self._kept.pop(index, None)
        self.tell_pool(index)

    def index(self, name: str) -> int:
        """The index of a device; raises Refused if there is none of that name."""
        if name not in self._names:
            raise Refused(f"there is no device {name}; there are: {', '.join(self._names)}")
        return self._names.index(name)

    def name(self, index: int) -> str:
        """The name of a device."""
        return self._names[index]

    def is_claimed(self, index: int) -> bool:
        """Whether a session is being opened on it."""
        return index in self._claimed

    def place(self, asked: int) -> int:
        """The device for a worker that asks for cuda:`asked`; raises Refused if none is left.

        It is that very one, but for one that has failed, that is worn while another is not, or that a rank
        whose own failed has moved to.
        """
        holder = self._holders.get(asked)
        barred = self.fenced.get(asked) or ("it is drained" if asked in self.draining else "")
        if asked in self.worn and self.has_better():
            barred = barred or self.worn[asked]
        coming = self._kept.get(asked)
        if not barred and coming is None and (holder is None or holder.asked_index == asked):
            return asked
        free = self.free()
        if free:
            return free[0]
        mover = holder or coming
        why = barred or f"rank {mover.rank if mover else '?'} had to move to it"
        raise Refused(f"{self._names[asked]} cannot be had ({why}), and no other device is free")

    @contextmanager
    def claim(self, index: int) -> Iterator[None]:
        """Keep others away while a session opens; raises Refused if another job is at it this very moment."""
        if index in self._claimed:
            raise Refused(f"{self._names[index]} is being leased to another job")
        self._claimed.add(index)
        self.tell_pool(index)
        try:
            yield
        finally:
            self._claimed.discard(index)
            self.tell_pool(index)

    def hold(self, session: Session) -> None:
        """The session has its device from here on."""
        self._holders[session.device_index] = session
        self.health.begin(session.device_index)
        self.tell_pool(session.device_index)

    def release(self, session: Session) -> None:
        """The session has ended."""
        if self._holders.get(session.device_index) is session:
            del self._holders[session.device_index]
        self.tell_pool(session.device_index)

    def drain(self, index: int) -> None:
        """Nobody new gets it."""
        self.draining.add(index)
        self.tell_pool(index)

    def undrain(self, index: int) -> None:
        """Whoever comes may have it again."""
        self.draining.discard(index)
        self.tell_pool(index)

    def tell_pool(self, index: int, fill: bool = True) -> None:
        """A server is kept ready for a device while somebody could get it: to be called when that may change.

        One that nobody has is fenced if its Xids forbid its use.
        """
        taken = index in self._holders or index in self._claimed
        if not taken and index not in self._kept and (unusable := self.health.unusable(index)):
            self.fenced.setdefault(index, unusable)
        if taken or index in self.fenced or index in self.draining:
            self._pool.lease(self._names[index])
        else:
            self._pool.unlease(self._names[index], fill)

    def fence(self, session: Session, reason: str) -> None:
        """Its device has failed."""
        self.fenced.setdefault(session.device_index, reason)
        struck = session.job.name, session.rank
        session.job.note_fired(session)
        if session.job.fired("device-gone", session.rank) > list(self._rehearsed.values()).count(struck):
            self._rehearsed[session.device_index] = struck

    def leave(self, session: Session, reason: str) -> None:
        """Its device is worn: it gets a free one that is not."""
        self.worn.setdefault(session.device_index, reason)
        self._move(session, self.free()[0])

    def fence_free(self, index: int, reason: str) -> None:
        """A device that nobody has cannot be used."""
        self.fenced.setdefault(index, reason)
        self.tell_pool(index)

    def lift(self, index: int) -> None:
        """A device that had failed, or was worn, is sound again, as somebody says."""
        self.fenced.pop(index, None)
        self.worn.pop(index, None)
        self._rehearsed.pop(index, None)
        self.health.forget(index)
        self.tell_pool(index)

    def lift_rehearsed(self, job: str) -> None:
        """What failed only because `job` was to rehearse that."""
        for index in [index for index, (name, _) in self._rehearsed.items() if name == job]:
            if unusable := self.health.unusable(index):  # that it tells of since is no rehearsal
                self.fenced[index] = unusable
                del self._rehearsed[index]
            else:
                self.lift(index)

    def is_homeless(self, session: Session) -> bool:
        """Whether it needs another device, and none is kept for it."""
        return session.device_index in self.fenced and session.destination is None

    def move(self, session: Session) -> bool:
        """Give a session whose device has failed a free one; whether there was one."""
        free = self.free()
        if free:
            self._move(session, free[0])
        return bool(free)

    def arrive(self, session: Session) -> None:
        """The session has the device that was kept for it from here on, if one was."""
        if session.destination is not None:
            self._move(session, session.destination)

    def _move(self, session: Session, index: int) -> None:
        left = session.device_index
        del self._holders[left]
        session.device_index, session.device, session.destination = index, self._names[index], None
        self._holders[index] = session
        self.health.begin(index)
        self.tell_pool(index)
        self.tell_pool(left, fill=False)
