"""A call of a decorated function: where it goes on, which hints become checkpoints, and what they hold."""

from __future__ import annotations

import functools
import io
import logging
import os
import pickle
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import iterating
from .files import Folder, Stored
from .liveness import DELETED
from .pickling import Memory, StatePickler, StateUnpickler, deeply
from .rewriting import Rewritten
from .source import Hint, HintError, Source, where
from .surroundings import Shared, say_once

_log = logging.getLogger("understudy.hints")
_KEEP = 2
_SMALL = 1 << 20
"""Bytes of a tensor that is copied when a checkpoint is tried; of larger ones only the size counts."""
_BYTES_PER_SECOND = 200e6
"""Assumed of the disk until a checkpoint was timed."""
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
observer: Callable[[str, int], None] | None = None
"""Told of each hint that is passed and each checkpoint that is durable, and how many that were; for tests."""


@dataclass(frozen=True)
class Settings:
    """What @checkpoints was told."""

    overhead: float
    failure_rate: float
    directory: Path
    cost: Any
    every: int | None
    auto: bool


@dataclass(frozen=True)
class Plan:
    """A decorated function: what it was and what it became."""

    source: Source
    rewritten: Rewritten
    settings: Settings

    @property
    def function(self) -> Any:
        return self.source.function

    @functools.cached_property
    def hints(self) -> dict[int, Hint]:
        return {hint.number: hint for hint in self.source.hints.values()}


class Run:
    """What the rewritten function asks, under the name that it has for it."""

    entered = staticmethod(iterating.entered)
    over = staticmethod(iterating.over)

    def __init__(self, plan: Plan, shared: Shared, folder: Folder) -> None:
        self.plan, self.shared, self.folder = plan, shared, folder
        self.settings = plan.settings
        self.known: dict[Any, Any] = {}
        self.cells = dict(shared.reached.cells)
        self.count = self.taken = 0
        self.tried: set[int] = set()
        self.given_up: set[int] = set()
        self.unsafe: set[int] = set()
        self.passing: dict[int, list[BaseException]] = {}
        """Checkpoints that were taken while an exception was on its way, and which."""
        from .scheduling import Scheduler  # late: a function may be decorated and never called

        self.scheduler = Scheduler(self.settings.failure_rate, self.settings.overhead, self.settings.cost)
        self.process, self.last = os.getpid(), time.monotonic()
        self.stored = self._stored()
        self.state: dict[str, Any] = {}
        self.sequence = max(folder.sequences(), default=0)

    def function(self) -> types.FunctionType:
        """The rewritten function, with this run and the variables of the functions around it."""
        code, original = self.plan.rewritten.code, self.plan.function
        free = zip(original.__code__.co_freevars, original.__closure__ or (), strict=True)
        cells = {**dict(free), self.plan.rewritten.run: types.CellType(self)}
        closure = tuple(cells[name] for name in code.co_freevars)
        made = types.FunctionType(
            code, original.__globals__, original.__name__, original.__defaults__, closure
        )
        made.__kwdefaults__ = original.__kwdefaults__
        return made

    def enter(self, captured: types.FunctionType | None) -> int:
        """The number of the hint behind which to go on; 0: from the beginning. `captured` has the cells."""
        if captured is not None:
            own = zip(captured.__code__.co_freevars, captured.__closure__ or (), strict=True)
            self.cells |= {f"{name} itself": cell for name, cell in own}
        if self.stored is not None:
            self.state = self._load(self.stored)
        named = {id(cell): ("cell", name) for name, cell in self.cells.items()}
        self.known = {**self.shared.externals.known, **named}
        if self.stored is None:
            return 0
        _log.info("%s goes on behind line %d, from %s.", self._where(), self._line(), self.stored.path)
        if errors := self._on_their_way(self.variables()):
            self.passing[self.stored.sequence] = errors
        return int(self.stored.head["hint"])

    def variables(self) -> dict[str, Any]:
        """The saved values of those variables that had one."""
        return self.state["variables"]  # type: ignore[no-any-return]

    def arrive(self) -> int:
        """The hint is reached: from here on everything is as it was."""
        iterating.give_generators(self.state["generators"])
        self.state = {}
        self.last = time.monotonic()
        return 0

    def iterator(self, iterable: Any, line: int) -> Iterator[Any]:
        iterator = iter(iterating.over(iterable))
        complaint = iterating.complaint(iterable, iterator)
        if complaint and not self.settings.auto:
            raise HintError(f"{self._where()} has a hint inside the loop in line {line}, over {complaint}.")
        return iterator  # type: ignore[no-any-return]

    def manager(self, manager: Any, line: int) -> Any:
        """Raises HintError for what cannot be entered a second time, before it is entered at first."""
        if not iterating.is_enterable(manager):
            if not self.settings.auto:
                raise HintError(
                    f"{self._where()} has a hint inside the with in line {line}, whose "
                    f"{type(manager).__name__} cannot be entered a second time in another process; put the "
                    "hint outside."
                )
            self.unsafe.add(id(manager))
        return manager

    def due(self, hint: int) -> bool:
        """Whether this hint becomes a checkpoint; in any case at first, to see whether it can."""
        self.count += 1
        if observer is not None:
            observer("hint", self.count)
        if hint in self.given_up or os.getpid() != self.process:
            return False
        if hint not in self.tried:
            return True
        return self._chosen(hint, None)

    def save(self, hint: int, variables: dict[str, Any]) -> None:
        """Raises HintError, in one sentence, where the state cannot be saved."""
        begin = time.monotonic()
        saved = self.plan.rewritten.saved[hint]
        kept = {
            name: value if name in saved else None
            for name, value in variables.items()
            if name in saved or DELETED + name in saved
        }
        errors = self._on_their_way(kept)
        variables.clear()  # the frame keeps this dictionary, and with it what the function has given up
        if not all(isinstance(error, Exception) and not isinstance(error, HintError) for error in errors):
            return  # on its way is what cuts the run off, such as KeyboardInterrupt
        try:
            pickled, memory = self._pickled(hint, kept)
        except HintError as error:
            if not self.plan.hints[hint].proposed:
                _log.error("%s", error)  # the function may catch it
                raise
            self.given_up.add(hint)
            _log.info("No checkpoint is taken at a place that was proposed: %s", error)
            return
        if hint not in self.tried:
            self.tried.add(hint)
            size = len(pickled) + sum(storage.nbytes() for storage in memory.storages)
            now = time.monotonic()
            self.last += now - begin
            if not self._chosen(hint, now - begin + size / _BYTES_PER_SECOND):
                return
        if errors:
            self.passing[self.sequence + 1] = errors
        self._write(hint, pickled, memory)
        now = time.monotonic()
        if self.settings.every is None:
            self.scheduler.saved(now - begin)
        self.last = now

    def ended_by(self, error: BaseException) -> None:
        """Whoever calls again wants to go on, and not to be told the same: it may be the machine's error."""
        if os.getpid() == self.process:
            self.folder.drop(number for number, errors in self.passing.items() if error in errors)

    def _on_their_way(self, variables: dict[str, Any]) -> list[BaseException]:
        described = self.plan.rewritten.described
        known = (value for name, value in variables.items() if name in described)
        return [value for value in known if isinstance(value, BaseException)]

    def _chosen(self, hint: int, cost: float | None) -> bool:
        if self.settings.every is not None:
            return self.count % self.settings.every == 0
        planned = self.scheduler.planning
        due = self.scheduler.due(hint, time.monotonic() - self.last, cost)
        self.last += self.scheduler.planning - planned
        return due

    def _pickled(self, hint: int, variables: dict[str, Any]) -> tuple[bytes, Memory]:
        try:
            self._check_managers(variables)
            pickled, memory = deeply(lambda: self._pickled_once(hint, variables))
            if hint not in self.tried:
                deeply(lambda: self._check_that_it_reads(pickled, memory))
        except Exception as error:
            raise HintError(self._complaint(hint, variables, error)) from error
        return pickled, memory

    def _pickled_once(self, hint: int, variables: dict[str, Any]) -> tuple[bytes, Memory]:
        file, memory = io.BytesIO(), Memory()
        externals = self.shared.externals
        state = {
            "variables": variables,
            "bindings": self.shared.bindings(),
            "contents": externals.contents(memory),
            "generators": iterating.generators(),
        }
        pickle.dump(externals.plan, file)
        pickler = StatePickler(file, self.known, memory)
        pickler.dump(state)
        pickler.check_sharing()
        if pickler.disordered:
            say_once(
                f"{self._where()} has a set at the hint in line {self.plan.hints[hint].line} whose order of "
                "iteration a resumed run does not keep; iterate over sorted(…), or use a dictionary."
            )
        return file.getvalue(), memory

    def _check_managers(self, variables: dict[str, Any]) -> None:
        for name, value in variables.items():
            if name in self.plan.rewritten.described and id(value) in self.unsafe:
                raise pickle.PicklingError(f"{type(value).__name__} cannot be entered a second time")

    def _check_that_it_reads(self, pickled: bytes, memory: Memory) -> None:
        """What pickles need not unpickle; it is better known now than when it is needed."""

        def find(identity: Any) -> Any:
            if identity[0] != "storage":
                return self._shared(identity)
            storage = memory.storages[identity[1]]
            large = storage.nbytes() > _SMALL
            return torch.UntypedStorage(storage.nbytes()) if large else storage.cpu().clone()

        file = io.BytesIO(pickled)
        pickle.load(file)
        with torch.random.fork_rng(devices=()):
            StateUnpickler(file, find, pretend=True).load()

    def _complaint(self, hint: int, variables: dict[str, Any], error: Exception) -> str:
        line = self.plan.hints[hint].line
        described = self.plan.rewritten.described
        reason = str(error).rstrip(".") or type(error).__name__
        for name, value in variables.items():
            try:
                StatePickler(io.BytesIO(), self.known, Memory()).dump(value)
            except Exception as own:  # noqa: BLE001 - whatever its class raises
                what = described.get(name) or f"the variable {name!r}{self._bound(name)}"
                reason = str(own).rstrip(".") or type(own).__name__
                return (
                    f"{self._where()}: {what}, a {type(value).__name__}, may be read behind the hint in "
                    f"line {line} and cannot be saved: {reason}."
                )
        return f"{self._where()}: what may be read behind the hint in line {line} cannot be saved: {reason}."

    def _bound(self, name: str) -> str:
        lines = self.plan.rewritten.lines.get(name)
        return f" of line {lines}" if lines else ""

    def _write(self, hint: int, pickled: bytes, memory: Memory) -> None:
        head = {"source": self.plan.rewritten.digest, "python": PYTHON, "hint": hint}
        try:
            self.folder.write(self.sequence + 1, head, pickled, memory.storages, _KEEP, self.passing)
        except OSError as error:
            _log.warning(
                "No checkpoint could be written to %s, and the one before it still counts: %s.",
                self.folder.path,
                error,
            )
            return
        self.sequence += 1
        self.taken += 1
        if observer is not None:
            observer("saved", self.taken)

    def _stored(self) -> Stored | None:
        """The newest checkpoint that is whole. Raises HintError where it is another version's."""
        for stored in self.folder.newest():
            remedy = f"go on with what wrote it, or remove {self.folder.path} to begin anew"
            if stored.head["python"] != PYTHON:
                raise HintError(
                    f"The checkpoint {stored.path} was written by Python {stored.head['python']}, and this "
                    f"is {PYTHON}; {remedy}."
                )
            if stored.head["source"] != self.plan.rewritten.digest:
                raise HintError(
                    f"The checkpoint {stored.path} is of another version of {self._where()}; {remedy}."
                )
            return stored
        return None

    def _load(self, stored: Stored) -> dict[str, Any]:
        devices: dict[int, Any] = {}

        def find(identity: Any) -> Any:
            if identity[0] != "storage":
                return self._shared(identity)
            _, number, _, device = identity
            if device != "cpu" and number not in devices:
                devices[number] = _on_device(stored.storages[number], device)
            return devices.get(number, stored.storages[number])

        file = io.BytesIO(stored.pickle)
        try:
            self.shared.externals.align(pickle.load(file))
            state: dict[str, Any] = StateUnpickler(file, find).load()
        except HintError:
            raise
        except Exception as error:
            raise HintError(
                f"The checkpoint {stored.path} cannot be gone on with ({error}); remove "
                f"{self.folder.path} to begin anew."
            ) from error
        self.shared.externals.fill(state["contents"], stored.storages)
        self.shared.bind(state["bindings"])
        self.stored = Stored(stored.path, stored.sequence, stored.head, b"", [])
        return state

    def _shared(self, identity: tuple[str, Any]) -> Any:
        kind, which = identity
        return self.cells[which] if kind == "cell" else self.shared.externals.found[which][1]

    def _where(self) -> str:
        return where(self.plan.function)

    def _line(self) -> int:
        assert self.stored is not None
        hint = self.plan.hints.get(self.stored.head["hint"])
        if hint is None:
            raise HintError(f"The checkpoint {self.stored.path} is of a hint that there is not; remove it.")
        return hint.line


def _on_device(storage: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
    there = torch.UntypedStorage(storage.nbytes(), device=device)
    there.copy_(storage)
    return there
