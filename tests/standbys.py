"""What tests of standbys share: the records that name one, and host b, which keeps what it is left."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from images_of_workers import header, some_parts
from led_job import TOKEN

from understudy.recovery.base.control import pb
from understudy.recovery.membership.job_leadership import key_of, standby_key_of
from understudy.recovery.membership.records import VERSION, read, written
from understudy.recovery.membership.stores.embedded import EmbeddedStore
from understudy.recovery.membership.stores.store import Unreachable
from understudy.recovery.rendezvous.store import Change, Store
from understudy.recovery.spanning.member.standby_state import StandbyStates
from understudy.recovery.state.jobs import Job

NUMBERS = itertools.count(1)
"""Of a leader's requests."""
HEIR, LEADER = standby_key_of("c", "j"), key_of("c", "j")
ID, OTHER = "0" * 16, "1" * 16


def in_order(store: Store) -> list[Change]:
    """All it holds, to compare it with another."""
    return sorted(store.changes(), key=str)


class Clock:
    """That stands still unless a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def standby(host: str, estate: str = ID, token: bytes = TOKEN, leads: str = "a") -> bytes:
    """A record that names one."""
    return written(pb.JobHeir(version=VERSION, leader=leads, token=token, host=host, estate=estate))


def leader(host: str, token: bytes = TOKEN) -> pb.JobLeader:
    return pb.JobLeader(version=VERSION, host=host, hosts=2, token=token)


async def named(store: EmbeddedStore) -> tuple[str, str]:
    """The standby's host, and the estate that it is named with."""
    entry = await store.get(HEIR)
    record = read(entry.value, pb.JobHeir) if entry is not None else pb.JobHeir(host="no record")
    return record.host, record.estate


class Away(EmbeddedStore):
    """A cluster's store that is not always there."""

    there = True
    unheard = False
    """It does as it is asked once more, and is not there to say so."""

    async def get(self, key: str) -> Any:
        if not self.there:
            raise Unreachable("no answer")
        return await super().get(key)

    async def transact(self, conditions: Any, changes: Any) -> int:
        if not self.there:
            raise Unreachable("no answer")
        revision = await super().transact(conditions, changes)
        if self.unheard:
            self.there = self.unheard = False
            raise Unreachable("no answer")
        return revision


class Keeper:
    """Host b's side."""

    def __init__(self, folder: Path, *, images: bool = True, store: bool = True) -> None:
        self.folder = folder / ".cpu-images" / "b"
        folder.mkdir(exist_ok=True)
        self.store = Store()
        kept = self.store if store else None
        self.standby_states = StandbyStates(Job("j", None, []), self.folder if images else None, lambda: kept)

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.glob("*/*/*"))

    async def keep_image(self, parts: Iterable[pb.WorkerPart], estate: str = ID, rank: int = 0) -> None:
        requests = [pb.KeepImageRequest(part=part) for part in parts]
        if requests:
            requests[0].estate, requests[0].rank = estate, rank
        await self.standby_states.keep_image(stream(requests))

    async def keep_job(
        self, estate: str = ID, former: str = "", ranks: Iterable[int] = (0,), *, news: bool = False
    ) -> None:
        first = pb.KeepJobRequest(
            estate=estate,
            former=former,
            serial=3,
            cut=[pb.CutPlace(rank=0, log_offset=7, step=2)],
            number=next(NUMBERS),
            news=news,
        )
        described = [pb.KeepJobRequest(rank=pb.RankDescription(rank=rank)) for rank in ranks]
        await self.standby_states.keep_job(stream([first, *described]))


async def stream(requests: Iterable[Any]) -> AsyncIterator[Any]:
    for request in requests:
        yield request


def image(folder: Path) -> list[pb.WorkerPart]:
    return some_parts(folder, header(0))


def first_store(*keys: str) -> pb.KeepStoreRequest:
    return pb.KeepStoreRequest(
        number=next(NUMBERS), first=True, changes=[pb.StoredKey(key=key, value=b"v") for key in keys]
    )
