"""A job of two ranks, one on another host, of whose workers CPU images are taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from images_of_workers import some_parts

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.timing import TIMING, Timing
from understudy.recovery.spanning.leader.cpu_images import FOLDER, CpuImages
from understudy.recovery.spanning.leader.member_link import MemberLink
from understudy.recovery.state.snapshot_leases import SnapshotLeases


def kept(rank: int, serial: int) -> Any:
    return SimpleNamespace(serial=serial, commit=place(rank, serial))


def place(rank: int, serial: int) -> Any:
    return SimpleNamespace(log_offset=1000 * serial + rank, step=10 * serial)


class Log:
    def __init__(self, rank: int) -> None:
        self.kept = [kept(rank, serial) for serial in (1, 2, 3)]
        self.freed_segments, self.segment_bytes = 0, 1000
        self.final_steps = self.log_kept_from = self.snapshot_floor = self.snapshot_suspended = (
            self.progress_ns
        ) = 0
        self.leased: list[int] = []

    def snapshots(self) -> list[Any]:
        return self.kept

    def lease_snapshots(self, serials: list[int]) -> None:
        self.leased = serials


def session(job: Any, number: int, host: str = "") -> Any:
    return SimpleNamespace(
        job=job, rank=number, host=host, relay="/r/s", log=Log(number), active=True, cpu_image_step=0,
        cpu_image_note="",
        note="", restores_from_image=0,
        worker=SimpleNamespace(pid=10 + number, start_ticks=7), destination_device="",
        recoveries=0,
    )  # fmt: skip


class Call:
    """A stream of answers."""

    def __init__(self, answers: AsyncIterator[pb.ImagePart]) -> None:
        self._answers, self.cancelled = answers, False

    def __aiter__(self) -> AsyncIterator[pb.ImagePart]:
        return self._answers

    def cancel(self) -> None:
        self.cancelled = True


class TwoHosts:
    """Two ranks, and host b, which answers as the test says."""

    def __init__(self, folder: Path, every_s: float = 3600.0, timing: Timing = TIMING) -> None:
        self.folder = folder
        (folder / FOLDER).mkdir()
        self.asked: list[pb.TakeImageRequest] = []
        self.work: list[asyncio.Task[None]] = []
        self.error, self.left_out = "", 0
        self.during: Callable[[], None] = lambda: None
        self.sessions: list[Any] = []
        self.job: Any = SimpleNamespace(
            name="j", generation=0, departed={}, span=SimpleNamespace(token=b"t", hosts=2),
            leases=SnapshotLeases(), active_sessions=lambda: list(self.sessions),
        )  # fmt: skip
        self.sessions += [session(self.job, 0), session(self.job, 1, "b")]

        async def flush(_: Any) -> None:
            """All orders are there."""

        lead: Any = SimpleNamespace(
            here="a", steering=SimpleNamespace(flush=flush),
            credentials=lambda: {"job": "j", "token": b"t", "leadership": 1},
            run_beside=lambda work: self.work.append(asyncio.ensure_future(work)),
        )  # fmt: skip
        link = MemberLink(lead, "b")
        link.stub = lambda: self  # type: ignore[method-assign, assignment, return-value]
        lead.members = {"b": link}
        self.images = CpuImages(
            cast(Any, self.job), lead, cast(Any, None), folder / FOLDER, every_s, None, timing
        )

    def TakeImage(self, request: pb.TakeImageRequest) -> Call:
        self.asked.append(request)
        return Call(self._answers())

    async def _answers(self) -> AsyncIterator[pb.ImagePart]:
        found = some_parts(self.folder)
        for part in found[: len(found) - self.left_out]:
            yield pb.ImagePart(part=part)
        self.during()
        yield pb.ImagePart(error=self.error, paused_s=0.25)

    async def offer(self, serial: int, *, pressed: bool = False) -> None:
        """And until what it begins has ended."""
        commits = {one.rank: place(one.rank, serial) for one in self.sessions}
        self.images.offer(serial, self.sessions, cast(Any, commits), pressed=pressed)
        await asyncio.gather(*self.work)

    def leased(self) -> list[list[int]]:
        return [one.log.leased for one in self.sessions]

    def kept(self) -> list[int]:
        return [one.log.log_kept_from for one in self.sessions]

    def files(self) -> list[str]:
        return sorted(
            str(path.relative_to(self.folder / FOLDER)) for path in (self.folder / FOLDER).glob("*/*/*/*")
        )


def lose_snapshot(stage: TwoHosts) -> None:
    stage.sessions[0].log.kept = [kept(0, 3)]
