"""The whole state of a training as one checkpoint, taken at the end of a step by all ranks (paper 002
§4.3-4.6).

    save(step)   all ranks meet; the state is captured; rank 0 writes it, or hands it to its writer; all meet
                 again
    load()       the newest checkpoint that is whole, the same one on all ranks

Each rank's generators are in it, gathered where the ranks meet: a run of as many ranks goes on with its bits.
With `sharded=True` every rank writes its own state, and rank 0 names the checkpoint in the pointer once all
of them are durable.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from . import capture
from . import checkpoint_files as files
from .checkpoint_files import CheckpointError, NotWhole, Place
from .plan import whole_number
from .ranks import Ranks
from .sampler import ResumableSampler
from .timing import Timing
from .writing import Blocking, Overlapped, Strategy, Writer, blocking

_FORMAT = 1
_LOOK_EVERY = 0.02
"""Seconds between two looks for the parts of other ranks."""
T = TypeVar("T")


@dataclass(frozen=True)
class Restored:
    """What `load` has found and given back."""

    step: int
    folder: Path
    world_size: int
    """Of the run that wrote it."""
    generators: bool
    """Whether this rank's generators were given back: not for a rank that that run did not have."""


class StatePack:
    """Takes and gives back the state of a training.

        state = dict(model=model, optimizer=optimizer, sampler=sampler)
        with StatePack("run", **state, strategy=overlapped()) as pack:
            start = pack.load()
            for step in sampler.steps(loader, until=1000):
                ...; optimizer.step()
                if sampler.global_step % 50 == 0:
                    pack.save(sampler.global_step)

    Any name will do for what has `state_dict` and `load_state_dict`; `torch.Generator` does, too. `save` and
    `load` are called by all ranks of `group`; the directory is one that all of them see. Ranks that are not
    replicas say `sharded=True`; such a checkpoint is read by as many ranks as wrote it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        strategy: Strategy = blocking,
        keep: int = 3,
        sharded: bool = False,
        group: Any = None,
        patience: float = 600.0,
        grace: float = 10.0,
        **parts: Any,
    ) -> None:
        """Parts that are None are left out; `keep` finished checkpoints stay.

        Sharded, overlapped: rank 0 waits for the parts of the others for `patience` seconds, and for `grace`
        once the run ends with an error, which may be that others have died.
        Raises ValueError for what has no state, and for numbers that make no sense.
        """
        self.directory = Path(directory)
        self.parts = {name: part for name, part in parts.items() if part is not None}
        for name, part in self.parts.items():
            if not capture.is_packable(part):
                raise ValueError(
                    f"{name} is a {type(part).__name__}, which has no state_dict and load_state_dict; give "
                    "them to it, or leave it out."
                )
        if not self.parts:
            raise ValueError("A StatePack of nothing was asked for; name a model, an optimizer, a sampler, …")
        if not isinstance(strategy, Blocking | Overlapped):
            raise ValueError(
                f"The strategy is {strategy!r}; it must be `blocking` or `overlapped(max_in_flight=4)`."
            )
        if whole_number("keep", keep) < 1:
            raise ValueError(f"keep is {keep}; at least 1 checkpoint must stay.")
        self.strategy, self.keep, self.sharded = strategy, keep, sharded
        self.patience, self.grace = patience, grace
        self._ranks = Ranks.of(group)
        self._writes = sharded or self._ranks.rank == 0
        self._sequence = 0
        self._closed = False
        self._latest = math.inf
        overlaps = isinstance(strategy, Overlapped) and self._writes
        self._writer = Writer(strategy.max_in_flight) if overlaps else None  # type: ignore[union-attr]
        if self._writer is not None:
            atexit.register(self._at_exit)  # called before the writer's own, which was registered earlier

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._hurry()
        self.close()

    def close(self) -> None:
        """Wait until all checkpoints are durable; no collective. Raises CheckpointError if one is lost."""
        self._closed = True
        if self._writer is not None:
            atexit.unregister(self._at_exit)
            self._writer.close()

    def save(self, step: int) -> None:
        """Take a checkpoint behind step `step`. All ranks call it, at the same step.

        Raises CheckpointError, on all ranks, where one of them could not write this one (`overlapped`: one
        before it, said at the next call or by `close`). What was whole before stays so.
        """
        begin = time.perf_counter()
        if self._closed:
            raise CheckpointError("The StatePack is closed; make a new one to take more checkpoints.")
        place, generators = self._meet(step)
        path = self.directory / f"checkpoints-rank{self._ranks.rank:05d}.jsonl"
        timing = Timing(
            path, sequence=place.sequence, step=place.step, rank=self._ranks.rank, strategy=self.strategy.name
        )
        took: dict[str, float] = {}
        try:
            self._agree(lambda: self._take(place, generators, timing, took))
            # Asked of the strategy, not of the writer: ranks that write nothing are at the same barriers.
            if not isinstance(self.strategy, Overlapped):
                self._agree(lambda: self._commit_now(place, timing, took))
        finally:
            if took:
                timing.half(stall=time.perf_counter() - begin, **took)

    def load(self) -> Restored | None:
        """Give back the newest whole checkpoint; None where none was ever finished. All ranks call it.

        A newer one that is not whole is passed over with a warning. Raises CheckpointError where there are
        some and none can be read, ValueError where one is of another run; then at worst parts are given back
        already that come before the one that refused.
        """
        passed_over: list[str] = []
        for place in self._agree(self._candidates)[0]:
            found: list[Any] = []
            complaints = [one for one in self._agree(lambda: self._read(place, found)) if one]  # noqa: B023
            if not complaints:
                return self._give_back(place, *found)
            passed_over += complaints[:1]
            warnings.warn(f"Checkpoint {place.name} is passed over. {complaints[0]}", stacklevel=2)
        if passed_over:
            raise CheckpointError(
                f"None of the {len(passed_over)} checkpoints in {self.directory} is whole; the newest: "
                f"{passed_over[0]} Move the directory away to begin anew."
            )
        return None

    # --- ranks together ---

    def _agree(self, action: Callable[[], T]) -> list[T]:
        """A barrier behind something that may fail: where it fails on one rank, all raise, and none waits."""
        result, failure = None, None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 - raised again below, when the other ranks know of it
            failure = error
        outcomes = self._ranks.gather((result, None if failure is None else str(failure)))
        if failure is not None:
            raise failure
        for rank, (_, complaint) in enumerate(outcomes):
            if complaint is not None:
                raise CheckpointError(f"Rank {rank} failed at a checkpoint: {complaint}")
        return [one for one, _ in outcomes if one is not None]

    def _meet(self, step: int) -> tuple[Place, list[Any]]:
        """The first barrier: rank 0 says where; each says its step, its generators, what went wrong."""

        def bring() -> dict[str, Any]:
            if self._writer is not None:
                self._writer.raise_error()
            sequence = self._next_sequence() if self._ranks.rank == 0 else 0
            return {
                "step": whole_number("step", step),
                "sequence": sequence,
                "generators": capture.generators(),
            }

        try:
            brought = self._agree(bring)
        except BaseException:
            self._hurry()
            raise
        if len(steps := {one["step"] for one in brought}) > 1 or min(steps) < 0:
            raise CheckpointError(
                f"Ranks asked for a checkpoint at the steps {sorted(steps)}; save() is called by all of "
                "them behind the same step, which is not negative."
            )
        self._sequence = brought[0]["sequence"]
        mine = [brought[self._ranks.rank]] if self.sharded else brought
        return Place(self._sequence, brought[0]["step"]), [one["generators"] for one in mine]

    def _next_sequence(self) -> int:
        newest = max((place.sequence for place in files.places(self.directory)), default=0)
        return max(newest, self._sequence) + 1

    # --- saving ---

    def _take(self, place: Place, generators: list[Any], timing: Timing, took: dict[str, float]) -> None:
        """Between the barriers: capture, and write or hand over."""
        if not self._writes:
            return
        begin = time.perf_counter()
        state = {
            "format": _FORMAT,
            "step": place.step,
            "parts": {name: capture.state_of(part) for name, part in self.parts.items()},
            "generators": generators,
        }
        state = capture.snapshot(state, copies=self._writer is not None)
        captured = time.perf_counter()
        if self._writer is None:
            took |= {"snapshot": captured - begin, "bytes": self._write(place, state)}
            took |= {"write": time.perf_counter() - captured, "enqueue": 0.0, "backpressure": 0.0}
            return
        waited = self._writer.enqueue(lambda: self._write_beside(place, state, timing))
        handed = time.perf_counter() - captured - waited
        took |= {"snapshot": captured - begin, "enqueue": handed, "backpressure": waited}

    def _write(self, place: Place, state: Any) -> int:
        world_size = self._ranks.world_size
        return files.write_part(self.directory, place, self._ranks.rank, world_size, self.sharded, state).size

    def _commit_now(self, place: Place, timing: Timing, took: dict[str, float]) -> None:
        """Blocking, behind a barrier: all parts are durable."""
        begin = time.perf_counter()
        if self._ranks.rank == 0:
            self._commit(place)
        if self._writes:
            timing.half(commit=time.perf_counter() - begin)

    def _commit(self, place: Place) -> None:
        files.point_at(self.directory, place)
        files.keep_newest(self.directory, place, self.keep)

    def _write_beside(self, place: Place, state: Any, timing: Timing) -> None:
        """In the writer's thread, which has no collectives: rank 0 looks for the others' parts."""
        begin = time.perf_counter()
        size = 0
        try:
            size = self._write(place, state)
            written = time.perf_counter()
            if self._ranks.rank == 0:
                self._await_parts(place)
                self._commit(place)
        except BaseException as error:
            timing.half(bytes=size, write=time.perf_counter() - begin, commit=None, error=str(error))
            raise
        timing.half(bytes=size, write=written - begin, commit=time.perf_counter() - written)

    def _await_parts(self, place: Place) -> None:
        """Until all ranks have published theirs, or for as long as there is patience."""
        begin = time.monotonic()
        while not files.is_finished(self.directory, place):
            now = time.monotonic()
            if now > min(begin + self.patience, self._latest):
                missing = files.missing_parts(self.directory, place)
                raise CheckpointError(
                    f"The parts of ranks {missing} of checkpoint {place.name} did not come within "
                    f"{now - begin:.0f} s, so it does not count; look at what those ranks say, and whether "
                    f"all see {self.directory}."
                )
            time.sleep(_LOOK_EVERY)

    def _hurry(self) -> None:
        """The run ends with an error: other ranks may have died, whose parts will not come."""
        self._latest = min(self._latest, time.monotonic() + self.grace)

    def _at_exit(self) -> None:
        if getattr(sys, "last_value", None) is not None:  # an exception that nobody has caught
            self._hurry()

    # --- loading ---

    def _candidates(self) -> list[Place]:
        """Rank 0's list decides: finished checkpoints, up to the one that the pointer names."""
        if self._ranks.rank:
            return []
        found = files.places(self.directory)
        try:
            newest = files.pointed_at(self.directory)
        except NotWhole as error:
            newest = None
            warnings.warn(f"{error} The newest checkpoint that is whole is taken.", stacklevel=4)
        else:
            if newest is None and any(files.is_finished(self.directory, place) for place in found):
                warnings.warn(
                    f"{self.directory} has no {files.POINTER}; the newest checkpoint that is whole is taken.",
                    stacklevel=4,
                )
        finished = [place for place in found if place == newest or files.is_finished(self.directory, place)]
        if newest is None:
            return finished
        older = [place for place in finished if place.sequence < newest.sequence]
        return [newest, *older]

    def _read(self, place: Place, found: list[Any]) -> str:
        """Why it cannot be taken; else "", and `found` gets the writing run's world size and state."""
        ranks = self._ranks
        try:
            part = files.read_part(self.directory, place, 0)
            if part.sharded and part.world_size != ranks.world_size:
                raise ValueError(
                    f"Checkpoint {place.name} is sharded over {part.world_size} ranks and cannot be given "
                    f"back to {ranks.world_size} yet; start as many ranks as wrote it."
                )
            if part.sharded:
                part = files.read_part(self.directory, place, ranks.rank)
            state = files.read_payload(self.directory, place, part)
        except NotWhole as error:
            return str(error)
        if not isinstance(state, dict) or state.get("format") != _FORMAT or state.get("step") != place.step:
            return f"Its payload is none that this version of StatePack writes (format {_FORMAT})."
        found += [part.world_size, state]
        return ""

    def _give_back(self, place: Place, world_size: int, state: dict[str, Any]) -> Restored:
        saved = state["parts"]
        for names, what in ((saved.keys() - self.parts, "holds"), (self.parts.keys() - saved, "lacks")):
            if names:
                raise ValueError(
                    f"Checkpoint {place.name} {what} {', '.join(sorted(names))}, unlike this StatePack; "
                    "make it with the same names as the run that wrote it."
                )
        # A sampler refuses another data set before anything has changed.
        for name, part in sorted(
            self.parts.items(), key=lambda item: not isinstance(item[1], ResumableSampler)
        ):
            capture.restore(part, saved[name])
        generators = state["generators"]
        mine = 0 if self.sharded else self._ranks.rank
        if known := mine < len(generators):  # last: what is restored before may draw numbers
            capture.restore_generators(generators[mine])
        return Restored(place.step, self.directory / place.name, world_size, known)
