"""Where a loop over epochs and batches is, and how it goes on there. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from understudy import jit
from understudy.jit.generators import Generators

Batch = TypeVar("Batch")


class Position:
    """Counts epochs, and the batches of one; puts this rank's generators back where the undisturbed loop has
    them: behind the batch that is fetched first, because a loader draws when it begins."""

    def __init__(self) -> None:
        self.epoch = 0
        self.batch = 0
        """Of this epoch, batches that the loop has been given."""
        self._generators: Generators | None = None
        self._between_steps = False
        """Within an epoch: behind an optimizer's step, and in front of the next micro-batch."""

    def go_on(self, epoch: int, batch: int) -> None:
        """Behind a checkpoint that was loaded."""
        self.epoch, self.batch = epoch, batch
        if jit.restore_generators():
            self._generators = Generators.now()

    def epochs(self, count: int) -> Iterator[int]:
        """Those that are left of so many, the one in progress first."""
        for epoch in range(self.epoch, count):
            self.epoch = epoch
            yield epoch
            self.batch = 0

    def through(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Those of this epoch that are left."""
        self._between_steps = False
        for batch in batches:
            self._put_back()
            if self._between_steps:  # an evaluation may lie there
                jit.keep_generators()
            self._between_steps = False
            self.batch += 1
            yield batch
        self._put_back()

    def step_ends(self) -> None:
        """The optimizer's, in the loop over batches."""
        jit.boundary()
        self._between_steps = True

    def _put_back(self) -> None:
        if self._generators is not None:
            self._generators.put_back()
            self._generators = None
