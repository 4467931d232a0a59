"""Random schedules of jobs on several hosts, with all their proxyds (tests/harness/job_simulation)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
from job_simulation.run import simulate
from simulation.run import quiet

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent import host_agent
from understudy.recovery.planning.progress import Position, Progress
from understudy.recovery.planning.takeover import takeover
from understudy.recovery.spanning.leader.lead import Lead
from understudy.recovery.spanning.leader.lost_hosts import LostHosts
from understudy.recovery.spanning.leader.relocations import Relocations
from understudy.recovery.spanning.member.deputy import Deputy
from understudy.recovery.state.jobs import Session
from understudy.recovery.state.snapshot_leases import SnapshotLeases
from understudy.recovery.upkeep.watch import Watch

SCHEDULES = 20
"""`make simulate-jobs` runs 100,000."""


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    quiet()
    yield
    structlog.reset_defaults()


@pytest.mark.timeout(300)
def test_a_job_on_several_hosts_ends_as_undisturbed_or_for_a_reason(seed: int) -> None:
    """Whichever servers, proxyds, links, devices and hosts fail, whoever moves, with etcd there or not."""
    faults: Counter[str] = Counter()
    ended = adopted = 0
    for number in range(seed * SCHEDULES, (seed + 1) * SCHEDULES):
        outcome = simulate(number)
        assert not outcome.violations, f"--seed {number}: {outcome.violations[0]}"
        faults.update(outcome.faults)
        ended, adopted = ended + outcome.ended, adopted + outcome.adopted
    print(ended, adopted, faults)
    assert ended > SCHEDULES and adopted and faults["cut"] and faults["proxyd died"]


def test_a_schedule_runs_in_the_same_way_each_time() -> None:
    once, again = simulate(7), simulate(7)
    assert (once.events, once.plans, once.virtual_s) == (again.events, again.plans, again.virtual_s)


async def nothing_is_left(_: LostHosts) -> None:
    """By the proxyd before."""


async def nobody_is_told(_: Lead) -> None:
    """Of what was decided."""


async def move_within_its_round(
    relocations: Relocations, session: Session, destination: str, keep_source: bool
) -> pb.Transfer:
    """As it was before a move came to its end by itself."""
    session.moving = asyncio.Event()
    try:
        return await relocations._move(session, destination, keep_source)
    finally:
        session.moving.set()
        session.moving = None


CARELESS: dict[str, tuple[Any, str, Callable[..., Any], int]] = {
    "what was decided is done before it is written down": (Lead, "settle", nobody_is_told, 0),
    "whoever takes a job over is told of no fault": (takeover, "notices_of", lambda reports: iter(()), 73),
    "faults of ranks that a leader hears of anew do not matter": (
        Lead, "_tell_of_faults", lambda lead, member, news: member.told_all({}), 71
    ),
    "ranks of which their host tells no more go on": (Lead, "_not_there", lambda *_: None, 15),
    "what a host says first counts of ranks that have opened since": (
        Lead, "opened", lambda lead, member, one: lead.described(member, one), 562
    ),
    "a move is broken off with its round": (Relocations, "move", move_within_its_round, 150),
    "what goes with images is not held": (SnapshotLeases, "hold", lambda *_: None, 0),
    "whoever follows a proxyd does not ask what it was about to bring back": (
        LostHosts, "follow_predecessor", nothing_is_left, 24
    ),
    "who has not told yet has no ranks in a job whose launcher has ended": (
        host_agent, "goes_on", lambda job: any(one.host for one in job.sessions.values()), 115
    ),
    "nobody looks whether a collective ends": (Watch, "_look_at_collectives", lambda *_: None, 38),
    "nobody looks whether a server gets on": (Progress, "look", lambda *_: None, 13),
    "a server that has told of a fault is watched while its leader is away": (
        Deputy, "stands", lambda deputy, session: session.rank in deputy._at_barrier, 23
    ),
    "a server that stands still on purpose is watched like any other": (
        Progress, "look_aside",
        lambda progress, now_ns: progress.look(Position(0, 1, 0, 0, in_collective=False), now_ns, 0), 130
    ),
}  # fmt: skip
"""And from which schedule on that is looked for: the first one showed it when this was written."""
LOOKED_AT, LONGEST_S = 60, 700.0


@pytest.mark.drawn(3)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", CARELESS)
def test_the_schedules_show_what_would_go_wrong_if(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, careless, first = CARELESS[how]
    for number in range(first, first + LOOKED_AT):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, careless)
            found = simulate(number, longest_s=LONGEST_S).violations
        if found and not simulate(number, longest_s=LONGEST_S).violations:
            print(f"--seed {number}: {found[0]}")
            return
    pytest.fail(f"nothing was seen from {first} on")
