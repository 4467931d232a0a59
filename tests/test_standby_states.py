"""What a standby keeps of a job whose leading host may be lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from standbys import (
    ID,
    NUMBERS,
    OTHER,
    Keeper,
    first_store,
    image,
    in_order,
    stream,
)

from understudy.recovery.base.control import pb
from understudy.recovery.rendezvous.store import Change, Notes, Store
from understudy.recovery.spanning.member.standby_state import NotKept


# ------------------------------------------------------------------ what a store tells
def test_a_store_that_takes_all_changes_of_another_answers_as_that_one(tmp_path: Path) -> None:
    async def check() -> None:
        first, second = Store(Notes(tmp_path / "a")), Store(Notes(tmp_path / "b"))
        await first.set("early", b"1")
        await first.add("count", 5, "request-1")
        for change in first.changes():
            second.take(change)
        told: list[Change] = []
        first.tell_changes(told.append)
        await first.add("count", 2, "request-2")
        await first.set("gone", b"x", "request-3")
        first.delete("gone")
        first.delete("was never there")
        for change in told:
            second.take(change)
        assert in_order(second) == in_order(first)
        assert await second.add("count", 5, "request-1") == 5  # done before: answered again
        assert await second.add("count", 2, "request-2") == 7
        await second.set("gone", b"x", "request-3")  # by a worker from an image: what went stays away
        assert not second.holds(["gone"])
        assert Store(Notes(tmp_path / "b")).holds(["early", "count"])

    asyncio.run(check())


# ------------------------------------------------------------------ what a standby keeps
def test_an_estate_counts_once_store_images_and_job_are_there_and_goes_when_the_next_one_counts(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        keeper = Keeper(tmp_path / "b")
        parts = image(tmp_path)
        keeper.standby_states.keep_store(first_store("k"))
        await keeper.keep_image(parts)
        assert keeper.standby_states.get(ID) is None
        await keeper.keep_job()
        known = keeper.standby_states.get(ID)
        assert known is not None and known.serial == 3 and known.cut[0].log_offset == 7
        await keeper.keep_image(parts, OTHER)
        await keeper.keep_job(OTHER, former=ID)
        assert keeper.standby_states.get(ID) is not None and keeper.standby_states.get(OTHER) is not None
        assert keeper.files() == [f"j.heir/{ID}/rank-0", f"j.heir/{OTHER}/rank-0"]
        await keeper.keep_job(OTHER, former=OTHER, ranks=(), news=True)  # of the one that counts
        known = keeper.standby_states.get(OTHER)
        assert known is not None and [one.rank for one in known.ranks] == [0]
        assert keeper.files() == [f"j.heir/{OTHER}/rank-0"]
        keeper.standby_states.keep_store(
            pb.KeepStoreRequest(number=next(NUMBERS), changes=[pb.StoredKey(key="k", deleted=True)])
        )
        assert len(keeper.store) == 0
        keeper.standby_states.keep_store(first_store("new"))  # a leader that begins anew
        assert keeper.standby_states.get(OTHER) is None and keeper.files() == []
        keeper.standby_states.close()
        assert not list(keeper.folder.iterdir())

    asyncio.run(check())


NOT_KEPT: dict[str, tuple[str, Callable[[Keeper, list[pb.WorkerPart]], Any]]] = {
    "a name that leads elsewhere": (
        "no name for it", lambda keeper, parts: keeper.keep_image(parts, "../../../etc/x")
    ),
    "an image that ends early": (
        "a part of it is missing", lambda keeper, parts: keeper.keep_image(parts[:-1])
    ),
    "an image of another rank": (
        "it is of another rank", lambda keeper, parts: keeper.keep_image(parts, rank=1)
    ),
    "parts in disorder": ("not in order", lambda keeper, parts: keeper.keep_image(parts[::-1])),
    "no image at all": ("of no rank", lambda keeper, parts: keeper.keep_image([])),
    "news of what is not there": (
        "nothing that it goes with", lambda keeper, parts: keeper.keep_job(ranks=(), news=True)
    ),
    "a job without its images": ("has not the images", lambda keeper, parts: keeper.keep_job()),
    "a job with too many ranks": (
        "no host has more", lambda keeper, parts: keeper.keep_job(ranks=range(2000))
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", NOT_KEPT)
def test_what_makes_no_sense_is_not_kept_and_leaves_nothing(what: str, tmp_path: Path) -> None:
    async def check() -> None:
        sentence, act = NOT_KEPT[what]
        keeper = Keeper(tmp_path / "b")
        keeper.standby_states.keep_store(first_store())
        with pytest.raises(NotKept, match=sentence):
            await act(keeper, image(tmp_path))
        assert keeper.files() == [] and keeper.standby_states.get(ID) is None
        assert not (tmp_path / "etc").exists()

    asyncio.run(check())


def test_a_host_that_cannot_keep_says_why(tmp_path: Path) -> None:
    with pytest.raises(NotKept, match="without --cpu-image-every"):
        Keeper(tmp_path / "b", images=False).standby_states.keep_store(first_store())
    with pytest.raises(NotKept, match="proxyrun --migratable"):
        Keeper(tmp_path / "b", store=False).standby_states.keep_store(first_store())
    with pytest.raises(NotKept, match="not copied from the beginning"):
        Keeper(tmp_path / "b").standby_states.keep_store(pb.KeepStoreRequest(number=1))


def test_what_comes_too_late_does_not_undo_what_came_later(tmp_path: Path) -> None:
    async def check() -> None:
        keeper = Keeper(tmp_path / "b")
        held_up = pb.KeepStoreRequest(leadership=5, number=2, changes=[pb.StoredKey(key="k", value=b"old")])
        keeper.standby_states.keep_store(pb.KeepStoreRequest(leadership=5, number=1, first=True))
        for order in ((5, 3), (7, 1)):
            newer = pb.KeepStoreRequest(leadership=order[0], number=order[1], first=True)
            newer.changes.add(key="k", value=b"new")
            keeper.standby_states.keep_store(newer)
            with pytest.raises(NotKept, match="too late"):
                keeper.standby_states.keep_store(held_up)
        assert await keeper.store.get("k", 0) == b"new"
        jobs = [
            pb.KeepJobRequest(leadership=one, number=two, serial=1, estate=identity)
            for one, two, identity in ((7, 4, ID), (5, 9, OTHER))
        ]
        await keeper.standby_states.keep_job(stream(jobs[:1]))
        with pytest.raises(NotKept, match="too late"):
            await keeper.standby_states.keep_job(stream(jobs[1:]))
        assert keeper.standby_states.get(ID) is not None

    asyncio.run(check())
