"""Names of jobs: which may be one, and a new one where nobody has said any."""

from __future__ import annotations

import re
import secrets

JOB_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Part of paths, of labels and of command lines."""
TAIL = "abcdefghijkmnpqrstuvwxyz23456789"
"""Letters and digits that are not taken for one another."""
LONGEST = 15
"""Letters of the words, so that a name fits into a column."""


def trouble_with(name: str) -> str:
    """Why it cannot name a job; empty if it can."""
    if JOB_NAME.fullmatch(name):
        return ""
    return f"{name[:80]!r} is no name: letters, digits, - and _ only, at most 64"


def new_name() -> str:
    """As brave-otter-k3f9: one of more than 10^10, so that of a thousand jobs on one storage hardly ever two
    share one.
    """
    import coolname  # its lists of words are read when it is imported, and only who starts a run needs them

    words = coolname.generate_slug(2)
    while len(words) > LONGEST:
        words = coolname.generate_slug(2)
    return f"{words}-{''.join(secrets.choice(TAIL) for _ in range(4))}"
