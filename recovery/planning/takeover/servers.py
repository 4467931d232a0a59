"""Which device server of a rank goes on with it, if one was to follow another when its job was taken over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerReport:
    """`runs`: its process does.  `holds_state`: all memory of the rank is in it, as of one moment."""

    runs: bool
    holds_state: bool


@dataclass(frozen=True, slots=True)
class Serving:
    """`index` is the one that serves; all others are ended.

    `suspect`: it was about to be replaced, nobody knows why; only its memory can be relied on.
    """

    index: int
    suspect: bool


def serving(servers: Sequence[ServerReport]) -> Serving:
    """`servers`: the one that serves by what was written, and behind it the one that it was to copy from.

    The first that holds the rank's state: nobody else may have it.  If none does, the rank gets another one
    in any case.
    """
    for index, server in enumerate(servers):
        if server.runs and server.holds_state:
            return Serving(index, suspect=index > 0)
    return Serving(0, suspect=False)
