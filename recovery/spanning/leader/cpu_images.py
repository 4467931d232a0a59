"""Images of workers, so that a rank comes back though its host is gone (`--cpu-image-every`).

Those of workers on other hosts lie here, and, like those of our own, at our standbys (standbys.py).

An image is of use only with device state that its worker and all other ranks can go back to: the set of
snapshots that counts when it is taken, and the log from there on.  Both are kept, on every rank, for as long
as the images are the newest ones: a *pair*.  Then the rank's worker runs once more from its image on, while
the other ranks replay their logs beside it; it computes what it computed before.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from understudy import replay
from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.commands import NotDone
from understudy.recovery.base.background import to_its_end
from understudy.recovery.base.timing import TIMING, Timing
from understudy.recovery.migration.relay.outgoing_workers import Lost
from understudy.recovery.migration.transfer.moves import Moves
from understudy.recovery.migration.transfer.reception import NotSent, Reception
from understudy.recovery.migration.transfer.stream import read_ahead
from understudy.recovery.migration.worker_state import Away
from understudy.recovery.record.log import run_of
from understudy.recovery.spanning.leader.standbys import NotLeft, Standbys
from understudy.recovery.spanning.ranks.image_file import BadImage, ImageFile, Taken, make_folder, read_parts
from understudy.recovery.spanning.ranks.image_pair import EVERY_COMMIT, Pair, Worker, worker_of
from understudy.recovery.spanning.ranks.image_set import INHERITED, Left, find_left, write_about, write_set
from understudy.recovery.spanning.ranks.remote import NotMoved
from understudy.recovery.state.jobs import Job, Session

if TYPE_CHECKING:
    from understudy.recovery.spanning.leader.lead import Lead

log = structlog.get_logger()

FOLDER = ".cpu-images"
"""Below --persist; no job has a name like that."""
AGAIN_S = 10.0
"""After one that was not taken."""
PRESSED_S = 5.0
"""Between two, where a log is filling up with what only newer images can let go."""
HOLDER = "CPU images"


class CpuImages:
    """Takes images of the workers of one job that we lead."""

    def __init__(
        self, job: Job, lead: Lead, moves: Moves, folder: Path, every_s: float,
        standbys: Standbys | None = None, timing: Timing = TIMING,
    ) -> None:  # fmt: skip
        """`folder`: of all jobs' images here; `every_s`: the least time between two.

        `standbys`: that keep them, too, and of which one leads the job on if our host is lost.
        """
        self._job, self._lead, self._moves = job, lead, moves
        self._folder = folder / lead.here / job.name
        self._every_s, self._timing = every_s, timing
        self._due_s = 0.0
        self._pair: Pair | None = None
        self._taking: Pair | None = None
        self._take_task: asyncio.Task[None] | None = None
        self._begun_s = 0.0
        self._problem = "none has been taken yet"
        self._standbys = standbys
        self._kept: dict[int, tuple[Worker, Taken]] = {}
        """What a former leader has left, by rank: the worker, and its image."""
        self._run = run_of(job.span.token) if job.span is not None else ""
        self.left, self._count = find_left(self._folder, job.name, self._run)
        """By a proxyd of this host that led the job before us: it counts from here on."""
        if self.left is not None:
            self._go_on(self.left, inherited=self.left.kept.folder.name == INHERITED)

    def take_left(self) -> Left | None:
        """What was left, for who brings ranks back with it; it is asked once."""
        left, self.left = self.left, None
        return left

    def _go_on(self, left: Left, *, inherited: bool) -> None:
        images, kept = left.images, left.kept
        cut = {place.rank: place for place in images.cut}
        pair = self._pair = Pair(images.serial, frozenset(cut), cut, kept.folder, inherited)
        for one in images.workers:
            host = one.host if one.host != self._lead.here else ""
            worker = host, one.worker.pid, one.worker.start_ticks
            if not inherited:
                pair.workers[one.rank] = {worker}
            elif one.rank in kept.images:
                self._kept[one.rank] = worker, kept.images[one.rank]
        pair.images.update({} if inherited else kept.images)
        self.hold()

    def close(self) -> None:
        """The job is over."""
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------ what is kept
    def kept_from(self, session: Session) -> int:
        """Log offset from which on its log is needed; 0: it is not."""
        pairs = [pair for pair in (self._pair, self._taking) if pair is not None]
        offsets = [pair.commits[session.rank].log_offset for pair in pairs if session.rank in pair.commits]
        return min(offsets, default=0)

    def hold(self) -> None:
        """What all ranks need to go back to the images that are kept stays; and `status` tells of them."""
        sessions = self._job.active_sessions()
        pairs = [pair for pair in (self._pair, self._taking) if pair is not None]
        self._job.leases.hold(HOLDER, [pair.serial for pair in pairs], sessions)
        for session in sessions:
            session.log.log_kept_from = self.kept_from(session)
            imaged = self._pair is not None and session.rank in self._pair.workers
            session.cpu_image_step = self._pair.step if imaged and self._pair is not None else 0

    def _drop(self, why: str) -> None:
        """The pair is of no use any more."""
        if self._pair is not None:
            log.warning("CPU images are of no use any more", job=self._job.name, reason=why)
            shutil.rmtree(self._pair.folder, ignore_errors=True)
            self._pair = None
            if self._standbys is not None and self._standbys.hosts:
                self._lead.run_beside(self._standbys.void(why))
        self._problem, self._due_s = why, 0.0

    def take_over(self, left: Left) -> Left:
        """What a host that led the job before us has left to us, with the images where they are from now on.

        Raises OSError.
        """
        folder = self._folder / INHERITED
        make_folder(folder.parent)
        left.kept.folder.rename(folder)
        with contextlib.suppress(OSError):  # another set, which never came to count
            left.kept.folder.parent.rmdir()
        images = {rank: replace(one, path=folder / one.path.name) for rank, one in left.kept.images.items()}
        left = Left(left.images, replace(left.kept, folder=folder, images=images))
        write_set(folder, self._run, left.images)
        self._go_on(left, inherited=True)
        return left

    # ------------------------------------------------------------------ taking
    def offer(
        self, serial: int, sessions: Sequence[Session], commits: Mapping[int, replay.Commit], *, pressed: bool
    ) -> None:
        """A set of snapshots that counts, of these commits by rank; taken if images are due.

        `pressed`: a log is filling up.
        """
        now = time.monotonic()
        waits = self._standbys is not None and self._standbys.record.waits
        if waits and pressed:
            self._let_go()
        if self._taking is not None:
            return
        away = [session for session in sessions if session.host]
        if self._pair is not None:
            why = self._pair.why_useless(sessions) if away else "all ranks run on the leading host now"
            if why:
                self._drop(why)
                self.hold()
        due = now >= self._due_s or (pressed and now >= self._begun_s + PRESSED_S)
        if not due or not away or waits:
            return
        if fixed := [session.rank for session in away if not session.relay]:
            return self._tell(f"rank {fixed[0]} was not started with proxyrun --migratable")
        self._begun_s, self._due_s = now, now + self._every_s
        self._count += 1
        ranks = frozenset(session.rank for session in sessions)
        self._taking = Pair(serial, ranks, dict(commits), self._folder / str(self._count))
        self.hold()
        self._lead.run_beside(self._take(self._taking, away, pressed))

    def _let_go(self) -> None:
        """Nobody can be told of newer images for now, and training is not to wait for that."""
        why = "the cluster's store did not answer"
        if self._take_task is not None:
            self._take_task.cancel(why)
        elif self._pair is not None:
            self._drop(f"a log was filling up, and {why}")
            self.hold()

    async def _take(self, pair: Pair, away: Sequence[Session], pressed: bool) -> None:
        """One worker after the other: who stands still may keep the others waiting."""
        generation, paused_s = self._job.generation, 0.0
        self._take_task = asyncio.current_task()
        try:
            await asyncio.to_thread(make_folder, pair.folder)
            for session in away:
                pair.workers[session.rank] = {worker_of(session)}
                paused_s += await self._take_one(pair, session)
            self._check(pair, generation)
            if self._standbys is not None:
                await self._describe(pair)
                paused_s += await self._leave(self._standbys, pair, generation)
        except (BadImage, NotDone, OSError) as problem:
            self._not_taken(pair, _text(problem), pressed)
        except BaseException as problem:
            cancelled = isinstance(problem, asyncio.CancelledError)
            given_up = str(problem) if cancelled else ""
            why = given_up or ("the job is over" if cancelled else f"it failed: {problem!r}")
            self._not_taken(pair, why, pressed or bool(given_up))
            raise
        else:
            former, self._pair, self._taking = self._pair, pair, None
            self.hold()
            if former is not None:
                await asyncio.to_thread(shutil.rmtree, former.folder, True)
            self._tell("")
            size = sum(image.bytes for image in pair.images.values())
            seconds = time.monotonic() - self._begun_s
            standbys = ", ".join(self._standbys.hosts if self._standbys is not None else ())
            log.info("CPU images were taken", job=self._job.name, step=pair.step, bytes=size,
                     standbys=standbys, paused_s=round(paused_s, 3), seconds=round(seconds, 3))  # fmt: skip
        finally:
            self._take_task = None

    def _check(self, pair: Pair, generation: int) -> None:
        """That it is of use; raises BadImage."""
        why = pair.why_useless(self._job.active_sessions())
        if not why and self._job.generation != generation:
            why = "a recovery came between"
        if why:
            raise BadImage(why)

    async def named(self, images: pb.ImageSet) -> None:
        """These are about to be named in the job's record: whoever follows us here goes on with them."""
        if self._taking is not None:
            await self._describe(self._taking, images)

    async def _describe(self, pair: Pair, named: pb.ImageSet | None = None) -> None:
        """For a proxyd that follows us here: the set that is `named`, or that of the images here.

        If it cannot be written, there will be others.
        """
        try:
            await asyncio.to_thread(write_set, pair.folder, self._run, named or pair.as_set())
        except OSError as problem:
            log.warning("CPU images will not outlive this proxyd", job=self._job.name, problem=_text(problem))

    async def _leave(self, standbys: Standbys, pair: Pair, generation: int) -> float:
        """All images, and those of our own workers, to our standbys, if there are any; raises BadImage."""
        here = [session for session in self._job.active_sessions() if not session.host]
        pair.workers.update({session.rank: {worker_of(session)} for session in here})
        try:
            paused_s = await standbys.leave(pair, here)
        except NotLeft as problem:
            self.not_left(str(problem), pair)
            return 0.0
        try:
            self._check(pair, generation)
        except BadImage as problem:
            await standbys.void(str(problem))
            raise
        self._tell_here("")
        return paused_s

    def not_left(self, why: str, pair: Pair | None = None) -> None:
        """Nobody would lead the job on if our host were lost."""
        pair = pair or self._pair
        for session in self._job.active_sessions():
            if not session.host and pair is not None:
                pair.workers.pop(session.rank, None)
                session.cpu_image_step = 0
        if pair is not None and pair is self._pair and not pair.inherited:
            self._lead.run_beside(self._describe(pair))
        self._tell_here(why)
        self.hurry()

    def hurry(self) -> None:
        """A standby less keeps them: the next ones are taken soon."""
        self._due_s = min(self._due_s, time.monotonic() + AGAIN_S)

    def _tell_here(self, problem: str) -> None:
        note = f"if the host that leads its job is lost, the job may end: {problem}" if problem else ""
        for session in self._job.active_sessions():
            if not session.host:
                session.cpu_image_note = note

    def _not_taken(self, pair: Pair, why: str, pressed: bool) -> None:
        self._taking = None
        shutil.rmtree(pair.folder, ignore_errors=True)
        if pressed:
            why = f"a log was filling up, and no newer ones could be taken: {why}"
            self._drop(why)
        self._due_s = time.monotonic() + min(AGAIN_S, self._every_s)
        self.hold()
        self._tell(why)

    def _tell(self, problem: str) -> None:
        self._problem = problem or self._problem
        note = f"if its host is lost, its rank may not come back: {problem}" if problem else ""
        for session in self._job.active_sessions():
            if session.host and note and session.cpu_image_note != note:
                log.warning("no CPU image was taken", job=self._job.name, rank=session.rank, reason=problem)
            if session.host:
                session.cpu_image_note = note

    async def _take_one(self, pair: Pair, session: Session) -> float:
        """Answers how long its worker stood still; raises BadImage, NotDone, OSError."""
        await self._lead.steering.flush(session)  # the lease of what goes with it
        path = pair.folder / f"rank-{session.rank}"
        file = await asyncio.to_thread(ImageFile, path, self._job.name, session.rank)
        try:
            paused_s = await self._receive(pair, session, file)
            await asyncio.to_thread(file.finish)
        except OSError as problem:
            raise BadImage(f"{path} cannot be written: {problem.strerror}") from problem
        finally:
            await asyncio.to_thread(file.close)
        pair.images[session.rank] = taken = file.taken()
        if self._standbys is not None:
            await asyncio.to_thread(write_about, taken, self._standbys.described(session), self._run)
        return paused_s

    async def _receive(self, pair: Pair, session: Session, file: ImageFile) -> float:
        """Raises BadImage, OSError, NotDone."""
        member = self._lead.members.get(session.host)
        if member is None:
            raise BadImage(f"rank {session.rank} has moved meanwhile")
        request = pb.TakeImageRequest(rank=session.rank, serial=pair.serial, **self._lead.credentials())
        last = pb.ImagePart()
        async with contextlib.aclosing(
            member.stream("TakeImage", request, self._timing.image_part_s)
        ) as answers:
            async for answer in answers:
                if answer.error:
                    raise BadImage(f"host {session.host}: {answer.error[:300]}")
                if answer.HasField("part"):
                    await asyncio.to_thread(file.take, answer.part)
                last = answer
        return float(last.paused_s)

    # ------------------------------------------------------------------ bringing back
    def bring_back(self, lost: Sequence[Session]) -> str:
        """Have these ranks, whose hosts are gone, come back with the next recovery; or why they cannot."""
        pair = self._pair
        if pair is None:
            return f"no CPU image of it is kept: {self._problem}"
        if pair.inherited:
            self._add_kept(pair, lost)
        sessions = self._job.active_sessions()
        why = pair.why_useless(sessions)
        if not why and self._job.departed:
            why = "a rank has ended already"
        if not why and any(session.rank not in pair.images for session in lost):
            why = "it was on another host when they were taken"
        if why:
            return f"its CPU image is of no use: {why}"
        for session in lost:
            session.restores_from_image = pair.serial
        for session in sessions:
            session.log.snapshot_floor = pair.serial
            session.log.snapshot_suspended = False
        return ""

    def _add_kept(self, pair: Pair, lost: Sequence[Session]) -> None:
        """Images that a former leader has left of just these workers."""
        for session in lost:
            known = self._kept.get(session.rank)
            if known is not None and known[0] == worker_of(session):
                pair.workers[session.rank], pair.images[session.rank] = {known[0]}, known[1]

    async def send(self, session: Session, destination: str) -> pb.Transfer:
        """Its worker as it was, to another host or to ours, where it runs then; raises NotMoved."""
        try:
            return await to_its_end(self._send(session, destination))
        except (NotSent, BadImage, OSError) as problem:
            raise NotMoved(_text(problem)) from problem

    async def _send(self, session: Session, destination: str) -> pb.Transfer:
        pair, span, began = self._pair, self._job.span, time.monotonic()
        if pair is None or session.rank not in pair.images or span is None:
            raise BadImage(f"there is no CPU image of rank {session.rank}")
        taken = pair.images[session.rank]
        header = pb.WorkerHeader()
        header.CopyFrom(taken.header)
        header.move, header.orphaned, header.generation = secrets.token_hex(16), True, self._job.generation
        mark = pb.SpanMark(
            token=span.token, leader=self._lead.here, hosts=span.hosts, recoveries=session.recoveries,
            device=session.destination_device, resumed_commit=EVERY_COMMIT,
        )  # fmt: skip
        header.more = mark.SerializeToString()
        there = Reception(self._moves, destination, header.move, f"the worker of rank {session.rank}")
        self._moves.outgoing.trust(destination)
        await there.consider(header)
        try:
            await there.take_in(header, read_ahead(read_parts(taken.path, header)))
            shipped = time.monotonic()
            restored = await there.restore()
        except BaseException:
            self._lead.run_beside(_abandon(there))
            raise
        ready = time.monotonic()
        session.resumed_commit = EVERY_COMMIT  # from here on its log is that of the image, without shadows
        away = Away(destination, header.move, sure=False)
        try:
            refused = await self._moves.outgoing.start_there_surely(away, asked=False)
        except Lost as problem:
            await self._lead.lost_hosts.leave_for_dead(destination, restored.pid)
            raise NotSent(str(problem)) from problem
        if refused:
            raise NotSent(f"the worker of rank {session.rank} was not started: {refused}")
        source = session.host
        session.note = (
            f"host {source} was lost: it came back as it was at step {pair.step} or later, and what it "
            f"prints goes to {restored.output} on host {destination}"
        )
        log.warning("a rank came back", job=self._job.name, rank=session.rank, source=source,
                    destination=destination, step=pair.step, output=restored.output)  # fmt: skip
        ended = time.monotonic()
        return pb.Transfer(
            source=source, destination=destination, bytes=there.sent, ship_s=shipped - began,
            restore_s=restored.seconds, switch_s=ended - ready, total_s=ended - began,
        )  # fmt: skip

    def came_back(self, session: Session) -> None:
        """Its worker runs again, from its image: should that be lost, too, the image is as good as before."""
        if self._pair is not None and session.rank in self._pair.workers:
            self._pair.workers[session.rank].add(worker_of(session))


async def _abandon(there: Reception) -> None:
    try:
        await there.abandon()
    except NotSent as problem:
        log.debug("a host was not told that a worker does not come", problem=str(problem))


def _text(problem: BaseException) -> str:
    if isinstance(problem, OSError):
        return f"{problem.filename}: {problem.strerror}"
    return str(problem)
