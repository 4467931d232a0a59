"""What random programs are made of: pieces of a few lines, each with state of its own.

A piece is source: `setup` runs once, `step` in every step of the program (from 1), `final` at the end.
Whatever a piece sees it says (tests/workloads/odd/odd_program.py).  All choices are made by `chance` where a
piece is made, so that all ranks run one source; what differs between ranks differs by `rank`.  Random numbers
come from the device alone: natively host and device share one generator.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Of one program.  `ranks`: it needs so many."""

    kind: str
    setup: tuple[str, ...]
    step: tuple[str, ...]
    final: tuple[str, ...] = ()
    ranks: int = 1


Maker = Callable[[random.Random], Piece]
MAKERS: dict[str, Maker] = {}
"""By kind, once the modules of pieces are imported (programs.py)."""


def maker(make: Maker) -> Maker:
    """The function that makes a kind of piece, which has its name."""
    MAKERS[make.__name__] = make
    return make
