"""A leader whose member is lost: which ranks end, which come back, and what its host still runs."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
from led_job import Leader, Member, becomes, placement_of

from understudy.protos import control_pb2 as pb
from understudy.recovery.machine.processes import Watched
from understudy.recovery.planning.facts import FaultKind
from understudy.recovery.spanning.ranks.remote import RemoteProcess
from understudy.recovery.state.jobs import Session
from understudy.recovery.state.journaled_job import journaled_job, restored_job


def test_a_host_that_was_lost_before_it_told_of_its_ranks_ends_the_job(folder: Path) -> None:
    async def lose() -> None:
        b, c = Member(folder, "b"), Member(folder, "c")
        c.open(0)
        async with c, Leader(folder, {"b": b, "c": c}, known="bc", awaited="bc") as a:
            a.lead.lost_hosts.give_up("b", "nobody reaches it")
            session = await a.hears_of(0)
            await becomes(lambda: session.state == "lost")
            assert session.note.startswith("host b is lost, and with it the worker of rank 1")

    asyncio.run(lose())


def test_a_lost_host_harms_nobody_if_all_ranks_are_elsewhere(folder: Path) -> None:
    async def lose() -> None:
        b, c = Member(folder, "b"), Member(folder, "c")
        c.open(0)
        c.open(1)
        async with c, Leader(folder, {"b": b, "c": c}, known="bc", awaited="bc") as a:
            a.lead.lost_hosts.give_up("b", "nobody reaches it")
            await becomes(a.lead.members["c"].heard.is_set)
            assert [session.state for session in a.job.active_sessions()] == ["running"] * 2

    asyncio.run(lose())


class Images:
    """That have each rank come back."""

    def __init__(self, obstacle: str = "") -> None:
        self.obstacle = obstacle

    def bring_back(self, lost: list[Session]) -> str:
        for session in lost if not self.obstacle else ():
            session.restores_from_image = 5
        return self.obstacle

    def close(self) -> None:
        """There is nothing."""


def test_a_rank_that_comes_back_goes_on_and_what_its_host_still_runs_is_ended_when_that_is_back(
    folder: Path,
) -> None:
    async def lose() -> None:
        b = Member(folder, "b")
        with subprocess.Popen(["sleep", "600"]) as sleeper:
            b.open(1).worker = Watched(sleeper.pid)
            async with b, Leader(folder, {"b": b}, known="b") as a:
                session = await a.hears_of(1)
                a.lead.images, a.lead.room_for = cast(Any, Images()), lambda _: True
                a.lead.lost_hosts.give_up("b", "nobody reaches it")
                assert session.active and session.worker.running and not session.server.process.running
                verdict = session.server.verdict
                assert verdict is not None and verdict.kind is FaultKind.HOST_LOST
                assert verdict.evidence == "host b is lost (nobody reaches it)"
                assert sleeper.poll() is None
                a.lead.join("b")
                await becomes(lambda: sleeper.poll() == -signal.SIGKILL)
                # Its host is back, so early; its rank needs another home until it has come from its image.
                placement = placement_of(a)
                assert placement.is_homeless(session) and session.active and session.worker.running
                session.host, session.worker = "c", RemoteProcess(pb.Process(pid=9), lambda *_: None)
                assert not placement.is_homeless(session)

    asyncio.run(lose())


@pytest.mark.parametrize("known", ["by its pid", "wholly"])
def test_a_worker_that_was_given_up_is_ended_by_a_leader_that_was_started_since(
    folder: Path, known: str
) -> None:
    """It won: its rank, which had come back elsewhere, was taken for one that had moved there."""

    async def come_back() -> None:
        b = Member(folder, "b")
        with subprocess.Popen(["sleep", "600"]) as sleeper:
            b.open(1).worker = Watched(sleeper.pid)
            async with b:
                async with Leader(folder, {"b": b}, known="b") as a:
                    if known == "wholly":
                        await a.hears_of(1)
                        a.lead.images, a.lead.room_for = cast(Any, Images()), lambda _: True
                        a.lead.lost_hosts.give_up("b", "nobody reaches it")
                    else:
                        await a.lead.lost_hosts.leave_for_dead("b", sleeper.pid)
                        assert a.agent.noted, "its rank may be started elsewhere from here on"
                    written = journaled_job(a.job, None)
                    given_up = a.span.given_up
                again = restored_job(pb.JournaledJob.FromString(written.SerializeToString()))
                assert again.span is not None and again.span.given_up == given_up
                async with Leader(folder, {"b": b}) as standby:
                    standby.span.given_up = again.span.given_up
                    standby.lead.join("b")
                    await becomes(lambda: sleeper.poll() == -signal.SIGKILL)
                    assert 1 not in standby.job.sessions

    asyncio.run(come_back())


def test_a_worker_of_which_nobody_knew_whether_it_runs_is_ended_when_its_host_is_back(folder: Path) -> None:
    async def come_back() -> None:
        b = Member(folder, "b")
        with subprocess.Popen(["sleep", "600"]) as sleeper:
            b.open(1).worker = Watched(sleeper.pid)
            async with b, Leader(folder, {"b": b}) as a:
                await a.lead.lost_hosts.leave_for_dead("b", sleeper.pid)
                a.lead.join("b")
                await becomes(lambda: sleeper.poll() == -signal.SIGKILL)
                assert 1 not in a.job.sessions

    asyncio.run(come_back())


@pytest.mark.parametrize(
    ("room", "obstacle", "sentence"),
    [
        (False, "", "no other host of the cluster has a free device for it"),
        (True, "its CPU image is of no use: it is old", "its CPU image is of no use: it is old"),
    ],
)
def test_a_rank_that_cannot_come_back_ends_the_job_and_the_reason_is_told(
    folder: Path, room: bool, obstacle: str, sentence: str
) -> None:
    async def lose() -> None:
        b = Member(folder, "b")
        b.open(1)
        async with b, Leader(folder, {"b": b}, known="b") as a:
            session = await a.hears_of(1)
            session.restores_from_image = 5  # it had just come there from an image
            a.lead.images, a.lead.room_for = cast(Any, Images(obstacle)), lambda _: room
            a.lead.lost_hosts.give_up("b", "nobody reaches it")
            assert session.state == "lost" and not session.worker.running
            assert f"which nothing can bring back (nobody reaches it; {sentence})" in session.note

    asyncio.run(lose())
