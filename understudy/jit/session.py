"""One process's part in just-in-time checkpoints: who may save, when, and how the process ends behind it.

Whatever asks for a save has to make the one claim of the process, which is never given back: an exception,
the handler of SIGTERM, the thread that hears of SIGTERM, the watchdog. A training thread that comes to a hook
while another thread has the claim stays there, so that nothing changes under the save; the process ends
behind it.

A save that must wait, because the step is half done, is pending: it is made at the end of the step. So is the
second save of a rank whose gate (gate.py) is broken, which does its step to the end alone.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
import urllib.parse
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from . import gate, reading, replicas, watchdog
from .at_work import EVERY, AtWork
from .boundaries import Boundary, Obstacle, Zone
from .choosing import same_on_all_ranks
from .cuda_watch import CudaWatch
from .deadline import Deadline
from .generators import Generators
from .identity import Identity, JitError, one_line
from .slots import SlotFile, find, remove_old
from .storage import ShardDirectory
from .triggers import Exceptions, Sigterm, end_by_sigterm, end_with, ignore_ends_of_children

HANG_STATUS = 75
"""Exit status behind a hang: EX_TEMPFAIL, start me again."""
_SIGTERM = "SIGTERM"
_KEPT_SLOT_FILES = 4
_STEPS_BEFORE_REMOVAL = 3


class SaveRefused(JitError):
    """What was written must not count."""


class Session:
    """Between `jit.init` and `jit.close`."""

    def __init__(
        self,
        save_checkpoint: Callable[[Path], None],
        directory: ShardDirectory,
        also: Sequence[str | os.PathLike[str]],
        grace: float,
        minimum_stall: float,
    ) -> None:
        self._save_checkpoint, self._directory, self._also = save_checkpoint, directory, also
        self.identity: Identity = directory.identity
        self._grace = grace
        self.closing = False
        self._owner = os.getpid()
        self._claim: dict[str, int] = {}
        """The thread that saves. `setdefault` decides between threads; signal handlers cannot split it."""
        self._end: Callable[[], None] = end_by_sigterm
        """How the process ends behind its save."""
        self._pending: tuple[str, Callable[[], None]] | None = None
        """Why a save waits for the end of the step, and how the process ends behind it."""
        self._alone = False
        """The gate is broken: this rank does the step that it is in to its end, and then leaves."""
        self._gate: gate.Gate | None = None
        self._restored_step: int | None = None
        self._slots: SlotFile | None = None
        self._cuda = CudaWatch(self.say)
        self.boundary = Boundary(self._arrive, self._keep, self.say, self._check, self._cuda)
        self._exceptions = Exceptions(self)
        self._sigterm = Sigterm(self)
        self._training_thread = threading.get_ident()
        self._watchdog = watchdog.Watchdog(
            minimum_stall, lambda: self._training_thread, lambda: self.boundary.done_here, self._on_hang,
            AtWork(
                directory.meeting_place / "at-work", self.identity.rank, self.say,
                min(EVERY, minimum_stall / 8),
            ),
            self.say,
            self._cuda,
        )  # fmt: skip

    def start(self, told_without_replica: bool = False) -> None:
        """Announce this rank, and install all triggers. Raises JitError."""
        self._directory.announce()
        self._gate = gate.for_job(self.identity)
        if self._gate is not None:
            self.boundary.pass_gate = self._pass_gate
        if not told_without_replica and self.identity.world_size > 1:
            spreads = replicas.spreads_of(replicas.optimizers_now())
            if sentence := replicas.warning(spreads, self.identity, self._shards()):
                warnings.warn(sentence, stacklevel=3)
        self._open_slots()
        self.boundary.install()
        self._exceptions.install()
        if not self._sigterm.install():
            self.say("SIGTERM is not this script's to handle here, so that nothing is saved when it comes.")
        self._cuda.start()
        self._watchdog.start()
        atexit.register(self._at_exit)

    def close(self) -> bool:
        """Training is over. False: an exception is on its way through the caller, and will still save."""
        self._stay_behind_another_claim()
        self._watchdog.stop()
        self._sigterm.remove()
        over = sys.exc_info()[0] is None
        if over:
            self._exceptions.remove()
            self.boundary.remove()
            atexit.unregister(self._at_exit)
            if self._slots is not None:
                self._slots.close()
            if self._gate is not None:
                self._gate.close()
        self.closing = True
        if self._pending is not None:
            if self._alone or self._pending[0] != _SIGTERM:
                self._pending[1]()
            self._sigterm.call_previous(None)
        return over

    def forget_in_child(self) -> None:
        """A fork of this process is no rank: it saves nothing."""
        self._watchdog.forget_in_child()
        self._exceptions.remove()
        self._sigterm.forget_in_child()
        self.boundary.remove()
        atexit.unregister(self._at_exit)

    def choose(self) -> Path | None:
        """Where this rank's payload lies. All ranks of the process group take what rank 0 has chosen."""
        choice = same_on_all_ranks(self.identity, lambda: self._directory.choose(self._also))
        if choice is None:
            return None
        if self.identity.rank == 0:
            for remark in choice.remarks:
                self.say(remark)
        self.boundary.go_on_from(choice.step)
        self._restored_step = choice.step
        return choice.for_rank(self.identity)

    def restore_generators(self) -> bool:
        """See `jit.restore_generators`."""
        if (step := self._restored_step) is None:
            return False
        found = find(self._slot_folder(), step)
        if found is None:
            self.say(
                f"this rank's own generators of step {step} are not in {self._slot_folder()}; what it draws "
                "goes on from what the script has loaded or seeded."
            )
            return False
        found.put_back()
        self._keep(step, found)  # this attempt's file has them too, when older ones are removed
        return True

    def saved(self, path: str | os.PathLike[str], step: int) -> None:
        self._directory.saved(path, step)

    def say(self, sentence: str) -> None:
        """One line on stderr, past Python's buffers, whose locks a hanging thread may have."""
        line = f"understudy.jit: rank {self.identity.rank}: {sentence}\n"
        try:
            os.write(2, line.encode(errors="backslashreplace"))
        except OSError:
            return

    # What asks for a save.

    def on_exception(self, kind: type[BaseException], error: BaseException) -> None:
        """An exception ends the script (in the main thread, before its traceback is printed)."""
        self._stay_behind_another_claim()

        end = partial(_end_with_traceback, error)
        if self._refused(self.boundary.obstacle(), kind.__name__) or not self._take_claim(end):
            return
        self._save(f"{kind.__name__}: {error}")

    def on_sigterm(self) -> bool:
        """SIGTERM has come, and the main thread is alive. False: there is nothing to wait for."""
        self._stay_behind_another_claim()
        if self._claim:  # this very thread saves, and ends the process behind it
            return True
        return self._save_for_sigterm()

    def on_sigterm_unhandled(self) -> None:
        """SIGTERM has come, and the main thread has not (in a thread)."""
        if self._claim or self._save_for_sigterm() or self._sigterm.has_previous:
            return
        end_by_sigterm()

    def _on_hang(self, reason: str, for_ever: bool) -> None:
        """This rank no longer moves; `for_ever`: it never will (in the watchdog's thread)."""

        def end() -> None:
            end_with(HANG_STATUS)

        if self._claim and not for_ever:
            return
        if self.boundary.zone is Zone.WAITING:
            self._wait_for_end_of_step(reason, end)  # at the gate, whose thread sees it
            return
        if self._refused(self.boundary.obstacle(), reason):
            if for_ever:
                end()
            return
        if not self._take_claim(end):
            return
        try:
            self._save(reason)
        finally:
            end()

    def _save_for_sigterm(self) -> bool:
        obstacle = self.boundary.obstacle()
        if obstacle is not None and obstacle.passes:
            self._wait_for_end_of_step(_SIGTERM, end_by_sigterm)
            return True
        if self._refused(obstacle, _SIGTERM):
            return False
        if self._take_claim(end_by_sigterm):
            try:
                self._save(_SIGTERM)
            finally:
                end_by_sigterm()
        return True

    def _wait_for_end_of_step(self, reason: str, end: Callable[[], None]) -> None:
        if self._pending is None:
            self._pending = (reason, end)
            Deadline(self._grace, self._give_up_waiting)

    def _arrive(self) -> None:
        """The training comes to where nothing may change during a save, or where one is waited for."""
        self._stay_behind_another_claim()
        if self._pending is None or self.boundary.obstacle() is not None:
            return
        reason, end = self._pending
        if self._alone or self._take_claim(end):
            try:
                self._save(reason)
            finally:
                end()

    def _pass_gate(self) -> None:
        """All ranks are to come before the state changes (in the training thread). See gate.py."""
        if self._gate is None or self._alone:
            return
        try:
            if self._gate.passed(lambda: self._pending is not None):
                return
        except RuntimeError as error:
            reason = f"{type(error).__name__}: {error}"
            self._wait_for_end_of_step(reason, partial(_end_with_traceback, error))
        self._save_at_gate()

    def _save_at_gate(self) -> None:
        """Nobody knows whether others have passed: the state of both steps is saved, this is the first."""
        assert self._pending is not None
        reason, end = self._pending
        if not self._take_claim(end):
            self._stay_behind_another_claim()
        self._alone = True
        take_up = self.boundary.aside()
        if self.boundary.generators is not None:
            self._save(reason)
        take_up()
        Deadline(self._grace, self._give_up_alone)

    def _give_up_alone(self) -> None:
        """The step that this rank does alone has not come to its end (in a thread)."""
        if self._pending is not None and (obstacle := self.boundary.obstacle()) is not None:
            self._refused(obstacle, f"{self._pending[0]}, {self._grace:g} s ago")
            self._pending[1]()

    def _give_up_waiting(self) -> None:
        """The deadline of what came inside a step (in a thread)."""
        if self._pending is None or self._claim:
            return
        if (obstacle := self.boundary.obstacle()) is not None:
            reason, end = self._pending
            self._refused(obstacle, f"{reason}, {self._grace:g} s ago")
            end()

    def _check(self, optimizer: Any) -> None:
        """Different parts of what an optimizer changes have different names, or JitError is raised."""
        if self.identity.world_size > 1:
            replicas.check(replicas.spreads_of([optimizer]), self.identity, self._shards())

    def _shards(self) -> Mapping[int, str]:
        """By rank."""
        if self._gate is not None:
            return self._gate.shards
        return dict.fromkeys(range(self.identity.world_size), self.identity.shard)

    def _refused(self, obstacle: Obstacle | None, reason: str) -> bool:
        if obstacle is not None:
            self.say(f"nothing is saved ({one_line(reason)}): {obstacle.sentence}.")
        return obstacle is not None

    # Saving.

    def _take_claim(self, end: Callable[[], None]) -> bool:
        me = threading.get_ident()
        if self._claim or os.getpid() != self._owner or self._claim.setdefault("thread", me) != me:
            return False
        self._end = end
        self._watchdog.let_go()
        ignore_ends_of_children()
        return True

    def _stay_behind_another_claim(self) -> None:
        if self._claim.get("thread", me := threading.get_ident()) != me and os.getpid() == self._owner:
            threading.Event().wait()  # whoever has the claim ends the process

    def _save(self, reason: str) -> bool:
        """By whoever has the claim. False, with a sentence, if nothing counts."""
        step, began = self.boundary.step, time.monotonic()
        saver = threading.get_ident()
        if saver != self._training_thread:
            self._sigterm.interrupt()
        deadline = Deadline(self._grace, lambda: self._is_late(saver, step))
        try:
            payload = self._write(step, one_line(reason))
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything; it is shown
            self.say(
                f"step {step} could not be saved ({one_line(reason)}), and nothing of it counts: {error}"
            )
            if not isinstance(error, JitError):
                os.write(2, traceback.format_exc().encode(errors="backslashreplace"))
            return False
        finally:
            deadline.cancel()
        missing = reading.absent_at(payload)
        self.say(
            f"step {step} saved in {time.monotonic() - began:.3f} s ({one_line(reason)}); "
            + (f"did not arrive: {missing}." if missing else "all ranks arrived.")
        )
        return True

    def _write(self, step: int, reason: str) -> Path:
        with self._cuda.saving(self._grace / 2):
            try:
                return self._write_once(step, reason, self._looking_for_movement)
            except _Moved:  # the training thread has come back from C; it stays at its next line
                return self._write_once(step, reason, self._save_without_collective)

    def _write_once(self, step: int, reason: str, write: Callable[[Path], None]) -> Path:
        if remark := self.boundary.put_back():
            self.say(remark)
        return self._directory.save(step, write, reason)

    def _looking_for_movement(self, path: Path) -> None:
        self._save_without_collective(path)
        if threading.get_ident() != self._training_thread and self.boundary.moved():
            raise _Moved

    def _save_without_collective(self, path: Path) -> None:
        before = (*(watchdog.counts() or ()), *self._cuda.counts())
        self._save_checkpoint(path)
        behind = (*(watchdog.counts() or ()), *self._cuda.counts())
        stuck = watchdog.completed(behind) == watchdog.completed(before)
        in_main = threading.get_ident() == self._training_thread
        if watchdog.enqueued(behind) > watchdog.enqueued(before) and (in_main or stuck):
            raise SaveRefused(
                "save_checkpoint called a collective, which ranks that are dead or hang do not answer; take "
                "it out, a save must do with what this rank has."
            )

    def _is_late(self, saver: int, step: int) -> None:
        """The save has not ended within the grace (in a thread)."""
        if (collective := watchdog.collective_of(saver)) is None:
            self.say(
                f"the save of step {step} has not ended within the grace of {self._grace:g} s and goes on; a "
                "launcher may kill it, so save less or faster, or let both wait longer."
            )
            return
        self.say(
            f"step {step} could not be saved: save_checkpoint hangs in a collective, {collective}; take it "
            "out, a save must do with what this rank has."
        )
        self._end()

    # Generators of each step.

    def _slot_folder(self) -> Path:
        return self._directory.path / "slots" / f"rank-{self.identity.rank}"

    def _open_slots(self) -> None:
        try:
            self._slots = SlotFile(self._slot_folder(), urllib.parse.quote(self.identity.attempt, safe=""))
        except OSError as error:
            self.say(f"the generators of this rank will not outlive it, its file cannot be made: {error}")

    def _keep(self, step: int, generators: Generators) -> None:
        if self._slots is None:
            return
        try:
            self._slots.write(step, generators)
        except ValueError as error:
            self._slots = None
            self.say(str(error))
        if step == (self._restored_step or 0) + _STEPS_BEFORE_REMOVAL:
            remove_old(self._slot_folder(), _KEPT_SLOT_FILES)
        self._sigterm.renew()

    def _at_exit(self) -> None:
        self._stay_behind_another_claim()


class _Moved(Exception):
    """The training thread has moved while another one saved."""


def _end_with_traceback(error: BaseException) -> None:
    os.write(2, "".join(traceback.format_exception(error)).encode(errors="backslashreplace"))
    end_with(1)
