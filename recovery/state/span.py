"""How this proxyd stands to a job on several hosts."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from pathlib import Path

from understudy.recovery.membership.job_leadership import Leading
from understudy.recovery.planning.takeover.workers import GivenUp


@dataclass(frozen=True)
class Stored:
    """A set of snapshots whose parts are all on storage."""

    step: int
    run: Path
    """Where the parts of ranks of this host lie."""


@dataclass(eq=False)
class Span:
    """The hosts of one job, and who leads it."""

    hosts: int
    """That it was started for."""
    token: bytes
    """Who knows it has a say in the job."""
    leader: str = ""
    """The host that leads; empty: this one."""
    leading: Leading | None = None
    """If it is this one."""
    members: set[str] = field(default_factory=set)
    """Other hosts that take part, known to the leader."""
    awaited: set[str] = field(default_factory=set)
    """Of them, those that had ranks under a leader before us, and have not told us of them."""
    remote_ranks: set[int] = field(default_factory=set)
    """Ranks of other hosts under a leader before us, until these hosts have told us of theirs."""
    astray: set[int] = field(default_factory=set)
    """Ranks on their way to another host, or of which nobody knows whether they went."""
    destinations: set[str] = field(default_factory=set)
    """Other hosts to which ranks are on their way."""
    given_up: set[GivenUp] = field(default_factory=set)
    """Workers whose ranks came back from images; their hosts may only have been cut off."""
    given_up_hosts: set[str] = field(default_factory=set)
    """Hosts that were given up, and whose ranks are still to come back from images."""
    standbys: tuple[str, ...] = ()
    """The hosts that would lead it on if ours is lost; empty: none would, or another host leads."""
    stored: Stored | None = None
    """The newest that is known of."""

    def admits(self, token: bytes) -> bool:
        """Whether a request is of this job."""
        return hmac.compare_digest(self.token, token)
