"""One simulated job: ranks, servers, network and pool, steered by the real coordinator and planner."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

from simulation import oracle
from simulation.device import Device
from simulation.fabric import Fabric, Violation
from simulation.injector import Injector
from simulation.judgement import judge
from simulation.layouts import Job, Shape
from simulation.log import Log
from simulation.moves import Moves
from simulation.pool import Pool
from simulation.process import Process
from simulation.programs import Key, mix
from simulation.roll_forward import is_of_the_step
from simulation.schedules import Move, Schedule
from simulation.steering import Decisions, Stub
from simulation.storage import Storage
from simulation.virtual_time import VirtualLoop
from understudy import replay
from understudy.recovery.agent_api.commands import NotDone
from understudy.recovery.agent_api.server import Server
from understudy.recovery.base.control import address, pb
from understudy.recovery.base.timing import TIMING
from understudy.recovery.host.evidence import rank_facts
from understudy.recovery.host.leases import Leases
from understudy.recovery.host.placement import HostPlacement
from understudy.recovery.host.servers import ServerPool
from understudy.recovery.job import recovery_round
from understudy.recovery.job.coordinator import Coordinator
from understudy.recovery.job.server_steps import policy
from understudy.recovery.machine.processes import Watched
from understudy.recovery.planning.facts import Facts
from understudy.recovery.planning.planner import ENDS, MAXIMUM_ATTEMPTS, Plan, PlanName, plan
from understudy.recovery.planning.restarts import Restart
from understudy.recovery.planning.roll_forward import RollForward
from understudy.recovery.snapshots.persistence import Persistence
from understudy.recovery.snapshots.restore.restorer import Restorer
from understudy.recovery.state.jobs import Job as RecoveryJob
from understudy.recovery.state.jobs import Session
from understudy.recovery.upkeep.floors import FloorKeeper
from understudy.recovery.upkeep.snapshots import LOOK_S, SnapshotKeeper
from understudy.recovery.upkeep.validation import ValidationSchedule

LONGEST = 4000.0
"""Virtual seconds after which a job should have ended, whatever happened to it."""
SPARE_DEVICES = 2


class World:
    """Everything of one schedule."""

    def __init__(self, seed: int, shape: Shape, schedule: Schedule, loop: VirtualLoop) -> None:
        self.seed = seed
        self.shape = shape
        self.schedule = schedule
        self.loop = loop
        self.late_calls = schedule.late_calls
        self.shadow_limit = schedule.shadow_limit
        self._writer = writer = Job(shape, seed)
        self.programs = writer.programs()
        self.groups = writer.groups
        self.first_random = mix(mix(seed, 1), 7)
        self.fabric = Fabric(self.later, mix(seed, 14))
        self.logs = [Log(rank, program, self._lost) for rank, program in enumerate(self.programs)]
        self.injector = Injector(self)
        self.devices: dict[str, Device] = {}
        self.speaker: Device | None = None
        """Who tells something of its rank."""
        self.workers: list[Process] = []
        self.faults: Counter[str] = Counter()
        self.plans: Counter[str] = Counter()
        self.violations: list[str] = []
        self.events = 0
        self.given_up: set[str] = set()
        self.copied = 0
        self.standings = 0
        """How often a server stood between two passes of a validation."""
        self.refusals = 0
        """How often a server could not be rolled through its optimizer step."""
        self._rolled: dict[int, RollForward | None] = {}
        self._targets: dict[int, int] = {}
        self._counts: dict[int, dict[Key, tuple[int, int]]] = {}
        self._closed = 0
        self._numbers = itertools.count(1)
        self._over = asyncio.Event()
        self._stirred: list[asyncio.Event] = []
        self._begin()

    def _begin(self) -> None:
        """What recovers the job."""
        schedule, shape = self.schedule, self.shape
        self._job = RecoveryJob("simulated", None, [])
        self.pool = Pool(self, schedule.spares)
        keeps = schedule.optimizer_preimages
        pool = cast(ServerPool, self.pool)
        self.leases = Leases([f"cpu:{rank}" for rank in range(shape.world + SPARE_DEVICES)], pool)
        self.storage = Storage(self) if schedule.storage else None
        placement, restorer = HostPlacement(pool, self.leases), cast(Restorer | None, self.storage)
        self.decisions = Decisions(self.job)
        more: dict[str, Any] = {"restorer": restorer, "decided": self.decisions.write}
        self.coordinator = Coordinator(self.job, placement, keeps, self._follow, **more)
        self.validations = ValidationSchedule(self.job, 1 if schedule.validates else 0)
        vars(self.validations)["_step"] = schedule.validates
        self.keeper = FloorKeeper(self.job, self.coordinator, keeps, self.validations)
        persistence = cast(Persistence | None, self.storage)
        self.snapshots = SnapshotKeeper(self.job, self.coordinator, 0.5, persistence)
        vars(self.snapshots)["_enough_memory"] = lambda sessions: True
        self.moves = Moves(self, self.leases, self.snapshots)

    @property
    def job(self) -> RecoveryJob:
        """The one that there is."""
        return self._job

    # ------------------------------------------------------------------ the loop
    def later(self, seconds: float, callback: Callable[[], Any]) -> asyncio.TimerHandle:
        """Call back in a while."""
        return self.loop.call_later(seconds, callback)

    def violation(self, text: str) -> Violation:
        """Remember what must not have happened."""
        self.violations.append(f"{text} (at {self.loop.time():.6f} s)")
        self._over.set()
        return Violation(text)

    def _unhandled(self, loop: Any, context: dict[str, Any]) -> None:
        problem = context.get("exception")
        if not self.violations:
            where = traceback.format_tb(problem.__traceback__)[-1:] if problem is not None else []
            said = f"{type(problem).__name__}: {problem} ({context.get('message')})"
            self.violations.append("\n".join([said, *where]))
        self._over.set()

    def count_event(self) -> None:
        """After every event: what must hold at any time."""
        self.events += 1
        if self.coordinator._task is None and self.job.generation:
            if self.shape.world > 16 and self.events % 64:
                return
            for session in self.job.sessions.values():
                if session.state == "recovering":
                    raise self.violation(f"rank {session.rank} is left recovering")

    # ------------------------------------------------------------------ running it
    async def run(self) -> None:
        """Until every worker has ended and its session is closed."""
        self.loop.set_exception_handler(self._unhandled)
        original = vars(recovery_round)["plan"]
        vars(recovery_round)["plan"] = self._observed_plan
        keepers = [asyncio.create_task(self._keep_floors())]
        if self.schedule.snapshots:
            keepers.append(asyncio.create_task(self._keep_snapshots()))
        try:
            self._open()
            for fault in self.schedule.faults:
                self.injector.arrange(fault)
            keepers += [asyncio.create_task(self._move_at(move)) for move in self.schedule.moves]
            try:
                await asyncio.wait_for(self._over.wait(), LONGEST)
            except TimeoutError:
                late = [f"{log.rank} at {log.cursor_index}" for log in self.logs if not log.session_state]
                raise self.violation(f"no end: ranks {', '.join(late[:8])}") from None
            if not self.violations:
                await self.coordinator.finish()
        finally:
            vars(recovery_round)["plan"] = original
            for keeper in keepers:
                keeper.cancel()
            await self.coordinator.cancel()
            for ended in await asyncio.gather(*keepers, return_exceptions=True):
                if not isinstance(ended, asyncio.CancelledError | Violation | None):
                    self.violations.append(f"a keeper died: {ended!r}")
        if not self.violations:
            judge(self)

    def _open(self) -> None:
        self.workers = [Process(-rank - 1) for rank in range(self.shape.world)]
        for rank, log in enumerate(self.logs):
            device = self.new_device()
            session = Session(
                job=self.job, rank=rank, world=self.shape.world, device=f"cpu:{rank}", device_index=rank,
                threads=1, worker=cast(Watched, self.workers[rank]), directory=Path(f"/log-{rank}"),
                log=cast(replay.Log, log), server=cast(Server, device),
            )  # fmt: skip
            self.job.sessions[rank] = session
            self.leases.hold(session)
            log.takes_snapshots = self.schedule.snapshots
            self.validations.arm(session)
            device.attach(
                pb.AttachRequest(
                    rank=rank, policy=policy(session.world, self.schedule.optimizer_preimages), run=True
                )
            )
            if self.schedule.believes:
                device.inbox = self._writer.looks_replicated(rank)
            self._follow(session)
        if self.schedule.believes:
            believed = {
                rank: frozenset(self._writer.looks_replicated(rank)) for rank in range(self.shape.world)
            }
            vars(self.keeper._tracker)["_previous"] = believed
            vars(self.keeper).update(_checked=1, _next_check=3)  # before that, digests are not there yet
        self.pool.fill()

    def new_device(self) -> Device:
        """A device server that has started."""
        device = Device(self, next(self._numbers))
        self.devices[address(device.socket)] = device
        return device

    def stub(self, device: Device) -> Stub:
        """Its remote control."""
        return Stub(device)

    def device_at(self, name: str) -> Device | None:
        """Who listens at an address."""
        return self.devices.get(name)

    def device_of(self, session: Session) -> Device:
        """The session's present server."""
        return cast(Device, session.server)

    def is_decided(self, generation: int) -> bool:
        """Whether it was written down what is done in it."""
        return generation == self.decisions.written

    # ------------------------------------------------------------------ proxyd's agent
    def _follow(self, session: Session) -> None:
        device = self.device_of(session)
        device.followers.append(lambda: self._server_ended(session, device))

    def _server_ended(self, session: Session, device: Device) -> None:
        if session.server is cast(Server, device) and session.worker.running:
            self.coordinator.server_died(session)

    def collective_failed(self, rank: int, generation: int, message: str, index: int) -> None:
        """A device server reports a failed collective."""
        session = self.job.sessions.get(rank)
        if session is not None:
            self.coordinator.collective_failed(session, generation, message, index)
            self.count_event()

    def call_failed(self, rank: int, generation: int, suspect: bool, index: int) -> None:
        """A device server reports that a call failed by its driver's doing."""
        session = self.job.sessions.get(rank)
        if session is not None:
            self.coordinator.call_failed(session, generation, suspect, "injected", index)
            self.count_event()

    def restart_refused(self, rank: int, generation: int) -> None:
        """A device server reports that it cannot be rolled through the step that it is in."""
        self.refusals += 1
        session = self.job.sessions.get(rank)
        if session is not None:
            self.coordinator.restart_refused(session, generation, "refused", session.log.cursor_index)
            self.count_event()

    def validation_reached(self, rank: int, generation: int) -> None:
        """A device server reports that it stands between the two passes of a validation."""
        self.standings += 1
        session = self.job.sessions.get(rank)
        if session is not None:
            self.coordinator.validation_reached(session, generation)
            self.count_event()

    def _lost(self, log: Log) -> None:
        self.later(0.004, lambda: self.leaves(log))

    def leaves(self, log: Log) -> None:
        """The worker of a log ends."""
        self.worker_ended(log.rank)

    def log_of(self, device: Device, request: Any) -> Log:
        """Which one a server is told to take."""
        return self.logs[request.rank]

    def worker_is_done(self, device: Device, log: Log) -> None:
        """A program has been run to its end: compare, then its worker leaves."""
        contents = log.program.contents
        alive = {row[0]: row for row in device.table.rows()}
        if alive.keys() != contents.keys():
            raise self.violation(f"rank {log.rank} ends with other buffers than an undisturbed run")
        for handle, content, _, available in alive.values():
            if available and int.from_bytes(content, "little") != contents[handle]:
                raise self.violation(f"rank {log.rank} ends with other bytes in buffer {handle}")
        if len(log.told) != len(log.program.reads):
            raise self.violation(f"rank {log.rank} was not told every value it asked for")
        self.later(device.chance.uniform(0.001, 0.03), lambda: self.leaves(log))

    def worker_ended(self, rank: int) -> None:
        """Its process is gone, whatever its program had still to do."""
        worker = self.workers[rank]
        if worker.running:
            worker.running = False
            self.later(0.001, lambda: self._end(rank))

    def _end(self, rank: int) -> None:
        """As HostAgent._end does it."""
        session = self.job.sessions[rank]
        session.state = "ended"
        self.job.last_facts[rank] = rank_facts(session, self.schedule.optimizer_preimages)
        self.job.departed[rank] = self.logs[rank].session_state == 2
        self.coordinator.worker_left(session)
        device = self.device_of(session)
        device.retired = True
        device.kill()
        del self.job.sessions[rank]
        self.leases.release(session)
        session.closed.set()
        self.loop.create_task(self._tell_end())
        self.stir()
        self._closed += 1
        if self._closed == self.shape.world:
            self._over.set()

    async def _tell_end(self) -> None:
        async with self.job.changed:
            self.job.changed.notify_all()

    async def _move_at(self, move: Move) -> None:
        await asyncio.sleep(move.at)
        await self.moves.order(move)

    # ------------------------------------------------------------------ what must hold
    def tell(self, log: Log, index: int, value: int) -> None:
        """A value that the worker asked for: always the one of an undisturbed run."""
        if value != log.program.reads[index]:
            raise self.violation(f"rank {log.rank} reads another value at record {index}")
        if index in log.told:
            log.replies_compared += 1
            return
        log.told[index] = value
        self.later(0.0005, lambda: self._extend(log))

    def _extend(self, log: Log) -> None:
        log.extend()
        session = self.job.sessions.get(log.rank)
        if session is not None:
            self.device_of(session).go_on()

    def resumed(self, device: Device, log: Log) -> None:
        """Whoever resumes in a generation stands at the same cut as everybody else who did."""
        if not device.generation:
            return
        counts = self._counts.setdefault(device.generation, {})
        for key in log.program.marks:
            done = log.program.done(key, device.index)
            other, peer = counts.setdefault(key, (done, log.rank))
            if other != done:
                raise self.violation(
                    f"ranks {peer} and {log.rank} resume with {other} and {done} of {key} in generation "
                    f"{device.generation}"
                )

    def about_to_copy(self, device: Device, holder: Device, rank: int, copy: Any) -> None:
        """State may only come from a rank that stands at its commit and has not touched anything since."""
        self.copied += 1
        if (
            holder.rank != rank
            or holder.state not in ("parked", "ended")
            or holder.stands != self._targets.get(rank)
        ):
            raise self.violation(
                f"rank {device.rank} copies from rank {rank}, which may have changed its state "
                f"({holder.state}, stands at {holder.stands}, should at {self._targets.get(rank)})"
            )
        roll = self._rolled.get(device.rank)
        mine = self.logs[device.rank].entry(self._targets[device.rank])
        if not is_of_the_step(copy, mine, self.logs[rank], roll):
            raise self.violation(
                f"rank {device.rank} copies bytes of buffer {copy.handle} that are of no step of its own"
            )

    def _observed_plan(self, facts: Facts) -> Plan:
        chosen = plan(facts)
        self.plans[chosen.name.value] += 1
        self._targets = chosen.targets
        self._rolled = {a.rank: a.roll_forward for a in chosen.actions if isinstance(a, Restart)}
        if (chosen.name is PlanName.ROLL_FORWARD) != any(self._rolled.values()):
            raise self.violation(f"the plan is called {chosen.name.value}, which it is not")
        if chosen.name in ENDS:
            self.given_up.add(chosen.reason)
            if (text := self._undue(facts)) is not None:
                raise self.violation(f"gave up ({chosen.reason}) though {text}")
        return chosen

    def stir(self) -> None:
        """Something happened that the keepers of floors and snapshots look for."""
        for stirred in self._stirred:
            stirred.set()

    async def _stirred_again(self) -> None:
        """Until then looks would see nothing new: a minute in which all wait need not cost thousands."""
        stirred = asyncio.Event()
        self._stirred.append(stirred)
        await stirred.wait()
        self._stirred.remove(stirred)

    async def _keep_floors(self) -> None:
        """As FloorKeeper.run does it."""
        while True:
            moved = False
            if not self.coordinator.restoring and self.job.sessions:
                with contextlib.suppress(NotDone):
                    moved = await self._observed_look()
            if not moved:
                await self._stirred_again()
            await asyncio.sleep(TIMING.look_busy_s if moved else TIMING.look_idle_s)

    async def _observed_look(self) -> bool:
        """What floors let go of cannot be had again: together they must be a cut.

        Only those that a look has moved: a restore takes one rank's down to its snapshot by itself.
        """
        former = {log.rank: log.floor_commit for log in self.logs}
        moved = await self.keeper.look()
        sessions = self.job.active_sessions()
        if moved and len(sessions) == self.shape.world:
            floors = {log.rank: log.floor_commit for log in self.logs}
            positions = {rank: self.logs[rank].entry(n).index if n else 0 for rank, n in floors.items()}
            if floors != former and not oracle.consistent(self, positions):
                raise self.violation(f"floors {floors} are no cut")
        return moved

    async def _keep_snapshots(self) -> None:
        """As SnapshotKeeper.run does it, with the loop's time, and more often than every half second."""
        while True:
            if not self.coordinator.restoring:
                self.snapshots.look(now := self.loop.time())
                vars(self.snapshots)["_due_s"] = min(vars(self.snapshots)["_due_s"], now + 0.05)
                self._check_snapshots()
            await self._stirred_again()
            await asyncio.sleep(LOOK_S)

    def _check_snapshots(self) -> None:
        """What is kept for the worst case must be a cut."""
        sessions = self.job.active_sessions()
        kept = {s.rank: [one for one in self.logs[s.rank].published
                         if one.serial == self.logs[s.rank].snapshot_floor] for s in sessions}  # fmt: skip
        if len(sessions) == self.shape.world and all(kept.values()):
            positions = {rank: one[0].commit.index for rank, one in kept.items()}
            if not oracle.consistent(self, positions):
                raise self.violation(f"snapshots at records {positions} are no cut")

    def request_arrives(self, call: str, nth: int) -> None:
        """At a device server, for the `nth` time."""

    def is_excused(self, why: str) -> bool:
        """Whether a rank may be lost for that reason, though no plan says so."""
        return False

    def may_be_open(self, log: Log) -> bool:
        """Whether a worker may have gone before its program was over, and nobody told it why."""
        return self.schedule.leaving

    def may_have_failed(self, facts: Facts) -> Collection[int]:
        """Ranks whose records may be what a job is given up for."""
        return facts.fault.ranks

    def _undue(self, facts: Facts) -> str | None:
        """Why a job should not have been given up, or None."""
        if facts.fault.attempts >= MAXIMUM_ATTEMPTS:
            failed = self.may_have_failed(facts)
            worst = max((n for (r, _), n in self.injector.own_failures.items() if r in failed), default=0)
            if worst < MAXIMUM_ATTEMPTS:
                return f"no record failed more than {worst} times by itself"
            return None
        if len(facts.homeless) > facts.free_devices:
            return None
        if facts.departed or facts.not_replayable or not facts.ranks:
            return None
        cut = oracle.reachable(self, facts)
        return None if cut is None else f"{cut} could have been reached"
