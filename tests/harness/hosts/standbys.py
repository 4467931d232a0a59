"""What tests of standbys share: whose a job is, its record, and host b, which keeps images."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from images_of_workers import header, some_parts
from led_job import TOKEN

from understudy.protos import control_pb2 as pb
from understudy.recovery.membership.election import Leadership
from understudy.recovery.membership.job_leadership import claim_lost, key_of, owner_key_of
from understudy.recovery.membership.records import VERSION, read, written
from understudy.recovery.membership.stores.embedded import EmbeddedStore
from understudy.recovery.membership.stores.store import Unchanged, Unreachable
from understudy.recovery.record.log import VERSION as RECORD_VERSION
from understudy.recovery.record.log import RecordLog
from understudy.recovery.rendezvous.store import Change, Store
from understudy.recovery.spanning.member.kept_images import KeptImages
from understudy.recovery.spanning.ranks.image_set import ABOUT
from understudy.recovery.state.jobs import Job
from understudy.recovery.state.span import Span

OWNER, LEADER = owner_key_of("c", "j"), key_of("c", "j")
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


def owner(host: str, token: bytes = TOKEN) -> bytes:
    return written(pb.JobOwner(version=VERSION, leader=host, token=token))


def leader(host: str, token: bytes = TOKEN) -> pb.JobLeader:
    return pb.JobLeader(version=VERSION, host=host, hosts=2, token=token)


async def whose(store: EmbeddedStore) -> str:
    """The host whose job it is."""
    entry = await store.get(OWNER)
    return read(entry.value, pb.JobOwner).leader if entry is not None else ""


async def claim_now(store: EmbeddedStore, host: str, token: bytes = TOKEN) -> Leadership | None:
    """As a standby, by what is there now."""
    entry = await store.get(OWNER)
    assert entry is not None
    return await claim_lost(store, "c", "j", leader(host, token), [Unchanged(OWNER, entry.revision)])


def image_set(workers: dict[int, tuple[str, str]], standbys: str = "b", **fields: Any) -> pb.ImageSet:
    """`workers`: of each rank its host, and those that keep its image, a letter each."""
    images = pb.ImageSet(id=ID, serial=3, standbys=list(standbys), **fields)
    for rank, (host, holders) in workers.items():
        process = pb.Process(pid=10 + rank, start_ticks=7)
        images.workers.add(rank=rank, host=host, worker=process, holders=list(holders))
    return images


async def record(store: EmbeddedStore, *batches: pb.JobRecordBatch, token: bytes = TOKEN) -> None:
    """As a leader has written it; the first batch says all."""
    log = RecordLog(store, "c", "j", token)
    number = (await log.read()).next
    for index, batch in enumerate(batches):
        batch.version, batch.first = RECORD_VERSION, index == 0
        if batch.first and not batch.HasField("known"):
            batch.known.name = "j"
        for piece in log.pieces(batch, number):
            assert await log.write(piece, ())
            number = piece.number + 1


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

    def __init__(
        self, folder: Path, *, images: bool = True, store: bool = True, name: str = "b", token: bytes = b"t"
    ) -> None:  # fmt: skip
        self.folder = folder / ".cpu-images" / name
        folder.mkdir(exist_ok=True)
        self.store = Store()
        kept = self.store if store else None
        job = Job("j", None, [], span=Span(2, token))
        self.kept = KeptImages(job, self.folder if images else None, lambda: kept)

    def files(self) -> list[str]:
        """But for what is told of each beside it."""
        found = sorted(str(path.relative_to(self.folder)) for path in self.folder.glob("*/*/*"))
        return [path for path in found if not path.endswith(ABOUT)]

    async def keep(
        self, parts: Iterable[pb.WorkerPart], identity: str = ID, rank: int = 0, number: int = 1,
        leadership: int = 1,
    ) -> None:  # fmt: skip
        first = pb.KeepImageRequest(
            set=identity, number=number, leadership=leadership, described=pb.RankDescription(rank=rank)
        )
        await self.kept.keep(stream([first, *(pb.KeepImageRequest(part=part) for part in parts)]))

    def release(self, keep: str, number: int, leadership: int = 1) -> None:
        self.kept.release(pb.ReleaseImagesRequest(keep=keep, number=number, leadership=leadership))


async def stream(requests: Iterable[Any]) -> AsyncIterator[Any]:
    for request in requests:
        yield request


def image(folder: Path, rank: int = 0) -> list[pb.WorkerPart]:
    made = header(rank)
    made.world = 4
    return some_parts(folder, made)
