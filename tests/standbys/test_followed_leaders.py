"""A proxyd that leads a job after another one of its host, which was to bring ranks of lost hosts back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from led_job import Leader, Member, becomes
from standbys import image_set

from understudy.protos import control_pb2 as pb
from understudy.recovery.spanning.ranks.image_set import KeptSet, Left
from understudy.recovery.state.jobs import Session

SERIAL = 4


class Images:
    """Those that the former proxyd has left."""

    def __init__(self, folder: Path, *told: tuple[str, pb.RankDescription]) -> None:
        described = {one.rank: one for _, one in told}
        images = image_set({one.rank: (host, "") for host, one in told})
        images.serial = SERIAL
        self.left = Left(images, KeptSet(folder, (1, 1), described=described))
        self.brought: list[int] = []
        self.back: list[int] = []
        self.held = 0

    def take_left(self) -> Left:
        return self.left

    def bring_back(self, lost: list[Session]) -> str:
        self.brought += [session.rank for session in lost]
        for session in lost:
            session.restores_from_image = SERIAL
        return ""

    def came_back(self, session: Session) -> None:
        self.back.append(session.rank)

    def hold(self) -> None:
        self.held += 1

    def close(self) -> None: ...


async def leads(a: Leader, images: Images | None, *given_up: str) -> None:
    """From here on, as its journal says."""
    a.lead.images, a.lead.room_for = cast(Any, images), lambda _: True
    a.span.given_up_hosts = set(given_up)
    await a.lead.lost_hosts.follow_predecessor()


def test_ranks_that_were_about_to_come_back_do_so(folder: Path) -> None:
    """Rank 0 was at y, which was given up; rank 1 is at b."""

    async def check() -> None:
        b, y = Member(folder, "b"), Member(folder, "y")
        images = Images(folder, ("y", y.side.describe(y.open(0, world=2))))
        b.open(1, world=2)
        async with Leader(folder, {"b": b, "y": y}, known="b", awaited="b") as a:
            await leads(a, images, "y")
            lost = a.job.sessions[0]
            assert (lost.host, lost.restores_from_image) == ("y", SERIAL) and not images.brought
            async with b:
                await becomes(lambda: images.brought == [0] and images.held == 1)
            assert not lost.server.process.running and lost.state == "running"
            assert a.span.given_up_hosts == {"y"} and "y" not in a.span.members
            lost.restores_from_image = 0  # it has its state
            await becomes(lambda: not a.span.given_up_hosts)

    asyncio.run(check())


def test_a_rank_that_had_come_back_goes_on_where_it_is(folder: Path) -> None:
    """Unheard: at b, whose log says of no commit that it can be restored from."""

    async def check() -> None:
        b, y = Member(folder, "b"), Member(folder, "y")
        images = Images(folder, ("y", y.side.describe(y.open(1))))
        b.open(0)
        b.open(1).resumed_commit = 1 << 62
        async with Leader(folder, {"b": b, "y": y}, known="b", awaited="b") as a:
            await leads(a, images, "y")
            session = a.job.sessions[1]
            async with b:
                await becomes(lambda: images.held == 1)
            assert (session.host, session.restores_from_image) == ("b", 0)
            assert session.resumed_commit == 1 << 62
            assert images.back == [1] and not images.brought and session.state == "running"

    asyncio.run(check())


def test_without_the_images_the_job_ends_with_a_sentence(folder: Path) -> None:
    async def check() -> None:
        b = Member(folder, "b")
        b.open(1, world=3)
        async with b, Leader(folder, {"b": b}, known="b", awaited="b") as a:
            await leads(a, None, "y")
            session = await a.hears_of(1)
            await becomes(lambda: session.state == "lost")
            assert "host y is lost, and with it the worker of rank 0, rank 2" in session.note
            assert "its CPU image is gone with the proxyd that led the job" in session.note

    asyncio.run(check())


@pytest.mark.parametrize("imaged", [True, False])
def test_a_host_that_is_lost_before_it_has_told_has_its_ranks_come_back(imaged: bool, folder: Path) -> None:
    async def check() -> None:
        b, y = Member(folder, "b"), Member(folder, "y")
        images = Images(folder, ("y", y.side.describe(y.open(0)))) if imaged else None
        b.open(1)
        async with Leader(folder, {"b": b, "y": y}, known="by", awaited="by") as a:
            await leads(a, images)
            a.lead.lost_hosts.give_up("y", "its lease has ended")
            async with b:
                await becomes(lambda: not a.span.awaited)
                if images is not None:
                    await becomes(lambda: images.brought == [0])
                else:
                    assert 0 not in a.job.sessions

    asyncio.run(check())


def test_a_host_that_takes_part_again_tells_of_its_ranks_itself(folder: Path) -> None:
    """It had only been cut off, and the rank has come back to it: that worker must not run twice."""

    async def check() -> None:
        b, y = Member(folder, "b"), Member(folder, "y")
        images = Images(folder, ("y", y.side.describe(y.open(0))))
        b.open(1)
        async with Leader(folder, {"b": b, "y": y}, known="by", awaited="by") as a:
            await leads(a, images, "y")
            assert 0 not in a.job.sessions
            async with b, y:
                await becomes(lambda: images.held == 1)
            session = a.job.sessions[0]
            assert (session.host, session.restores_from_image, session.state) == ("y", 0, "running")
            assert not images.brought
            await becomes(lambda: not a.span.given_up_hosts)

    asyncio.run(check())
