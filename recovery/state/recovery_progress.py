"""How far the recovery of a job that is under way has come, and how long each part of it has taken."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum


class Stage(StrEnum):
    """What a recovery does, in the order in which a round comes by."""

    GATHERING = "gathering"
    """Ranks that are to be validated come to the end of their minibatch."""
    PREPARING = "preparing"
    """A round is about to begin: notices of what else broke are given time to arrive."""
    AWAITING = "awaiting"
    """Hosts are awaited, without which the ranks cannot be steered."""
    PARKING = "parking"
    """The device servers that live stop between two records."""
    PLANNING = "planning"
    """What is known of the ranks becomes a plan."""
    RECORDING = "recording"
    """The decision is written where it outlives this proxyd."""
    REPLACING = "replacing"
    """Device servers go back in place, or others come in their place."""
    RESTORING = "restoring"
    """State comes from replicas, shadows and snapshots."""
    REBUILDING = "rebuilding"
    """Communicators are connected anew, and ranks let go on."""
    REPLAYING = "replaying"
    """Ranks are on their way back to where they were."""


FREE = frozenset({None, Stage.GATHERING, Stage.REPLAYING})
"""While ranks run by themselves; in all other stages they are on their way to a common commit."""


class RecoveryProgress:
    """The stage of a job's recovery, and the time since it began.  Times are CLOCK_MONOTONIC."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """`clock`: nanoseconds."""
        self._clock = clock
        self._began = self._entered = 0
        self._past: dict[Stage, int] = {}
        self.stage: Stage | None = None
        """None: no recovery is under way."""

    def enter(self, stage: Stage) -> None:
        """It does this from now on; the first one is its beginning."""
        now = self._clock()
        if self.stage is None:
            self._began, self._past = now, {}
        else:
            self._past[self.stage] = self._past.get(self.stage, 0) + now - self._entered
        self.stage, self._entered = stage, now

    def end(self) -> None:
        """No recovery is under way any more."""
        self.stage = None

    @property
    def steers(self) -> bool:
        """Whether ranks are on their way to a common commit."""
        return self.stage not in FREE

    @property
    def under_way_s(self) -> float:
        """Since the recovery began; 0 while there is none."""
        return (self._clock() - self._began) / 1e9 if self.stage is not None else 0.0

    @property
    def in_stage_s(self) -> float:
        """Since it has been in its stage; 0 while there is none."""
        return (self._clock() - self._entered) / 1e9 if self.stage is not None else 0.0

    def seconds(self) -> dict[str, float]:
        """What each stage of the recovery under way has taken so far, by its name."""
        taken = dict(self._past)
        if self.stage is not None:
            taken[self.stage] = taken.get(self.stage, 0) + self._clock() - self._entered
        return {stage.value: spent / 1e9 for stage, spent in taken.items()}
