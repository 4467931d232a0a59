"""Of two device servers of a rank the one with its state goes on when its job is taken over."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from led_job import Leader, Member, Server, becomes
from test_leading_members import steer

from understudy.protos import control_pb2 as pb
from understudy.recovery.planning.takeover.servers import ServerReport, Serving, serving
from understudy.recovery.state.jobs import Session
from understudy.recovery.state.taking_over import keep_one_server

SOUND, PREPARED, DEAD = ServerReport(True, True), ServerReport(True, False), ServerReport(False, True)
NEITHER = ServerReport(False, False)


@pytest.mark.parametrize(
    ("servers", "serves"),
    [
        ((SOUND,), 0),
        ((PREPARED,), 0),
        ((DEAD,), 0),
        ((SOUND, SOUND), 0),  # all has been copied
        ((SOUND, DEAD), 0),
        ((PREPARED, SOUND), 1),
        ((DEAD, SOUND), 1),
        ((NEITHER, SOUND), 1),
        ((PREPARED, DEAD), 0),
        ((DEAD, DEAD), 0),
        ((DEAD, NEITHER), 0),
        ((PREPARED, PREPARED), 0),
    ],
)
def test_the_first_that_has_the_state_serves(servers: tuple[ServerReport, ...], serves: int) -> None:
    assert serving(servers) == Serving(serves, suspect=serves == 1)


def test_one_serves_whatever_there_is_and_never_one_without_the_state_beside_one_with_it() -> None:
    every = [ServerReport(*known) for known in itertools.product((False, True), repeat=2)]
    for servers in itertools.product(every, repeat=2):
        found = serving(servers)
        assert 0 <= found.index < 2
        assert servers[found.index] == SOUND or SOUND not in servers


@pytest.mark.parametrize("restored", [False, True])
def test_a_leader_that_follows_one_that_died_amid_a_copy_finds_the_server_that_has_the_state(
    folder: Path, restored: bool
) -> None:
    """It was the one that had just begun, and nobody had the state of the rank any more."""

    async def follow() -> None:
        b = Member(folder, "b")
        there = b.open(1)
        former: Any = there.server
        async with b:
            async with Leader(folder, {"b": b}, known="b") as a:
                session = await a.hears_of(1)
                await steer(session, "Park", pb.ParkRequest())
                session.server = await a.lead.replace(session, keep_source=True)
                new: Any = there.server
                assert new is not former
                await steer(session, "Attach", pb.AttachRequest())
                if restored:
                    await steer(session, "Restore", pb.RestoreRequest(commit=3))
            for _ in range(2):
                async with Leader(folder, {"b": b}, known="b", awaited="b") as a:
                    session = await a.hears_of(1)
                    serves, ended = (new, former) if restored else (former, new)
                    assert session.server.pid == serves.process.pid and session.has_state
                    assert session.server.suspect != restored
                    assert b.placement.retired == [ended] and not serves.retired
                    await becomes(a.lead.members["b"].connected.is_set)
                    assert [fault.kind for fault in a.agent.told] == ["collective"]  # it stands

    asyncio.run(follow())


def test_a_leader_whose_leadership_was_renewed_still_has_what_it_has_left_behind(folder: Path) -> None:
    """It may be copying from there; only who follows it knows nothing of that."""

    async def renew() -> None:
        b = Member(folder, "b")
        there, behind, new = b.open(1), Server(), Server()
        left: Any = behind
        b.takes_part().left_behind[0] = left
        async with Leader(folder, {"b": b}, known="b") as a:
            link = a.lead.members["b"]
            async with b:
                await becomes(link.connected.is_set)
            former: Any = there.server
            replaced: Any = new
            there.source_server, there.server, there.lacks_state = former, replaced, True
            assert a.span.leading is not None
            a.span.leading.token += 1000
            await becomes(lambda: not link.connected.is_set())
            async with b:
                await becomes(link.connected.is_set)
                assert b.takes_part().newest_leadership == a.span.leading.token
                assert not b.placement.retired and there.source_server is former
            Leader.numbers += 1000
        async with b, Leader(folder, {"b": b}, known="b") as a:
            await becomes(lambda: "b" in a.lead.members and a.lead.members["b"].connected.is_set())
            assert b.placement.retired == [left, new] and there.server is former

    asyncio.run(renew())


def test_a_server_that_is_about_to_be_replaced_and_has_no_successor_yet_is_left_alone(folder: Path) -> None:
    async def keep() -> None:
        session: Session = Member(folder, "b").open(1)
        session.source_server = session.server
        keep_one_server(session, lambda server: pytest.fail(f"{server} is ended"))
        assert session.source_server is session.server

    asyncio.run(keep())
