"""CPU images at standbys, and what one does with them that has come to lead the job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from imaged_job import TwoHosts, kept, lose_snapshot, place
from led_job import becomes
from standbys import ID, image_set

from understudy.protos import control_pb2 as pb
from understudy.recovery.record.log import run_of
from understudy.recovery.spanning.leader import cpu_images
from understudy.recovery.spanning.leader.cpu_images import FOLDER, CpuImages
from understudy.recovery.spanning.leader.standbys import NotLeft
from understudy.recovery.spanning.ranks.image_file import Taken
from understudy.recovery.spanning.ranks.image_set import KeptSet, Left, write_set


@pytest.fixture
def stage(tmp_path: Path) -> TwoHosts:
    return TwoHosts(tmp_path)


class Standby:
    """In place of Standbys."""

    def __init__(self, stage: TwoHosts) -> None:
        self._stage = stage
        self.hosts: tuple[str, ...] = ("b",)
        self.problem = ""
        self.left: list[tuple[int, list[int], list[str]]] = []
        self.voided: list[str] = []
        self.during: Callable[[], None] = lambda: None
        self.record = SimpleNamespace(waits=False)
        self.named = asyncio.Event()
        self.named.set()
        self.names = pb.ImageSet()
        """What it has the record name, if that has an id."""

    async def leave(self, pair: Any, sessions: Any) -> float:
        self.left.append((pair.serial, [one.rank for one in sessions], self._stage.files()))
        self.during()
        await self.named.wait()
        if self.problem:
            raise NotLeft(self.problem)
        if self.names.id:
            await self._stage.images.named(self.names)
        return 0.125

    def described(self, session: Any) -> pb.RankDescription:
        return pb.RankDescription(rank=session.rank)

    async def void(self, why: str) -> None:
        self.voided.append(why)
        self.hosts = ()


def with_standby(stage: TwoHosts) -> Standby:
    standby = Standby(stage)
    stage.images._standbys = cast(Any, standby)
    return standby


def test_images_go_to_standbys_once_those_of_other_hosts_are_here(stage: TwoHosts) -> None:
    standby = with_standby(stage)

    async def take() -> None:
        await stage.offer(1)
        assert standby.left == [(1, [0], ["a/j/1/rank-1", "a/j/1/rank-1.about", "a/j/1/set"])]
        assert [one.cpu_image_step for one in stage.sessions] == [10, 10]
        assert [one.cpu_image_note for one in stage.sessions] == ["", ""]
        standby.during = lambda: seen.append(stage.leased())
        stage.images._due_s = 0.0
        await stage.offer(2)

    seen: list[Any] = []
    asyncio.run(take())
    assert seen == [[[1, 2], [1, 2]]]  # the former ones count until the new ones are named
    assert stage.leased() == [[2], [2]] and not standby.voided


def test_without_a_standby_images_of_the_others_count_and_the_status_says_what_may_happen(
    stage: TwoHosts,
) -> None:
    standby = with_standby(stage)
    standby.problem = "no other host has ranks of the job"

    async def take() -> None:
        await stage.offer(1)
        assert [one.cpu_image_step for one in stage.sessions] == [0, 10]
        assert stage.sessions[0].cpu_image_note.endswith(f"the job may end: {standby.problem}")
        assert stage.sessions[1].cpu_image_note == ""
        standby.problem = ""
        stage.images._due_s = 0.0
        await stage.offer(2)
        assert stage.sessions[0].cpu_image_note == "" and stage.sessions[0].cpu_image_step == 20
        stage.images.not_left("it fell silent")
        assert [one.cpu_image_step for one in stage.sessions] == [0, 20]
        assert stage.images._due_s <= time.monotonic() + cpu_images.AGAIN_S

    asyncio.run(take())


def test_nobody_stays_named_for_images_that_came_to_nothing(stage: TwoHosts) -> None:
    standby = with_standby(stage)
    standby.during = lambda: setattr(stage.job, "generation", 1)

    async def take() -> None:
        await stage.offer(1)
        assert standby.voided == ["a recovery came between"] and stage.leased() == [[], []]
        standby.during, standby.hosts = lambda: None, ("b",)
        stage.images._due_s = 0.0
        await stage.offer(2)
        assert stage.leased() == [[2], [2]]
        lose_snapshot(stage)
        stage.images._due_s = time.monotonic() + 3600
        await stage.offer(3)
        assert len(standby.voided) == 2 and "is gone on rank 0" in standby.voided[1]

    asyncio.run(take())


def test_training_does_not_wait_for_a_record_that_cannot_be_written(stage: TwoHosts) -> None:
    """Images keep the log from where they were taken on: where it fills up, they are let go of."""
    standby = with_standby(stage)

    async def take() -> None:
        await stage.offer(1)
        standby.record.waits = True
        stage.images._due_s = 0.0
        await stage.offer(2)
        assert len(standby.left) == 1 and stage.leased() == [[1], [1]]  # none is taken
        await stage.offer(3, pressed=True)
        assert stage.leased() == [[], []] and stage.kept() == [0, 0] and len(standby.voided) == 1
        standby.record.waits, standby.hosts = False, ("b",)
        standby.during = lambda: setattr(standby.record, "waits", True)  # amid it
        standby.named.clear()
        taking = asyncio.ensure_future(stage.offer(2))
        await becomes(lambda: len(standby.left) == 2)
        assert stage.leased() == [[2], [2]]
        commits = {one.rank: place(one.rank, 3) for one in stage.sessions}
        stage.images.offer(3, stage.sessions, cast(Any, commits), pressed=True)
        with suppress(asyncio.CancelledError):
            await taking
        assert stage.leased() == [[], []] and not any(stage.files())
        assert "a log was filling up" in stage.sessions[1].cpu_image_note
        standby.record.waits, standby.during, standby.problem = False, lambda: None, ""
        standby.named.set()
        stage.work.clear()
        stage.images._due_s = 0.0
        await stage.offer(3)
        assert stage.leased() == [[3], [3]]

    asyncio.run(take())


def some_time_later(stage: TwoHosts) -> CpuImages:
    """Its proxyd has died, and another one leads the job from the same host."""
    return CpuImages(
        stage.job, cast(Any, stage.images._lead), cast(Any, None), stage.folder / FOLDER, 3600.0,
        cast(Any, stage.images._standbys),
    )  # fmt: skip


def test_images_outlive_the_proxyd_that_has_taken_them(stage: TwoHosts) -> None:
    standby = with_standby(stage)

    async def take() -> None:
        standby.names = image_set({0: ("a", "b"), 1: ("b", "c")}, "bc")
        standby.names.serial = 1
        standby.names.cut.extend(pb.CutPlace(rank=r, log_offset=1000 + r, step=10) for r in (0, 1))
        await stage.offer(1)
        for one in stage.sessions:
            one.log.leased, one.log.log_kept_from = [], 0
        images = some_time_later(stage)
        assert images.left is not None and images.left.images == standby.names
        assert [one.rank for one in images.left.described("b")] == [1]
        assert stage.leased() == [[1], [1]] and stage.kept() == [1000, 1001]
        lost = stage.sessions[1]
        assert images.bring_back([lost]) == "" and lost.restores_from_image == 1
        lost.worker.pid += 1
        assert "rank 1 has moved since they were taken" in images.bring_back([lost])
        stage.job.span.token = b"another run"
        assert some_time_later(stage).left is None and not any(stage.files())

    asyncio.run(take())


def test_images_that_no_standby_keeps_outlive_their_proxyd_and_nobody_is_named(stage: TwoHosts) -> None:
    standby = with_standby(stage)
    standby.problem = "no other host has ranks of the job"

    async def take() -> None:
        await stage.offer(1)
        images = some_time_later(stage)
        assert images.left is not None and not images.left.images.standbys
        assert images.bring_back([stage.sessions[1]]) == ""
        (stage.folder / FOLDER / "a" / "j" / "1" / "set").unlink()  # they never came to count
        images = some_time_later(stage)
        assert images.left is None and "none has been taken yet" in images.bring_back([stage.sessions[1]])
        assert not any(stage.files())

    asyncio.run(take())


SPOILT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a set that is damaged": (lambda folder: (folder / "set").write_bytes(b"\xff" * 9), "none has been"),
    "a set without places": (
        lambda folder: write_set(folder, run_of(b"t"), image_set({1: ("b", "c")})), "have ended"
    ),
    "an image that is cut short": (
        lambda folder: (folder / "rank-1").write_bytes(b"x"), "it was on another host when they were taken"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILT)
def test_nothing_comes_back_from_what_is_not_as_it_was_left(what: str, stage: TwoHosts) -> None:
    with_standby(stage).problem = "no other host has ranks of the job"
    spoil, why = SPOILT[what]

    async def take() -> None:
        await stage.offer(1)
        await asyncio.gather(*stage.work)
        spoil(stage.folder / FOLDER / "a" / "j" / "1")
        images = some_time_later(stage)
        images.hold()
        assert why in images.bring_back([stage.sessions[1]])
        assert stage.sessions[1].restores_from_image == 0

    asyncio.run(take())


def test_a_standby_brings_back_the_workers_that_it_has_images_of_and_no_others(stage: TwoHosts) -> None:
    """Host b has followed host c, where rank 1 ran."""

    async def take() -> None:
        folder = stage.folder / FOLDER / "a" / "j.kept" / ID
        folder.mkdir(parents=True)
        (folder / "rank-1").write_bytes(b"image")
        cut = [pb.CutPlace(rank=rank, log_offset=2000 + rank, step=20) for rank in (0, 1)]
        images = image_set({0: ("b", "c"), 1: ("c", "b")}, cut=cut)
        images.serial = 2
        kept_here = KeptSet(folder, (1, 1), {1: Taken(folder / "rank-1", pb.WorkerHeader(), 5)})
        stage.images.take_over(Left(images, kept_here))
        assert stage.files() == ["a/j/inherited/rank-1", "a/j/inherited/set"] and not folder.parent.exists()
        assert stage.leased() == [[2], [2]] and stage.kept() == [2000, 2001]
        ours, lost = stage.sessions
        lost.host = "c"
        assert "it was on another host when they were taken" in stage.images.bring_back([ours])
        assert stage.images.bring_back([lost]) == "" and lost.restores_from_image == 2
        lost.worker.pid += 1
        assert "has moved since" in stage.images.bring_back([lost])
        lost.worker.pid -= 1
        ours.log.kept = [SimpleNamespace(serial=2, commit=place(0, 3))]  # another job's, as it were
        assert "is gone on rank 0" in stage.images.bring_back([lost])
        ours.log.kept = [kept(0, 2)]
        lost.host = "b"  # where it came back
        await stage.offer(3)
        assert len(stage.asked) == 1

    asyncio.run(take())
