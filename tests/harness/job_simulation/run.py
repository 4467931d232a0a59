"""Runs one seed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import structlog
from hosts_simulation.lives import LIFE, HostsLoop, run
from simulation.fabric import Violation
from simulation.layouts import Job, some_shape
from simulation.run import Outcome
from simulation.virtual_time import Stalled

from job_simulation.in_world import in_world
from job_simulation.schedules import some_case, some_places, with_lost_hosts, with_stalls
from job_simulation.world import HostsWorld

MOST_RANKS = 12
WITH_IMAGES = 0.3
"""Share of jobs of whose workers images are taken, and whose hosts may be lost for good."""
WITH_STALLS = 0.3
"""Share of jobs whose servers may hang, or be stopped, and whose proxyds watch them."""
STEPS = (8, 12, 16)
"""Of jobs with images: there are to be some."""
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
    images, spare_devices = random.Random(mixed(seed) + 1), 1
    takes_images = images.random() < WITH_IMAGES
    if takes_images:
        shape = replace(shape, steps=images.choice(STEPS))
    programs = Job(shape, seed).programs()
    schedule, troubles = case = some_case(chance, programs, places)
    if takes_images:
        schedule, troubles, spare_devices = with_lost_hosts(images, case, programs, places)
    stalls = random.Random(mixed(seed) + 2)
    watches = stalls.random() < WITH_STALLS
    if watches:
        schedule = with_stalls(stalls, schedule, programs)
    loop = HostsLoop()
    outcome = Outcome(seed, shape.world)
    if explain:
        print(shape, schedule, places, *troubles, f"{spare_devices} spare devices each", sep="\n")
        structlog.configure(processors=[_stamp(loop)], logger_factory=structlog.PrintLoggerFactory())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="understudy-"))) if takes_images else None
        world = HostsWorld(
            seed, shape, schedule, places, troubles, loop, longest_s,
            folder=folder, spare_devices=spare_devices, watches=watches,
        )  # fmt: skip
        stack.enter_context(in_world(world))
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
    outcome.came_back = world.faults["came back"]
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
