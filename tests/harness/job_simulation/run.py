"""Runs one seed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import structlog
from hosts_simulation.lives import LIFE, HostsLoop, run
from simulation.fabric import Violation
from simulation.layouts import Job, some_shape
from simulation.run import Outcome
from simulation.virtual_time import Stalled

from job_simulation.schedules import some_case, some_places
from job_simulation.world import HostsWorld, in_world

MOST_RANKS = 12
LONGEST_S = 2600.0
"""Three times in vain for communicators, and some."""


def simulate(seed: int, explain: bool = False, longest_s: float = LONGEST_S) -> Outcome:
    """Run the schedule of a seed; after `longest_s` its job should have ended, whatever happened to it."""
    begin = time.perf_counter()
    chance = random.Random(mixed(seed))
    shape = some_shape(chance)
    while shape.world > MOST_RANKS:
        shape = some_shape(chance)
    places = some_places(chance, shape.world)
    schedule, troubles = some_case(chance, Job(shape, seed).programs(), places)
    loop = HostsLoop()
    outcome = Outcome(seed, shape.world)
    world = HostsWorld(seed, shape, schedule, places, troubles, loop, longest_s)
    if explain:
        print(shape, schedule, places, *troubles, sep="\n")
        structlog.configure(processors=[_stamp(loop)], logger_factory=structlog.PrintLoggerFactory())
    with in_world(world):
        try:
            run(world.run(), loop)
        except (Violation, Stalled) as problem:
            if not world.violations:
                outcome.violations.append(f"{type(problem).__name__}: {problem}")
    outcome.violations += world.violations
    outcome.events, outcome.rounds = world.events, world.job.generation
    outcome.plans, outcome.faults, outcome.recoveries = world.plans, world.faults, world.job.recoveries
    outcome.ended = sum(log.session_state == 2 for log in world.logs)
    outcome.given_up = sum(log.session_state == 1 for log in world.logs)
    outcome.copied, outcome.adopted, outcome.moved = world.copied, world.adopted, world.carrier.moved
    outcome.virtual_s = loop.time()
    outcome.seconds = time.perf_counter() - begin
    if explain:
        for log in world.logs:
            where = f"rank {log.rank}: record {log.cursor_index} of {len(log.program.records)}"
            print(f"{where}, {('open', 'lost', 'ended')[log.session_state]} {log.lost_because}")
    return outcome


def mixed(seed: int) -> int:
    """Other numbers than those of the fault schedules of one host."""
    return seed * 1_000_003 + 17


def _stamp(loop: HostsLoop) -> Callable[[object, str, Any], str]:
    """A log line with the virtual time, and whose it is."""

    def line(_: object, __: str, event: Any) -> str:
        name, life = event.pop("event"), LIFE.get()
        said = ", ".join(f"{key}={value}" for key, value in event.items())
        return f"{loop.time():10.6f} {life.host if life is not None else '-'} {name}: {said}"

    return line
