"""A simulated device server: runs a program's records on the real rewind rules, one burst at a time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from told_servers import Told

from simulation.account import Account, Tell
from simulation.collectives import Blocked, CollectiveFailed, Collectives
from simulation.floors import Floor
from simulation.log import RING, Commit, Log
from simulation.manifest import describe
from simulation.process import Process
from simulation.programs import Do, Record, mix
from simulation.restoring import Arriving
from simulation.roll_forward import RollForward, RollForwardRefused
from simulation.snapshots import Snapshots
from simulation.stalls import Stall, publish
from simulation.step_digest import StepDigest
from simulation.validation import Patience, Validation, ValidationPause
from understudy import replay

if TYPE_CHECKING:
    from simulation.world import World

AUTOMATIC_COMMIT_RECORDS = 60
"""Records without a commit after which a sync makes one."""
BURST = 6
"""Records a server runs at once, at most."""


class Device(Told):
    """Stands in for `understudy.recovery.agent_api.server.Server`, the process behind it included."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.process = Process(number, self.kill)
        self.device = "cpu:0"
        self.socket = Path(f"/server-{number}")
        self.retired = self.suspect = False
        self.verdict = None
        self.failed_at = -1
        self.chance = random.Random(mix(world.seed, number, 11))
        self.stub = world.stub(self)
        # what the real Server and executor hold
        self.state = "idle"
        self.generation = self.newest_generation = 0
        self.log: Log | None = None
        self.protect = self.optimizer_preimages = False
        self.ran_short = False
        """Whether its device had no memory for the pre-images of the step that it is in."""
        self.table = replay.ByteTable()
        self.random = 0
        self.replicated: set[int] = set()
        self.inbox: set[int] | None = None
        self.index = 0
        self.steps = 0
        self.pending = False
        self.collectives = Collectives(self)
        self.snapshots = Snapshots(self)
        self.validation = Validation()
        self.holding = self.held = False
        """Whether it is to stand still for no fault, and does; it may be let go again."""
        self.roll = RollForward(self.table)
        self.step_digest = StepDigest()
        self.floor = Floor(self)
        self.last_commit = 0
        self.stands: int | None = None
        """The commit that its memory holds unmodified, while it does."""
        self.tempo = self.chance.choice((0.0004, 0.001, 0.002)) * world.schedule.slowness
        self._timer: asyncio.TimerHandle | None = None
        self.stall = Stall()
        self._patience = Patience()
        self._arriving = Arriving()
        self._former_commits: list[Commit] = []
        """Commits of a former server, whose shadows the next commit may overwrite."""
        self.followers: list[Callable[[], None]] = []
        self.account = Account()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def at_work(self) -> bool:
        """Whether its process does something."""
        return self._timer is not None and not self.stall.stands

    @property
    def rank(self) -> int:
        """Whom it serves."""
        return self.log.rank if self.log is not None else -1

    # ------------------------------------------------------------------ life
    def kill(self) -> None:
        """Its process ends."""
        if not self.process.running:
            return
        self.process.running = False
        if self.roll.active and self.state == "running":  # it may have been about to make the step's commit
            self._overwrite_former()
        self._stop("dead")
        self.collectives.leave(silently=not self.retired)
        self.stub.died()
        self.world.later(self.chance.uniform(0.0002, 0.003), self._noticed)

    def _noticed(self) -> None:
        self.process.ended_ns = self.world.loop.nanoseconds()
        self.process.ended.set()
        for follower in self.followers:
            follower()
        self.world.count_event()

    def _stop(self, state: str) -> None:
        self.state, self.held, self.holding = state, False, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.log is not None and state != "dead":
            publish(self, self.log)

    # ------------------------------------------------------------------ execution
    def go_on(self) -> None:
        """Run some records soon."""
        if self.state == "running" and not (self.held or self.stall.stands) and self._timer is None:
            self._timer = self.world.later(self.tempo * self.chance.randint(1, BURST), self._burst)

    def _burst(self) -> None:
        self._timer = None
        log = self.log
        if self.state != "running" or self.held or self.stall.stands or log is None:
            return
        self.world.count_event()
        injector = self.world.injector
        traps = injector.traps.get(log.rank)
        self.stands = None
        try:
            for _ in range(self.chance.randint(1, BURST)):
                if self.index >= log.tail_index:
                    publish(self, log)
                    return
                if traps is not None and self.index in traps and injector.spring(self, self.index):
                    return
                self._record(log, log.program.records[self.index])
                self.index += 1
                log.cursor_index = self.index
                self.held = self.holding and not self._amid_irreversible_step
                if self.state != "running" or self.held:
                    break
        except Blocked as waits:
            publish(self, log, waits)
            return
        except CollectiveFailed as problem:
            publish(self, log)
            self.collective_failed(str(problem))
            return
        except RollForwardRefused:
            publish(self, log)
            self._stop("parked")
            self._tell_soon(self.world.restart_refused)
            return
        except ValidationPause:
            publish(self, log)
            self._stop("parked")
            self._tell_soon(self.world.validation_reached)
            return
        publish(self, log)
        self.go_on()

    def collective_failed(self, message: str) -> None:
        """Stand still, let the peers know, and tell proxyd."""
        self.fail(partial(self.world.collective_failed, message=message, index=self.index))

    def fail(self, tell: Tell) -> None:
        """Stand still, let the peers know, and tell proxyd with `tell`."""
        self.collectives.abort()
        self._stop("parked")
        self._tell_soon(tell)

    def _tell_soon(self, tell: Tell) -> None:
        def now() -> None:
            if self.process.running:
                self.world.speaker = self
                tell(self.rank, self.generation)

        self.world.later(self.chance.uniform(0.0002, 0.002), now)

    def _record(self, log: Log, record: Record) -> None:
        do = record[0]
        table = self.table
        if self.validation.active and self._ends_validation(record):
            self._validate(log)
        optimizer = do is Do.OPTIMIZER and self._begins_optimizer(log)
        if optimizer or (self.pending and do is not Do.FREE):
            self._commit(log, optimizer)
        if self.step_digest.active:
            self.step_digest.add(record)
        if self.roll.active and not self.roll.runs(record, self.index in log.told):
            return
        if do is Do.NEW:
            table.create(record[1], record[2].to_bytes(8, "little"))
        elif do is Do.MIX:
            _, handle, sources, salt = record
            self.collectives.wait_for(handle, *sources)
            values = [int.from_bytes(table.read(source), "little") for source in sources]
            table.write(handle, mix(salt, *values).to_bytes(8, "little"))
        elif do is Do.FREE:
            table.free(record[1])
        elif do is Do.RANDOM:
            table.create(record[1], self.random.to_bytes(8, "little"))
            self.random = mix(self.random, 3)
        elif do is Do.OPTIMIZER:
            log.phase = 1
            self.ran_short = self.optimizer_preimages and self.world.schedule.is_short(
                log.rank, self.steps + 1
            )
            table.preimages(self.optimizer_preimages and not self.ran_short)
            if log.final_steps:
                self.step_digest.begin(log.ring[table.epoch % RING])
        elif do is Do.COMMIT:
            if record[1]:
                self.steps += 1
                self.validation.begin(log, self.steps + 1)
            self.pending = True
            self.step_digest.end()
        elif do is Do.JOIN:
            self.collectives.join(record[1])
        elif do is Do.LEAVE:
            self.collectives.give_up(record[1])
        elif do is Do.READ:
            self.collectives.wait_for(record[1])
            self.world.tell(log, self.index, int.from_bytes(table.read(record[1]), "little"))
            if (
                self.index - self.last_commit > AUTOMATIC_COMMIT_RECORDS
                and not self.pending
                and log.phase == 0
            ):
                self.index += 1
                try:
                    self._commit(log)
                finally:
                    self.index -= 1
        elif do is Do.END:
            self.collectives.wait_for_all()
            log.session_state = 2
            self._stop("ended")
            self.world.worker_is_done(self, log)
        else:
            self.collectives.run(do, record)

    def _ends_validation(self, record: Record) -> bool:
        if self.optimizer_preimages:
            return record[0] is Do.COMMIT and bool(record[1])
        return record[0] is Do.OPTIMIZER

    def _validate(self, log: Log) -> None:
        if not self._patience.settles(self):
            return self.validation.leave_out(log)
        if self.ran_short and not self.validation.has_first:
            return self.validation.leave_out(log)
        now = {row[0]: row[1] for row in self.table.rows() if row[3]}
        now[-1] = self.random.to_bytes(8, "little")
        self.world.stir()
        if not self.validation.at_end(log, now, self.world.schedule.drifts):
            raise self.world.violation(f"rank {log.rank} replays step {self.steps + 1} with other contents")

    # ------------------------------------------------------------------ commits
    def _begins_optimizer(self, log: Log) -> bool:
        """Whether there has to be a commit right before an optimizer step, and is none yet."""
        if not self.protect or self.optimizer_preimages:
            return False
        newest = log.ring.get(self.table.epoch % RING)
        return newest is None or not (newest.optimizer and newest.index == self.index)

    def _commit(self, log: Log, optimizer: bool = False) -> None:
        self.collectives.wait_for_all()
        if self.roll.active:
            if not self.pending:
                raise RollForwardRefused("a step begins within the step")
            self.roll.finish(self.step_digest.value)
        self._overwrite_former()
        if self.inbox is not None:
            self.replicated, self.inbox = self.inbox, None
        table = self.table
        number = table.epoch + 1
        marks, sizes = self.collectives.marks()
        made = Commit(number, self.steps, False, False, marks, sizes, self.index)
        made.random, made.joined = self.random, self.collectives.done()
        made.optimizer, made.step_digest = optimizer, self.step_digest.take()
        made.call = 0 if self.pending else self.index
        if self.protect:
            made.complete = made.has_manifest = True
            describe(made, table, self.replicated, self.world.shadow_limit, self.world.seed)
        if self.ran_short:
            self.ran_short = False
            self._keep_preimages(log, keeps=False)
            if self.validation.has_first:
                self.validation.leave_out(log)
        table.commit()
        table.preimages(True)
        log.ring[number % RING] = made
        log.commit_count = number
        log.phase = 0  # not before: without pre-images there is no other commit to go back to
        self.pending, self.last_commit = False, self.index
        self.snapshots.after_commit(log, made)
        self.world.stir()
        self.floor.apply(log)

    def _overwrite_former(self) -> None:
        for other in self._former_commits:
            other.readable = False
        self._former_commits = []

    # ------------------------------------------------------------------ steering (already serialised)
    def attach(self, request: Any) -> None:
        """Take a rank."""
        if self.state != "idle":
            raise replay.LogError("the device server already has a session")
        self.log = self.world.log_of(self, request)
        self.log.device_lost, self.log.device_message = 0, ""
        self.protect = request.policy.protect
        self.table.protect(self.protect)
        self._keep_preimages(self.log, request.policy.optimizer_preimages and not self.log.final_steps)
        self.generation = request.generation
        self.account = Account(request.generation, holds_state=request.run, parked=not request.run)
        self.random = self.world.first_random
        self.state = "parked"
        self.snapshots.abandon(self.log)
        if request.run:
            self.resume()

    def _keep_preimages(self, log: Log, keeps: bool) -> None:
        self.optimizer_preimages = keeps
        log.final_steps = int(self.protect and not keeps)

    def need_parked(self) -> Log:
        """Raises unless it stands still."""
        if self.state not in ("parked", "ended"):
            raise replay.LogError("the device server must be parked for this")
        assert self.log is not None
        return self.log

    def hold(self) -> None:
        """Stand still before the next record, and break nothing off."""
        self.account.parked = True
        if self.state == "running":
            self.holding = True
            self.held = not self._amid_irreversible_step

    @property
    def is_sealed(self) -> bool:
        """Whether no way leads back to its newest commit."""
        return self.table.oldest > self.table.epoch

    @property
    def _amid_irreversible_step(self) -> bool:
        if self.pending or self.log is None:  # it has seen the step's end
            return False
        return self.is_sealed or (self.protect and not self.optimizer_preimages and self.log.phase == 1)

    def let_go(self) -> None:
        """Go on as if nothing had been."""
        self.account.parked = False
        self.holding, self.held = False, False
        self.go_on()

    def park(self) -> None:
        """Stand still at a record boundary."""
        if self.log is None:
            raise replay.LogError("this device server has no session")
        self.account.parked = True
        if self.state == "running":
            only = self.log.final_steps or self.is_sealed
            if self.pending and only and not self.collectives.under_way:
                with contextlib.suppress(RollForwardRefused):  # there is no commit then
                    self._commit(self.log)
            self.collectives.abort()
            self._stop("parked")

    def rewind(self, target: int) -> None:
        """In place, back to a commit."""
        log = self.need_parked()
        self.account.holds_state = False
        if target:
            commit = log.entry(target)
            if not (commit.has_manifest and commit.readable) and not self.snapshots.holds(log, target):
                raise replay.LogError(f"commit {target} has no manifest")
        self._forget(log)
        self.table.rewind(target)
        self.account.holds_state = True
        log.sealed = 0
        self._stand(log, target)
        self.floor.down_to(target, self.index)

    def _forget(self, log: Log) -> None:
        self.snapshots.abandon(log)
        self.collectives.forget()

    def restore(self, target: int) -> None:
        """Begin anew: everything but what replicas hold.  Its own state, if it had any, is forgotten."""
        log = self.need_parked()
        self.account.holds_state = False
        self._forget(log)
        self.replicated, self.inbox = set(), None
        self._arriving.begin()
        self.table.start_at(target)
        log.sealed = 0
        if target:
            self._arriving.begin_at(log.entry(target), log.rank)
        self._begin_anew(log, target)

    def restore_snapshot(self, target: int) -> None:
        """Begin anew with the snapshot of a commit."""
        log = self.need_parked()
        self.account.holds_state = False
        snapshot = self.snapshots.of(log, target)
        self._forget(log)
        self.replicated, self.inbox = set(), None
        self._arriving.begin()
        self.table.start_at(target)
        for handle, content, available in snapshot.contents:
            self.table.adopt(handle, content, available)
        log.ring[target % RING] = replace(
            snapshot.commit, complete=False, has_manifest=False, optimizer=False
        )
        self._begin_anew(log, target)

    def _begin_anew(self, log: Log, target: int) -> None:
        self._former_commits = [commit for commit in log.ring.values() if commit.number != target]
        self._stand(log, target)
        self.floor.at(target, self.index)

    def _stand(self, log: Log, target: int) -> None:
        self.roll.active = self.step_digest.active = False
        self.pending = self.validation.pausing = False
        self._patience.end()
        self.stands = target
        self.world.stir()
        log.phase = 0
        self.table.preimages(True)
        log.commit_count = target
        if target == 0:
            self.index, self.steps, self.random = 0, 0, self.world.first_random
            self.collectives.stand(None, self.world.groups)
        else:
            commit = log.entry(target)
            self.index, self.steps, self.random = commit.index, commit.step, commit.random
            self.collectives.stand(commit, self.world.groups)
        self.last_commit = self.index
        publish(self, log)

    def peek(self, handle: int) -> bytes | None:
        """Content for a peer, if it is there."""
        return next((row[1] for row in self.table.rows() if row[0] == handle and row[3]), None)

    def adopt_replica(self, handle: int, content: bytes | None) -> None:
        """Content of a replica; None: it was not kept there."""
        self._arriving.adopt(handle, content)
        self.replicated.add(handle)

    def roll_forward(self, contents: Any) -> None:
        """Finish an optimizer step with what a replica made of it."""
        copied = self.replicated
        lost = {row[0] for row in self.table.rows() if row[0] in copied and not row[3]}
        lost |= set(contents.lost)
        if lost & {*contents.rolled, *contents.steady}:
            raise replay.LogError("a buffer is to be rolled forward, but has no content")
        self.roll.begin(contents, lost)
        self.stands = None

    def complete_restore(self, digests: dict[int, int], lost: Collection[int]) -> None:
        """All is there, but what is lost: check it."""
        self._arriving.complete(self.table, self.rank, digests, lost)

    def rebuild(self, generation: int, finished: Callable[[], None]) -> None:
        """Connect the communicators that were in use; then call `finished`."""
        self.need_parked()
        self.generation = generation
        self.collectives.rebuild(finished)

    def resume(self) -> None:
        """Run."""
        log = self.need_parked()
        self.account.parked, self.account.fault = False, None
        self.state = "running"
        if self.validation.pausing:  # the validation does not come about
            self.validation.pausing = False
        else:
            self.world.resumed(self, log)
        self.validation.begin(log, self.steps + 1)
        self.go_on()
