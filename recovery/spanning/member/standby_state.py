"""What a standby keeps of a job that another host leads, to lead it on if that host is lost.

Images of the workers there, what else is known of its ranks and of the job, and a copy of the job's
`torch.distributed` store.  Two states at most are kept: the one that counts, and the one that is to.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from understudy.recovery.base.control import pb
from understudy.recovery.rendezvous.store import Change, Store, StoreFull
from understudy.recovery.spanning.ranks.image_file import BadImage, ImageFile, Taken, make_folder
from understudy.recovery.state.jobs import Job

log = structlog.get_logger()

_ID = re.compile(r"[0-9a-f]{16}")
MOST_RANKS = 1024
"""Of one host."""


class NotKept(Exception):
    """Its text says why."""


@dataclass
class StandbyState:
    """As of one set of snapshots."""

    folder: Path
    images: dict[int, Taken] = field(default_factory=dict)
    """Of the leader's ranks."""
    serial: int = 0
    """0: not all of it has come yet."""
    cut: dict[int, pb.CutPlace] = field(default_factory=dict)
    ranks: list[pb.RankDescription] = field(default_factory=list)
    known: pb.JournaledJob = field(default_factory=pb.JournaledJob)


class StandbyStates:
    """Keeps the states of one job that another host leads."""

    def __init__(self, job: Job, folder: Path | None, store: Callable[[], Store | None]) -> None:
        """`folder`: of this host's images; None: none are kept here.  `store`: of the job's workers."""
        self._job = job
        self._folder = folder / f"{job.name}.heir" if folder is not None else None
        if self._folder is not None:  # of a proxyd before us, or of a former run
            shutil.rmtree(self._folder, ignore_errors=True)
        self._store = store
        self._kept: dict[str, StandbyState] = {}
        self._copied = False
        self._newest = {"store": (0, 0), "job": (0, 0)}

    def get(self, identity: str) -> StandbyState | None:
        """One that is complete."""
        state = self._kept.get(identity)
        return state if state is not None and state.serial and self._copied else None

    def close(self) -> None:
        """The job is over here, or is led from here."""
        for state in self._kept.values():
            shutil.rmtree(state.folder, ignore_errors=True)
        self._kept.clear()
        self._copied = False
        if self._folder is not None:
            with contextlib.suppress(OSError):  # what is the caller's of `hand_over` may still be there
                self._folder.rmdir()

    def hand_over(self, identity: str) -> StandbyState:
        """One that is complete: it is the caller's now, with its folder."""
        return self._kept.pop(identity)

    # ------------------------------------------------------------------ what the leader leaves
    def keep_store(self, request: pb.KeepStoreRequest) -> None:
        """Raises NotKept."""
        store = self._own_store()
        self._in_order("store", request)
        if request.first:
            for identity in list(self._kept):
                self._drop(identity)
            self._copied = True
            store.forget("")
        if not self._copied:
            raise NotKept("its store was not copied from the beginning")
        try:
            for told in request.changes:
                store.take(Change(told.key, None if told.deleted else told.value, told.request, told.count))
        except StoreFull as problem:
            self._copied = False
            raise NotKept(str(problem)) from problem

    def _in_order(self, what: str, request: Any) -> None:
        """What was held up on its way must not undo what came later; raises NotKept."""
        order = request.leadership, request.number
        if order <= self._newest[what]:
            raise NotKept("it comes too late")
        self._newest[what] = order

    def _own_store(self) -> Store:
        store = self._store()
        if self._folder is None:
            raise NotKept("its proxyd was started without --cpu-image-every")
        if store is None:
            raise NotKept("no worker here was started with proxyrun --migratable")
        return store

    async def keep_image(self, requests: AsyncIterator[Any]) -> None:
        """Keeps the image of one worker; raises NotKept."""
        first = await anext(requests, None)
        if first is None:
            raise NotKept("it is of no rank")
        self._own_store()
        folder = await self._folder_of(first.estate)
        try:
            path = folder / f"rank-{first.rank}"
            file = await asyncio.to_thread(ImageFile, path, self._job.name, first.rank)
            try:
                await asyncio.to_thread(file.take, first.part)
                async for request in requests:
                    await asyncio.to_thread(file.take, request.part)
                await asyncio.to_thread(file.finish)
            finally:
                await asyncio.to_thread(file.close)
        except BadImage as problem:
            raise NotKept(str(problem)) from problem
        except OSError as problem:
            raise NotKept(f"{path} cannot be written: {problem.strerror}") from problem
        state = self._kept.get(first.estate)
        if state is None:
            path.unlink(missing_ok=True)
            raise NotKept("another leader has followed")
        state.images[first.rank] = file.taken()

    async def _folder_of(self, identity: str) -> Path:
        """The folder of a state that is being made; raises NotKept."""
        assert self._folder is not None
        if _ID.fullmatch(identity) is None:
            raise NotKept(f"{identity[:80]!r} is no name for it")
        if identity not in self._kept:
            folder = self._folder / identity
            try:
                await asyncio.to_thread(make_folder, folder)
            except OSError as problem:
                raise NotKept(f"{folder} cannot be made: {problem.strerror}") from problem
            self._kept.setdefault(identity, StandbyState(folder))
        if self._kept[identity].serial:
            raise NotKept("it is complete already")
        return self._kept[identity].folder

    async def keep_job(self, requests: AsyncIterator[Any]) -> None:
        """What goes with images that are here; or news of what counts already.  Raises NotKept."""
        first = await anext(requests, None)
        if first is None or not first.serial or not self._copied:
            raise NotKept("there is nothing that it goes with")
        self._in_order("job", first)
        ranks: list[pb.RankDescription] = []
        async for request in requests:
            ranks.append(request.rank)
            if len(ranks) > MOST_RANKS:
                raise NotKept(f"no host has more than {MOST_RANKS} ranks")
        known = self.get(first.estate)
        if first.news:
            if known is None:
                raise NotKept("there is nothing that it goes with")
            ranks = known.ranks
        elif known is None and not ranks:
            await self._folder_of(first.estate)
        if (first.leadership, first.number) != self._newest["job"]:
            raise NotKept("it comes too late")
        state = self._kept.get(first.estate)
        if state is None or sorted(state.images) != sorted(one.rank for one in ranks):
            raise NotKept("it has not the images that go with it")
        state.serial, state.ranks, state.known = first.serial, ranks, first.known
        state.cut = {place.rank: place for place in first.cut}
        for identity in self._kept.keys() - {first.estate, first.former}:
            if not first.news or self._kept[identity].serial:  # others are still on their way
                self._drop(identity)

    def _drop(self, identity: str) -> None:
        shutil.rmtree(self._kept.pop(identity).folder, ignore_errors=True)
