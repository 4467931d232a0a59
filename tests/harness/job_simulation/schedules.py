"""What befalls hosts, beside what befalls device servers."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from simulation.programs import Do, Program
from simulation.schedules import CALLS, STALLS, Fault, Schedule, some_schedule

SLOW = 120.0
"""Jobs whose hosts may be lost: there is time for some images."""
AWAY_S = (8.0, 25.0, 60.0, 200.0)
"""How long hosts are cut off: from some on they are taken to be lost."""


@dataclass(frozen=True)
class HostFault:
    """`kind` is one of these; `steps` says within how many of its loop, or which rank or device.

    "cut" from `other` (empty: all), "die": its proxyd does, "etcd away", "move" there, "drain" a device of
    it, "device lost", "host lost" for good, "cut off" from all other hosts and etcd.
    """

    kind: str
    host: str
    at: float
    lasts: float
    other: str = ""
    steps: int = 0
    call: str = ""
    """When that request reaches a device server for the `nth` time; empty: at a time."""
    nth: int = 0


Case = tuple[Schedule, tuple[HostFault, ...]]


def some_places(chance: random.Random, world: int) -> dict[str, list[int]]:
    """Ranks by hosts, two or three of them, none without one."""
    names = "abc"[: chance.choice((2, 2, 3)) if world > 2 else 2]
    bounds = sorted(chance.sample(range(1, world), len(names) - 1))
    edges = [0, *bounds, world]
    return {name: list(range(edges[at], edges[at + 1])) for at, name in enumerate(names)}


def some_case(chance: random.Random, programs: list[Program], places: dict[str, list[int]]) -> Case:
    """A schedule of faults for a job on several hosts."""
    drawn = some_schedule(chance, programs)
    schedule = replace(
        drawn, storage=False, moves=(), believes=False, drifts=False, unread=0.0,
        faults=tuple(fault for fault in drawn.faults if fault.kind not in ("kill-spare", "outage")),
    )  # fmt: skip
    lasts = 0.002 * schedule.slowness * max(len(program.records) for program in programs)
    count = chance.choice((0, 1, 2, 3, 4, 6, 8))
    return schedule, tuple(_some_trouble(chance, list(places), lasts) for _ in range(count))


def with_lost_hosts(
    chance: random.Random, case: Case, programs: list[Program], places: dict[str, list[int]]
) -> tuple[Schedule, tuple[HostFault, ...], int]:
    """The same, slow enough for images to be taken, with hosts that are lost; and their spare devices."""
    schedule, troubles = case
    slower = replace(schedule, slowness=SLOW, snapshots=True)
    lasts = 0.002 * SLOW * max(len(program.records) for program in programs)
    lost = []
    for host in chance.sample(list(places), chance.choice((0, 1, 1, 1, 2))):
        kind, away = chance.choice((("host lost", 0.0), ("cut off", chance.choice(AWAY_S))))
        fault = HostFault(kind, host, chance.uniform(0.2, 1.0) * lasts, away)
        if chance.random() < 0.3:  # amid a recovery
            fault = replace(fault, at=0.0, call=chance.choice(CALLS), nth=chance.randint(1, 6))
        lost.append(fault)
    ranks = sum(map(len, places.values()))
    spare_devices = chance.choice((1, ranks, ranks))
    return slower, troubles + tuple(lost), spare_devices


def with_stalls(chance: random.Random, schedule: Schedule, programs: list[Program]) -> Schedule:
    """The same, with servers that do not get on, which only their watch notices."""
    stalls = []
    for _ in range(chance.choice((1, 1, 2, 3))):
        kind, rank = chance.choice(STALLS), chance.randrange(len(programs))
        records = programs[rank].records
        where = [n for n, one in enumerate(records) if kind != "stuck" or one[0] is Do.COLLECTIVE]
        if where:
            lasts = chance.choice((0.0, 0.1, 5.0)) if kind == "stop" else 0.0
            stalls.append(Fault(kind, rank, chance.choice(where), lasts=lasts))
    return replace(schedule, faults=schedule.faults + tuple(stalls))


def _some_trouble(chance: random.Random, hosts: list[str], lasts: float) -> HostFault:
    host, at = chance.choice(hosts), chance.uniform(0.0, 1.5 * lasts)
    draw = chance.random()
    if draw < 0.25:
        other = chance.choice(["", *(name for name in hosts if name != host)])
        return HostFault("cut", host, at, chance.choice((0.05, 1.0, 12.0, 40.0)), other)
    if draw < 0.33:
        return HostFault("etcd away", host, at, chance.choice((1.0, 8.0, 30.0, 120.0)))
    if draw < 0.48:
        return HostFault("move", host, at, 0.0, steps=chance.randrange(64))
    if draw < 0.53:
        return HostFault("drain", host, at, 0.0, steps=chance.randrange(64))
    if draw < 0.6:
        return HostFault("device lost", host, at, 0.0, steps=chance.randrange(64))
    lasts_s = chance.choice((0.05, 0.5, 5.0, 20.0))
    if draw < 0.9:  # amid a recovery
        if chance.random() < 0.5:
            host = hosts[0]
        call, nth, steps = chance.choice(CALLS), chance.randint(1, 4), chance.randint(0, 60)
        return HostFault("die", host, 0.0, lasts_s, steps=steps, call=call, nth=nth)
    return HostFault("die", host, at, lasts_s, steps=chance.randint(0, 400))
