"""A simulated device server ends an optimizer step as proxy_server/csrc/executor/roll_forward.cpp does it."""

from __future__ import annotations

from collections.abc import Collection
from enum import Flag, auto
from typing import Any

from simulation.log import Commit, Log
from simulation.programs import Do, Record
from understudy import replay
from understudy.recovery.planning import roll_forward


class RollForwardRefused(Exception):
    """The step cannot be finished in this way."""


class Mark(Flag):
    """What a buffer's content is."""

    ROLLED = auto()
    TAINTED = auto()
    OWN = auto()
    STEADY = auto()
    CHANGED = auto()


CLEAN = Mark(0)
LEFT_OUT = Mark.ROLLED | Mark.TAINTED


class RollForward:
    """Of one server."""

    def __init__(self, table: replay.ByteTable) -> None:
        self._table = table
        self._marks: dict[int, Mark] = {}
        self._step_digest = 0
        self.active = False

    def begin(self, contents: Any, lost: Collection[int]) -> None:
        """The state is that of the commit before the step, but for these; `lost` have no content."""
        self._marks = {}
        for handles, mark in (
            (contents.rolled, Mark.ROLLED), (contents.steady, Mark.STEADY), (contents.own, Mark.OWN),
            (lost, Mark.TAINTED),
        ):  # fmt: skip
            for handle in handles:
                self._marks[handle] = self._of(handle) | mark
        self._step_digest = contents.step_digest
        self._table.seal()
        self.active = True

    def _of(self, *handles: int) -> Mark:
        found = CLEAN
        for handle in handles:
            found |= self._marks.get(handle, CLEAN)
        return found

    def runs(self, record: Record, told: bool) -> bool:
        """Whether the record is to be run; else it was dealt with.  `told`: its value was told before."""
        do = record[0]
        if do is Do.RANDOM or (do is Do.NEW and record[2]):
            self._marks[record[1]] = Mark.OWN
        elif do is Do.FREE:
            self._marks.pop(record[1], None)
        elif do is Do.MIX:
            return self._mixes(record[1], record[2])
        elif do is Do.READ and self._of(record[1]) & LEFT_OUT:
            if not told:
                raise RollForwardRefused("the worker asks for a content")
            return False
        elif do in (Do.JOIN, Do.LEAVE, Do.COLLECTIVE, Do.SEND, Do.RECEIVE, Do.END):
            raise RollForwardRefused("the step does not end")
        elif do is Do.COMMIT and not record[1]:
            raise RollForwardRefused("a commit lies within the step")
        return True

    def _mixes(self, handle: int, sources: tuple[int, ...]) -> bool:
        own = self._of(handle, *sources) & Mark.OWN
        mine = self._of(handle)
        if not self._of(handle, *sources) & LEFT_OUT:
            self._marks[handle] = own
            return True
        if not mine & (Mark.ROLLED | Mark.STEADY):
            self._marks[handle] = mine | Mark.TAINTED | own
        elif own:
            raise RollForwardRefused("a rank's own values go into what its replica holds")
        else:
            self._marks[handle] = Mark.ROLLED | Mark.CHANGED
        return False

    def finish(self, step_digest: int) -> None:
        """The step's commit is about to be made."""
        alive = set(self._table.handles())
        for handle, mark in self._marks.items():
            if handle in alive and mark & Mark.TAINTED:
                raise RollForwardRefused("a content outlives the step, and nobody has it")
            if handle in alive and mark & Mark.ROLLED and not mark & Mark.CHANGED:
                raise RollForwardRefused("this rank did not change what its replica changed")
        if step_digest == 0 or step_digest != self._step_digest:
            raise RollForwardRefused("the step of its replica was another one")
        self._marks, self.active = {}, False


def is_of_the_step(copy: Any, mine: Commit, theirs: Log, plan: roll_forward.RollForward | None) -> bool:
    """Whether a copy is what the rank held at its commit, or, where the plan says so, what a step made of it.

    `mine` is the commit of the rank that gets it, `theirs` the log of the rank that gives it.
    """
    wanted = _digest(mine, copy.handle)
    if wanted == copy.digest:
        return True
    begins = [commit for commit in theirs.commits() if commit.step == mine.step and commit.optimizer]
    ends = [commit for commit in theirs.commits() if commit.step == mine.step + 1]
    return (
        plan is not None
        and copy.handle in plan.rolled
        and bool(begins and ends)
        and wanted is not None
        and _digest(begins[-1], copy.source_handle) == wanted
        and _digest(ends[0], copy.source_handle) == copy.digest
    )


def _digest(commit: Commit, handle: int) -> int | None:
    return next((row.digest for row in commit.rows if row.handle == handle), None)
