"""What is told of a rank whose job is taken over: one thing, and the same whoever takes it over."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from led_job import Member

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent.remote_ranks import RemoteRanks
from understudy.recovery.planning.takeover.notices import BROKEN_OFF, FaultNotice, notice_of, notices_of
from understudy.recovery.planning.takeover.reports import OpenFault, RankReport
from understudy.recovery.state.jobs import Job

KINDS = ("", "call", "suspect", "restart", "collective", "validation")
BOTH = (False, True)


def told_of(kind: str, **known: bool) -> str:
    """Kind of what is told of rank 1, whose server stands at a fault of that kind; empty: nothing."""
    fault = OpenFault(kind, f"of {kind}", 9) if kind else None
    notice = notice_of(RankReport(1, fault=fault, **known))
    if notice is None:
        return ""
    if notice.message == BROKEN_OFF:
        assert notice == FaultNotice(1, "collective", BROKEN_OFF)
        return "broken off"
    expected = ("", None) if kind == "validation" else (f"of {kind}", 9)
    assert (notice.rank, notice.kind, notice.message, notice.record_index) == (1, kind, *expected)
    return notice.kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({}, "{kind}"),  # it runs, or stands by itself
        ({"parked": True}, "{fault or broken off}"),
        ({"holds_state": False}, "{fault or broken off}"),
        ({"holds_state": False, "parked": True}, "{fault or broken off}"),
        ({"holds_state": False, "in_hand": True}, "{kind}"),  # who takes over was not away
        ({"parked": True, "in_hand": True}, "{fault or broken off}"),
    ],
)
def test_why_a_rank_stands_is_told_or_else_that_it_was_left_standing(
    kind: str, known: dict[str, bool], expected: str
) -> None:
    broken_off = kind if kind not in ("", "validation") else "broken off"
    assert told_of(kind, **known) == (kind if expected == "{kind}" else broken_off)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_its_end_is_told_of_a_device_server_that_has_ended(kind: str) -> None:
    for holds_state, parked, in_hand in itertools.product(BOTH, BOTH, BOTH):
        known = {"holds_state": holds_state, "parked": parked, "in_hand": in_hand}
        assert told_of(kind, server_runs=False, **known) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_that_is_being_dealt_with_is_not_told_again(kind: str) -> None:
    assert told_of(kind, fault_in_hand=True) == told_of(kind, fault_in_hand=True, in_hand=True) == ""
    assert told_of(kind, fault_in_hand=True, parked=True) == "broken off"


class Recovers:
    """In place of a coordinator."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def __getattr__(self, method: str) -> Any:
        return lambda session, *what: self.told.append((method, *what))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("call", ("call_failed", 5, False, "why", 9)),
        ("suspect", ("call_failed", 5, True, "why", 9)),
        ("restart", ("restart_refused", 5, "why", 9)),
        ("collective", ("collective_failed", 7, "why", 9)),
        ("validation", ("validation_reached", 7)),
        ("", ("collective_failed", 7, BROKEN_OFF, 30)),
    ],
)
def test_who_recovers_the_job_hears_of_it_as_if_a_device_server_told_it_now(
    kind: str, expected: tuple[Any, ...]
) -> None:
    """A server that cannot go on from where it was restored was told of by nobody once proxyd had died."""
    job, recovers = Job("j", None, []), Recovers()
    session: Any = SimpleNamespace(
        job=job, rank=1, generation=7, server=SimpleNamespace(generation=5),
        log=SimpleNamespace(cursor_index=30),
    )  # fmt: skip
    job.sessions[1] = session
    agent: Any = SimpleNamespace(deputies={}, coordinators={"j": recovers}, jobs={"j": job})
    fault = OpenFault(kind, "why", 9) if kind else None
    RemoteRanks(agent).tell_all(job, notices_of([RankReport(1, parked=not kind, fault=fault)]))
    assert recovers.told == [expected]


async def nothing(*_: object) -> None: ...


@pytest.mark.parametrize("kind", ["", "restart"])
def test_a_rank_that_a_lost_leader_was_rolling_forward_has_no_state_for_its_successor(
    kind: str, folder: Path
) -> None:
    """Nor has it more shadows than before: which ones an earlier server overwrote is not forgotten."""

    async def check() -> None:
        b, recovers = Member(folder, "b"), Recovers()
        session, deputy = b.open(1), b.takes_part()
        session.restored_commit = session.resumed_commit = session.rolled_commit = 80
        if kind:
            deputy.tell(pb.FaultReport(job="j", rank=1, kind=kind, message="it cannot", record_index=4))
        parts: Any = SimpleNamespace(rest=lambda: None)
        deputy.parts = parts
        controller = SimpleNamespace(
            deputy=deputy, validations=SimpleNamespace(go_on=lambda sessions: None), lead=lambda: None,
            succeed_leader=lambda: agent.deputies.clear(), end=nothing, retire=None,
        )  # fmt: skip
        agent: Any = SimpleNamespace(
            controllers={"j": controller}, deputies={"j": deputy}, coordinators={"j": recovers}, jobs=b.jobs
        )
        await RemoteRanks(agent).promote(session.job)
        expected = ("restart_refused", 0, "it cannot", 4) if kind else ("collective_failed", 0, BROKEN_OFF, 0)
        assert recovers.told == [expected]
        assert not session.has_state and not session.rolling and session.resumed_commit == 80

    asyncio.run(check())
