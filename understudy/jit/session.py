"""One process's part in just-in-time checkpoints: who may save, when, and how the process ends behind it.

Whatever asks for a save has to make the one claim of the process, which is never given back: an exception,
the handler of SIGTERM, the thread that hears of SIGTERM, the watchdog. A training thread that comes to a hook
while another thread has the claim stays there, so that nothing changes under the save; the process ends
behind it.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import watchdog
from .at_work import EVERY, AtWork
from .boundaries import Boundary, Obstacle
from .identity import Identity, JitError
from .slots import Generators, SlotFile, find, remove_old
from .storage import Choice, ShardDirectory
from .triggers import Exceptions, Sigterm, end_by_sigterm, end_with

HANG_STATUS = 75
"""Exit status behind a hang: EX_TEMPFAIL, start me again."""
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
        self._term_pending = False
        self._restored_step: int | None = None
        self._slots: SlotFile | None = None
        self.boundary = Boundary(self._arrive, self._keep, self.say)
        self._exceptions = Exceptions(self)
        self._sigterm = Sigterm(self)
        self._training_thread = threading.get_ident()
        self._watchdog = watchdog.Watchdog(
            minimum_stall, lambda: self._training_thread, lambda: self.boundary.step, self._on_hang,
            AtWork(
                directory.meeting_place / "at-work", self.identity.rank, self.say,
                min(EVERY, minimum_stall / 8),
            ),
            self.say,
        )  # fmt: skip

    def start(self) -> None:
        """Announce this rank, and install all triggers."""
        self._directory.announce()
        self._open_slots()
        self.boundary.install()
        self._exceptions.install()
        if not self._sigterm.install():
            self.say("SIGTERM is not this script's to handle here, so that nothing is saved when it comes.")
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
        self.closing = True
        if self._term_pending:
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
        choice = _same_on_all_ranks(self.identity, lambda: self._directory.choose(self._also))
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

        def end() -> None:
            os.write(2, "".join(traceback.format_exception(error)).encode(errors="backslashreplace"))
            end_with(1)

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
            if not self._term_pending:
                self._term_pending = True
                _Deadline(self._grace, self._give_up_waiting)
            return True
        if self._refused(obstacle, "SIGTERM"):
            return False
        if self._take_claim(end_by_sigterm):
            try:
                self._save("SIGTERM")
            finally:
                end_by_sigterm()
        return True

    def _arrive(self) -> None:
        """The training comes to where nothing may change during a save, or where one is waited for."""
        self._stay_behind_another_claim()
        if self._term_pending and self.boundary.obstacle() is None:
            self._save_for_sigterm()

    def _give_up_waiting(self) -> None:
        """The deadline of a SIGTERM that came inside a step (in a thread)."""
        if (obstacle := self.boundary.obstacle()) is not None and not self._claim:
            self._refused(obstacle, f"SIGTERM, {self._grace:g} s ago")
            end_by_sigterm()

    def _refused(self, obstacle: Obstacle | None, reason: str) -> bool:
        if obstacle is not None:
            self.say(f"nothing is saved ({_short(reason)}): {obstacle.sentence}.")
        return obstacle is not None

    # Saving.

    def _take_claim(self, end: Callable[[], None]) -> bool:
        me = threading.get_ident()
        if self._claim or os.getpid() != self._owner or self._claim.setdefault("thread", me) != me:
            return False
        self._end = end
        self._watchdog.let_go()
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
        deadline = _Deadline(self._grace, lambda: self._is_late(saver, step))
        try:
            payload = self._write(step, _short(reason))
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything; it is shown
            self.say(f"step {step} could not be saved ({_short(reason)}), and nothing of it counts: {error}")
            if not isinstance(error, JitError):
                os.write(2, traceback.format_exc().encode(errors="backslashreplace"))
            return False
        finally:
            deadline.cancel()
        missing = _absent(payload)
        self.say(
            f"step {step} saved in {time.monotonic() - began:.3f} s ({_short(reason)}); "
            + (f"did not arrive: {missing}." if missing else "all ranks arrived.")
        )
        return True

    def _write(self, step: int, reason: str) -> Path:
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
        before = watchdog.counts()
        self._save_checkpoint(path)
        behind = watchdog.counts()
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


class _Deadline:
    """Calls `late`, in a thread, if nobody cancels it in time."""

    def __init__(self, seconds: float, late: Callable[[], None]) -> None:
        self._cancelled = threading.Event()
        self._seconds, self._late = seconds, late
        threading.Thread(target=self._wait, name="understudy-deadline", daemon=True).start()

    def cancel(self) -> None:
        self._cancelled.set()

    def _wait(self) -> None:
        if not self._cancelled.wait(self._seconds):
            self._late()


def _same_on_all_ranks(identity: Identity, choose: Callable[[], Choice | None]) -> Choice | None:
    """Rank 0 chooses, and tells the others. What it cannot read, no rank begins without."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or identity.world_size == 1:
        return choose()
    told: list[Any] = [None]
    if identity.rank == 0:
        try:
            told = [choose()]
        except JitError as error:
            told = [error]
    dist.broadcast_object_list(told, src=0)
    if isinstance(told[0], JitError):
        raise told[0]
    choice: Choice | None = told[0]
    return choice


def warn_without_replica(replica_group: Any) -> None:
    """A state that one rank alone has dies with it."""
    import torch.distributed as dist

    up = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size() if up else int(os.environ.get("WORLD_SIZE", "1") or 1)
    members = dist.get_world_size(replica_group) if up else world
    if members == 1:
        who = "this rank alone" if world > 1 else "one process alone"
        warnings.warn(
            f"Nothing to save from: {who} has this state (ZeRO, FSDP without replicas, one rank), so that it "
            "is lost when the rank is killed; save periodic checkpoints too, and tell jit.saved of them.",
            stacklevel=3,
        )


def _short(text: str) -> str:
    """One line of a reason."""
    line = " ".join("".join(one if one.isprintable() else " " for one in text).split())
    return line if len(line) <= 160 else line[:157] + "..."


def _absent(payload: Path) -> str:
    """Ranks and hosts that did not arrive, by the metadata beside the payload."""
    from . import reading

    try:
        found = reading.unsealed((payload.parent / reading.METADATA).read_bytes())
    except (OSError, ValueError):
        return ""
    return ", ".join(f"rank {one['rank']} ({one['host']})" for one in found.get("absent", []))
