"""Moves that somebody wishes though nothing is broken: a rank leaves its device for another one of this host.

Its worker stays where it is.  All ranks of its job park and go back to a commit; its own server is where the
state comes from, and ends only when the new one holds it.  A rank without pre-images, because it is alone,
goes by a snapshot that is taken for this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.errors import Refused
from understudy.recovery.config.settings import Settings
from understudy.recovery.history.events import move_failed
from understudy.recovery.host.injector import account_of
from understudy.recovery.host.leases import Leases
from understudy.recovery.host.servers import READY_WITHIN, ServerPool
from understudy.recovery.job.coordinator import Coordinator
from understudy.recovery.job.undisturbed import undisturbed
from understudy.recovery.migration.places import Place
from understudy.recovery.planning.facts import FaultKind
from understudy.recovery.planning.planner import Plan, PlanName
from understudy.recovery.spanning.interface import JobSpans
from understudy.recovery.state.jobs import Session
from understudy.recovery.upkeep.snapshots import SnapshotKeeper

log = structlog.get_logger()

MOST_TRIES = 3
"""Moves begun before it is given up: faults may come between."""
LOOK_S = 0.01
SNAPSHOT_WITHIN = 10.0
"""Seconds that a snapshot may take to come; training goes on meanwhile."""


class PlannedMoves:
    """Carries out the planned moves of one host."""

    def __init__(
        self,
        settings: Settings,
        leases: Leases,
        pool: ServerPool,
        coordinators: Mapping[str, Coordinator],
        snapshots: Mapping[str, SnapshotKeeper],
        spans: Mapping[str, JobSpans],
        note: Callable[[], None],
    ) -> None:
        """By the names of jobs.  `spans` take ranks to other hosts.

        `note`: what has changed has consequences from here on.
        """
        self._here, self._devices = settings.membership.host, settings.devices.names
        self._leases, self._pool = leases, pool
        self._coordinators, self._snapshots = coordinators, snapshots
        self._spans, self._note = spans, note
        self._under_way: set[Session] = set()

    async def drain(self, place: Place) -> str:
        """Let nobody have a device, and whoever holds it go elsewhere; raises Refused: nothing changed.

        Without a device all of this host, which goes as far as it can.
        """
        if not place.device and place.host in ("", self._here):
            return await self._drain_all()
        name, index = self._device(place, "drained")
        return await self._drain(name, index, beside=True)

    async def _drain_all(self) -> str:
        """Each of its own accord: ranks that cannot leave keep their devices."""
        told, stays = [], []
        devices = list(enumerate(self._devices))
        devices.sort(
            key=lambda device: self._leases.holder(device[0]) is not None
        )  # so that none moves there
        for index, name in devices:
            if index in self._leases.draining or index in self._leases.fenced:
                continue
            try:
                told.append(await self._drain(name, index, beside=False))
            except Refused as refusal:
                stays.append(str(refusal))
        if stays:
            raise Refused("; ".join([*stays, *told]))
        return "\n".join(told) or "nothing was left to be drained"

    async def _drain(self, name: str, index: int, *, beside: bool) -> str:
        """`beside`: its rank may go to another device of this host."""
        if (failed := self._leases.fenced.get(index)) is not None:
            raise Refused(f"{name} has failed ({failed}): nobody gets it anyway")
        if index in self._leases.draining:
            holder = self._leases.holder(index)
            raise Refused(
                f"{name} is drained already" if holder is None else f"{name} is being drained already"
            )
        if self._leases.is_claimed(index):
            raise Refused(f"a session is being opened on {name}: try again")
        holder = self._leases.holder(index)
        if holder is None or not holder.active:
            self._leases.drain(index)
            self._note()
            if holder is None:
                return f"{name} is drained: no session held it"
            return (
                f"{name} is drained once the worker of rank {holder.rank}, whose session is over, has ended"
            )
        self._check_sound(holder)
        here = self._leases.free() if beside and self._led_here(holder) else []
        self._leases.drain(index)
        if here:
            return f"{name} is drained; {await self._move(holder, here[0])}"
        try:
            return f"{name} is drained; {await self._go_far(holder, Place('', ''), beside)}"
        except BaseException:
            if holder.active and holder.device_index == index:
                self._leases.undrain(index)
            self._note()
            raise

    async def _go_far(self, session: Session, place: Place, beside: bool) -> str:
        """To another host; raises Refused."""
        spans = self._spans.get(session.job.name)
        if spans is None or session.job.span is None:
            what = "no other device is free to take it" if beside else "its job can have no other host"
            raise Refused(
                f"rank {session.rank} of job {session.job.name} has {session.device}, and {what}: nothing "
                "has changed (start proxyd with more --devices than ranks, or several with --etcd)"
            )
        return await spans.move(session, place)

    def _led_here(self, session: Session) -> bool:
        return session.job.name in self._coordinators

    def undo(self, place: Place) -> str:
        """Let whoever comes have a device again; raises Refused."""
        name, index = self._device(place, "given back")
        if (failed := self._leases.fenced.get(index)) is not None:
            self._leases.draining.discard(index)
            self._leases.lift(index)
            self._note()
            return f"{name} can be had again (it had failed: {failed})"
        if index not in self._leases.draining and (worn := self._leases.worn.get(index)) is not None:
            self._leases.lift(index)
            self._note()
            return f"{name} is as good as others again (it was worn: {worn})"
        if index not in self._leases.draining:
            raise Refused(f"{name} is not drained")
        holder = self._leases.holder(index)
        if holder is not None and self.is_under_way(holder):
            raise Refused(f"{name} is being drained: wait until rank {holder.rank} has left it")
        self._leases.undrain(index)
        self._note()
        return f"{name} can be had again"

    async def migrate(self, session: Session, place: Place) -> str:
        """Take a rank to a device of this host or another; raises Refused, and then it is where it was."""
        if session.host or place.host not in ("", self._here):
            return await self._go_far(session, Place(place.host or self._here, place.device), beside=False)
        name, index = self._device(place, "moved to")
        if index == session.device_index:
            raise Refused(f"rank {session.rank} is on {name} already")
        self._check_sound(session)
        if index not in self._leases.free():
            raise Refused(f"rank {session.rank} cannot move to {name}: {self._why_not_free(index)}")
        return await self._move(session, index)

    async def go_on(self, session: Session) -> None:
        """With a move that a proxyd began which died."""
        if session.destination is None:
            return
        try:
            told = await self._move(session, session.destination)
        except Refused as refusal:
            log.warning("a planned move came to nothing", rank=session.rank, problem=str(refusal))
        else:
            log.info("a planned move was done again", rank=session.rank, told=told)

    def is_under_way(self, session: Session) -> bool:
        """Whether a rank is being moved."""
        return session in self._under_way

    # ------------------------------------------------------------------ what may be asked
    def _device(self, place: Place, what: str) -> tuple[str, int]:
        if place.host not in ("", self._here):
            raise Refused(f"{place} is another host's than {self._here}: ask its own proxyd")
        if not place.device:
            raise Refused(f"a whole host cannot be {what}: name one of its devices")
        return place.device, self._leases.index(place.device)

    def _check_sound(self, session: Session) -> None:
        if self.is_under_way(session):
            raise Refused(f"rank {session.rank} is on its way to another device already")
        if session.moving is not None:
            raise Refused(f"the worker of rank {session.rank} is being moved: try again afterwards")

    def _why_not_free(self, index: int) -> str:
        if (failed := self._leases.fenced.get(index)) is not None:
            return f"it has failed ({failed})"
        if index in self._leases.draining:
            return "it is drained (recoveryctl drain --undo gives it back)"
        if (holder := self._leases.holder(index)) is not None:
            return f"rank {holder.rank} of job {holder.job.name} has it"
        return "it is kept for another session"

    # ------------------------------------------------------------------ what is done
    async def _move(self, session: Session, destination: int) -> str:
        """A sentence once it is there, or its session is over; raises Refused: it is where it was."""
        left = session.device_index
        problem = ""
        self._under_way.add(session)
        self._leases.keep(destination, session)
        try:
            for _ in range(MOST_TRIES):
                session.destination = destination
                self._note()
                problem = await self._try(session, destination)
                if session.device_index == destination:
                    return f"rank {session.rank} runs on {session.device}\n{problem}"
                if not session.active:
                    return f"the session of rank {session.rank} is over"
            step = session.log.step
            session.job.history.add(move_failed(session.job.name, session.rank, step, problem))
            raise Refused(f"rank {session.rank} stays on {session.device}: {problem}")
        except BaseException:
            if left in self._leases.draining and session.device_index == left:
                self._leases.undrain(left)
            raise
        finally:
            self._under_way.discard(session)
            self._leases.let_go(destination)
            if session.device_index != destination:
                session.destination = None
            self._note()

    async def _try(self, session: Session, destination: int) -> str:
        """An account of what was done, or why nothing was."""
        job = session.job
        coordinator = self._coordinators.get(job.name)
        if coordinator is None:
            assert job.span is not None
            raise Refused(f"host {job.span.leader} leads job {job.name}: ask its proxyd")
        await undisturbed(session, coordinator)
        if not session.active or session.device_index == destination:
            return "a recovery brought it there"
        await self._server_ready(session, self._leases.name(destination))
        return await self.carry_out(session, coordinator)

    async def carry_out(self, session: Session, coordinator: Coordinator) -> str:
        """Take a rank to where it is to go; an account of what was done, or why nothing was."""
        job = session.job
        way = coordinator.way_to_move(session)
        if _needs_snapshot(way, session):
            await self._snapshot(session)
            way = coordinator.way_to_move(session)
        if coordinator.recovering:
            return "faults came between"
        if session.destination is None and not session.destination_host:
            return "a recovery came between, and it brought it there or found that it cannot be"
        if session.rank not in way.replaced:
            raise Refused(f"rank {session.rank} cannot be moved now: {way.reason}")
        before = len(job.recoveries)
        session.declined = ""
        coordinator.move(session)

        def outcome() -> pb.Recovery | None:
            new = (done for done in job.recoveries[before:] if done.rank == session.rank)
            return next((done for done in new if done.fault == FaultKind.PLANNED_MOVE.value), None)

        async with job.changed:
            await job.changed.wait_for(
                lambda: outcome() is not None or bool(session.declined) or not session.active
            )
        done = outcome()
        return account_of(done) if done is not None else session.declined or "the job was given up"

    async def _server_ready(self, session: Session, name: str) -> None:
        """Before anybody stands still for it; raises Refused."""
        clock = asyncio.get_running_loop().time
        until = clock() + READY_WITHIN
        while self._pool.a_spare(name) is None and session.active:
            if self._pool.broken or clock() > until:
                raise Refused(
                    f"{name} has no device server: {self._pool.broken or 'none became ready in time'}"
                )
            self._pool.fill()
            await asyncio.sleep(LOOK_S)

    async def _snapshot(self, session: Session) -> None:
        """A newer one of all ranks, if one can be had: the move goes back to it."""
        floor = session.log.snapshot_floor
        clock = asyncio.get_running_loop().time
        until = clock() + SNAPSHOT_WITHIN
        while session.active and session.log.snapshot_floor <= floor and clock() < until:
            self._snapshots[session.job.name].hasten()
            await asyncio.sleep(LOOK_S)


def _needs_snapshot(way: Plan, session: Session) -> bool:
    """Whether its own server cannot go back to a commit, and give its state."""
    return session.rank not in way.replaced or way.name is PlanName.RESTORE_SNAPSHOT_REPLAY
