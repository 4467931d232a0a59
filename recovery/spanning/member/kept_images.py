"""Images of workers of other hosts that a standby keeps, to lead their job on should its leader be lost.

A set of them counts once the job's record names it; that one and those on their way are kept, also by a
proxyd that follows this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from understudy.protos import control_pb2 as pb
from understudy.recovery.record.log import run_of
from understudy.recovery.rendezvous.store import Store
from understudy.recovery.spanning.ranks.image_file import BadImage, ImageFile, make_folder
from understudy.recovery.spanning.ranks.image_set import KeptSet, find_kept, remove_image, write_about
from understudy.recovery.state.jobs import Job

_ID = re.compile(r"[0-9a-f]{16}")
MOST_SETS = 4
"""The one that counts, the next one, and what is left of two that came to nothing."""


class NotKept(Exception):
    """Its text says why."""


class KeptImages:
    """Keeps sets of images of one job that another host leads."""

    def __init__(self, job: Job, folder: Path | None, store: Callable[[], Store | None]) -> None:
        """`folder`: of this host's images; None: none are kept here.  `store`: of the job's workers."""
        self._job = job
        self._folder = folder / f"{job.name}.kept" if folder is not None else None
        self._store = store
        self._run = run_of(job.span.token) if job.span is not None else ""
        self._sets: dict[str, KeptSet] = {}
        if self._folder is not None:  # what a proxyd before us has kept
            self._sets = find_kept(self._folder, job.name, self._run)
        self._released = 0, 0
        """Sets that came before this were let go of, but for one."""

    def get(self, identity: str) -> KeptSet | None:
        """Images of that set, if any are here."""
        return self._sets.get(identity)

    def hand_over(self, identity: str) -> KeptSet:
        """It is the caller's now, with its folder."""
        return self._sets.pop(identity)

    def close(self) -> None:
        """The job is over here, or is led from here."""
        for identity in list(self._sets):
            self._drop(identity)
        if self._folder is not None:
            with contextlib.suppress(OSError):  # what is the caller's of `hand_over` may still be there
                self._folder.rmdir()

    async def keep(self, requests: AsyncIterator[Any]) -> None:
        """Keeps the image of one worker; raises NotKept."""
        first = await anext(requests, None)
        if first is None:
            raise NotKept("it is of no rank")
        rank = first.described.rank
        folder = await self._folder_of(first)
        path = folder / f"rank-{rank}"
        try:
            file = await asyncio.to_thread(ImageFile, path, self._job.name, rank)
            try:
                async for request in requests:
                    await asyncio.to_thread(file.take, request.part)
                await asyncio.to_thread(file.finish)
            finally:
                await asyncio.to_thread(file.close)
            order = first.leadership, first.number
            await asyncio.to_thread(write_about, file.taken(), first.described, self._run, order)
        except BadImage as problem:
            raise NotKept(str(problem)) from problem
        except OSError as problem:
            raise NotKept(f"{path} cannot be written: {problem.strerror}") from problem
        kept = self._sets.get(first.set)
        if kept is None:
            remove_image(path)
            raise NotKept("its set was let go of meanwhile")
        kept.images[rank], kept.described[rank] = file.taken(), first.described

    async def _folder_of(self, first: pb.KeepImageRequest) -> Path:
        """The folder of a set that is on its way; raises NotKept."""
        order = first.leadership, first.number
        if self._folder is None:
            raise NotKept("its proxyd was started without --cpu-image-every")
        if self._store() is None:
            raise NotKept("no worker here was started with proxyrun --migratable")
        if _ID.fullmatch(first.set) is None:
            raise NotKept(f"{first.set[:80]!r} is no name for a set")
        known = self._sets.get(first.set)
        if known is not None:
            if known.order != order:
                raise NotKept("another set has that name")
            return known.folder
        if order <= self._released:
            raise NotKept("it comes too late")
        if len(self._sets) >= MOST_SETS:
            raise NotKept(f"{MOST_SETS} sets are kept already")
        folder = self._folder / first.set
        try:
            await asyncio.to_thread(make_folder, folder)
        except OSError as problem:
            raise NotKept(f"{folder} cannot be made: {problem.strerror}") from problem
        return self._sets.setdefault(first.set, KeptSet(folder, order)).folder

    def release(self, request: pb.ReleaseImagesRequest) -> None:
        """All sets but that one, and those that came later; raises NotKept if that one is not here."""
        order = request.leadership, request.number
        self._released = max(order, self._released)
        for identity, kept in list(self._sets.items()):
            if identity != request.keep and kept.order <= order:
                self._drop(identity)
        if request.keep and request.keep not in self._sets:
            raise NotKept("it does not have the images any more that it was to keep")

    def _drop(self, identity: str) -> None:
        shutil.rmtree(self._sets.pop(identity).folder, ignore_errors=True)
