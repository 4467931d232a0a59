"""Random fault schedules: what goes wrong, where and when."""

from __future__ import annotations

import random
from dataclasses import dataclass

from simulation.programs import Do, Program

CALLS = ("Park", "Attach", "Rewind", "Restore", "RebuildCommunicators", "Resume")
STALLS = ("hang", "stop", "stuck")
"""At a record: what only somebody who watches notices."""
CALL_FAULTS = ("kill-before", "kill-during", "kill-after", "kill-other", "refuse", "lose-reply", "hang")


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong: at a record, at the n-th request of a kind, or at a time (seconds)."""

    kind: str
    rank: int = 0
    record: int = -1
    at: float = 0.0
    call: str = ""
    nth: int = 0
    lasts: float = 0.0


@dataclass(frozen=True)
class Move:
    """A rank that is to go to another device, at a time; `drains`: nobody else is to get its own."""

    rank: int
    at: float
    drains: bool


@dataclass(frozen=True)
class Schedule:
    """All faults of one run, and the circumstances."""

    faults: tuple[Fault, ...]
    spares: int
    optimizer_preimages: bool
    shadow_limit: int
    late_calls: bool
    believes: bool = False
    """Whether replicas are believed in from the beginning, as in a job that has run for long."""
    slowness: float = 1.0
    """How long records take: how often floors move and replicas are compared meanwhile."""
    snapshots: bool = False
    """Whether snapshots are taken."""
    storage: bool = False
    """Whether snapshots go to storage, and leave memory once they are there."""
    validates: int = 0
    """The first step that is executed twice; 0: none."""
    drifts: bool = False
    """Whether the program has an operator that does not replay, as a validation notices."""
    moves: tuple[Move, ...] = ()
    """Orders though nothing is broken."""
    unread: float = 0.0
    """How often state is not to be had from its server, but by way of storage, if even so."""

    short: tuple[tuple[int, int], ...] = ()
    """Ranks whose devices have no memory for pre-images of steps, and from which step on."""

    def is_short(self, rank: int, step: int) -> bool:
        """Whether that step's pre-images do not fit."""
        return any(one == rank and step >= first for one, first in self.short)

    @property
    def leaving(self) -> bool:
        """Whether a worker leaves before its program is over."""
        return any(fault.kind == "leave" for fault in self.faults)


def some_schedule(chance: random.Random, programs: list[Program]) -> Schedule:
    """A schedule for these programs."""
    count = chance.choice((1, 1, 2, 2, 3, 4, 6))
    slowness = chance.choice((1.0, 4.0, 10.0))
    lasts = 0.002 * slowness * max(len(program.records) for program in programs)
    faults = [_some_fault(chance, programs, lasts) for _ in range(count)]
    if chance.random() < 0.04:  # one record that always fails
        rank = chance.randrange(len(programs))
        record = chance.randrange(len(programs[rank].records))
        kind = chance.choice(("kill", "collective"))
        faults += [Fault(kind, rank, record)] * 3
    return Schedule(
        tuple(faults),
        spares=chance.choice((0, 1, 1, 2)),
        optimizer_preimages=chance.random() < 0.8,
        shadow_limit=chance.choice((1000, 1000, 1000, 6)),
        late_calls=chance.random() < 0.1,
        believes=chance.random() < 0.5,
        slowness=slowness,
        snapshots=chance.random() < 0.4,
        validates=chance.choice((0, 0, 1, 2, 3)),
        drifts=chance.random() < 0.1,
        storage=chance.random() < 0.5,
        moves=_some_moves(chance, len(programs), lasts),
        unread=chance.choice((0.0, 0.3, 1.0)),
        short=_some_that_are_short(chance, len(programs)),  # drawn last: what went before stays as it was
    )


def _some_that_are_short(chance: random.Random, world: int) -> tuple[tuple[int, int], ...]:
    if chance.random() < 0.7:
        return ()
    return tuple((rank, chance.randrange(1, 4)) for rank in range(world) if chance.random() < 0.7)


def _some_moves(chance: random.Random, world: int, lasts: float) -> tuple[Move, ...]:
    count = chance.choice((0, 0, 1, 2, 4))
    return tuple(
        Move(chance.randrange(world), chance.uniform(0, lasts), chance.random() < 0.5) for _ in range(count)
    )


def _some_fault(chance: random.Random, programs: list[Program], lasts: float) -> Fault:
    rank = chance.randrange(len(programs))
    records = programs[rank].records
    draw = chance.random()
    if draw < 0.06:
        kind = chance.choice(("call-error", "driver-suspect"))
        return Fault(kind, rank, chance.randrange(len(records)))
    if draw < 0.35:
        late = chance.random() < 0.6  # most of what can go wrong needs some commits
        return Fault("kill", rank, chance.randrange(len(records) // 2 if late else 0, len(records)))
    if draw < 0.5:
        talking = [n for n, record in enumerate(records) if record[0] in (Do.COLLECTIVE, Do.SEND, Do.RECEIVE)]
        if talking:
            return Fault("collective", rank, chance.choice(talking))
    if draw < 0.62:
        return Fault("kill", rank, at=chance.uniform(0, lasts))
    if draw < 0.9:
        call = chance.choice(CALLS)
        few = len(programs) if call in ("Park", "Rewind", "RebuildCommunicators", "Resume") else 3
        return Fault(chance.choice(CALL_FAULTS), rank, call=call, nth=chance.randint(1, 2 * few))
    if draw < 0.94:
        return Fault("kill-spare", at=chance.uniform(0, lasts))
    if draw < 0.98:
        return Fault("outage", at=chance.uniform(0, lasts), lasts=chance.choice((0.5, 5.0, 70.0)))
    return Fault("leave", rank, at=chance.uniform(0, lasts))
