"""How long proxyd waits, where a test has a reason to wait for less: one value, handed down from `Settings`.

Whatever is made without it has the times of production.  Deadlines that no test waits for stand beside the
code that they bound.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """All in seconds."""

    lease_s: float = 10.0
    """How long a host that gives no sign still counts as alive, and as the leader of its jobs."""
    follows_s: float = 60.0
    """How long the members of a lost leader wait for its standby to lead their job on."""
    record_again_s: float = 5.0
    """How long such a member goes by the job's record as it has read it."""
    notice_s: float = 0.1
    """How long the notice of a death that was found otherwise may be on its way."""
    look_busy_s: float = 0.02
    """Between two looks at a job's logs while commits come ..."""
    look_idle_s: float = 0.1
    """... and while none does."""
    place_within_s: float = 2.5
    """How long news that make a place on another host possible may be on their way ..."""
    place_again_s: float = 0.2
    """... and how often they are looked for."""
    image_part_s: float = 60.0
    """For the next part of a worker's image that is being taken on another host."""
    uploader_hangs_s: float = 300.0
    """An uploader that has handed over nothing for so long is ended ..."""
    uploader_again_s: float = 10.0
    """... and another one begins anew after this."""
    scrape_s: float = 5.0
    """A scrape of the metrics is answered within this, or gets none of ours."""
    cancel_again_s: float = 2.0
    """How long a task that was cancelled may take to end before it is cancelled once more."""


TIMING = Timing()
