"""A snapshot that is durable on all ranks, as proxyd remembers it for each of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from understudy.recovery.planning.facts import CommitFacts


@dataclass(frozen=True)
class Durable:
    """`bytes`: of all ranks' parts.  Records behind `commit` begin at `log_offset` of this rank's log."""

    serial: int
    run: Path
    """Where its stores lie."""
    bytes: int
    commit: CommitFacts
    log_offset: int
