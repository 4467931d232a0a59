"""How far a recovery has come."""

from __future__ import annotations

from enum import Enum, auto


class Stage(Enum):
    """What a recovery's task does."""

    GATHERING = auto()
    """Ranks that are to be validated are awaited."""
    PREPARING = auto()
    """A round is about to begin."""
    RESTORING = auto()
    """A round steers the servers."""
    REPLAYING = auto()
    """All run; they are on their way back to where they were."""
