"""Runs one seed."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from simulation.fabric import Violation
from simulation.layouts import Job, Shape, some_shape
from simulation.schedules import Schedule, some_schedule
from simulation.virtual_time import Stalled, VirtualLoop, run
from simulation.world import World


@dataclass
class Outcome:
    """What came of one seed."""

    seed: int
    world: int = 0
    events: int = 0
    rounds: int = 0
    violations: list[str] = field(default_factory=list)
    plans: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    ended: int = 0
    given_up: int = 0
    recoveries: list[Any] = field(default_factory=list)
    moved: int = 0
    """Ranks that went to another device, or host, as they were told."""
    came_back: int = 0
    """Ranks whose workers went on as in their images, as their hosts were lost."""
    copied: int = 0
    """Buffers that came from a replica."""
    validations: int = 0
    """Minibatches that all ranks executed twice."""
    adopted: int = 0
    """How often a proxyd followed one that died."""
    virtual_s: float = 0.0
    """How long it took by the clock of its world."""
    seconds: float = 0.0


def quiet() -> None:
    """No log lines: a run has thousands."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL), cache_logger_on_first_use=False
    )


def simulate(seed: int, explain: bool = False) -> Outcome:
    """Run the schedule of a seed."""
    chance = random.Random(seed)
    shape = some_shape(chance)
    schedule = some_schedule(chance, Job(shape, seed).programs())
    return simulate_case(seed, shape, schedule, explain)


def simulate_case(seed: int, shape: Shape, schedule: Schedule, explain: bool = False) -> Outcome:
    """Run a schedule on a job of a given shape; `seed` decides what it computes and how long all takes."""
    begin = time.perf_counter()
    loop = VirtualLoop()
    outcome = Outcome(seed, shape.world)
    made: list[World] = []

    async def main() -> None:
        world = World(seed, shape, schedule, loop)
        made.append(world)
        await world.run()

    if explain:
        print(shape, schedule, sep="\n")
        structlog.configure(processors=[_stamp(loop)], logger_factory=structlog.PrintLoggerFactory())
    try:
        run(main(), loop)
    except (Violation, Stalled) as problem:
        if not made or not made[0].violations:
            outcome.violations.append(f"{type(problem).__name__}: {problem}")
    world = made[0]
    outcome.violations += world.violations
    outcome.events, outcome.rounds = world.events, world.job.generation
    outcome.plans, outcome.faults, outcome.recoveries = world.plans, world.faults, world.job.recoveries
    outcome.ended = sum(log.session_state == 2 for log in world.logs)
    outcome.given_up = sum(log.session_state == 1 for log in world.logs)
    outcome.copied, outcome.moved = world.copied, world.moves.arrived
    outcome.validations = world.job.validations
    outcome.seconds = time.perf_counter() - begin
    if explain:
        for log in world.logs:
            where = f"rank {log.rank}: record {log.cursor_index} of {len(log.program.records)}"
            print(f"{where}, {('open', 'lost', 'ended')[log.session_state]} {log.lost_because}")
    return outcome


def _stamp(loop: VirtualLoop) -> Callable[[object, str, Any], str]:
    """A log line with the virtual time."""

    def line(_: object, __: str, event: Any) -> str:
        name = event.pop("event")
        return f"{loop.time():10.6f} {name}: " + ", ".join(f"{key}={value}" for key, value in event.items())

    return line
