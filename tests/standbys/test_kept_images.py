"""Images of workers that a standby keeps of a job whose leading host may be lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from standbys import ID, OTHER, Keeper, image, in_order, stream

from understudy.protos import control_pb2 as pb
from understudy.recovery.rendezvous.store import Change, Notes, Store
from understudy.recovery.spanning.member.kept_images import MOST_SETS, NotKept


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
def test_sets_of_images_are_kept_until_the_next_one_counts(tmp_path: Path) -> None:
    async def check() -> None:
        keeper = Keeper(tmp_path / "b")
        parts = image(tmp_path)
        await keeper.keep(parts)
        known = keeper.kept.get(ID)
        assert known is not None and sorted(known.images) == sorted(known.described) == [0]
        await keeper.keep(parts, OTHER, number=2)
        assert keeper.files() == [f"j.kept/{ID}/rank-0", f"j.kept/{OTHER}/rank-0"]
        keeper.release(ID, number=1)  # held up on its way: what has come since stays
        assert len(keeper.files()) == 2
        keeper.release(OTHER, number=2)
        assert keeper.files() == [f"j.kept/{OTHER}/rank-0"]
        keeper.kept.close()
        assert not list(keeper.folder.iterdir())

    asyncio.run(check())


def test_what_is_kept_outlives_the_proxyd_that_keeps_it(tmp_path: Path) -> None:
    async def check() -> None:
        former, parts = Keeper(tmp_path / "b"), image(tmp_path)
        await former.keep(parts, number=4, leadership=2)
        keeper = Keeper(tmp_path / "b")
        before, known = former.kept.get(ID), keeper.kept.get(ID)
        assert before is not None and known == before and known.images[0].header.log_bytes > 0
        keeper.release(ID, number=4, leadership=2)
        assert keeper.files() == [f"j.kept/{ID}/rank-0"]
        with pytest.raises(NotKept, match="another set has that name"):
            await keeper.keep(parts, number=5, leadership=2)
        keeper.release("", number=5, leadership=2)
        assert keeper.files() == []

    asyncio.run(check())


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def behind_a_link(path: Path) -> None:
    about = path.with_name("rank-0.about")
    about.rename(path.parent / "x")
    about.symlink_to(path.parent / "x")


SPOILT: dict[str, Callable[[Path], Any]] = {
    "an image that is cut short": cut_short,
    "an image that is gone": Path.unlink,
    "nothing that is told of it": lambda path: path.with_name("rank-0.about").unlink(),
    "what is told of it is damaged": lambda path: path.with_name("rank-0.about").write_bytes(b"\xff" * 9),
    "what is told of it is of another rank": lambda path: path.with_name("rank-0.about").rename(
        path.with_name("rank-1.about")
    ),
    "what is told of it lies behind a link": behind_a_link,
    "a set with another name": lambda path: path.parent.rename(path.parent.with_name("x")),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_proxyd_that_follows_goes_on_with_no_image_that_is_not_whole(what: str, tmp_path: Path) -> None:
    async def check() -> None:
        former = Keeper(tmp_path / "b")
        await former.keep(image(tmp_path))
        SPOILT[what](former.folder / "j.kept" / ID / "rank-0")
        keeper = Keeper(tmp_path / "b")
        assert keeper.kept.get(ID) is None and not list(keeper.folder.glob("*/*"))

    asyncio.run(check())


def test_images_of_a_former_run_of_the_job_are_not_kept(tmp_path: Path) -> None:
    async def check() -> None:
        await Keeper(tmp_path / "b").keep(image(tmp_path))
        keeper = Keeper(tmp_path / "b", token=b"another")
        assert keeper.kept.get(ID) is None and keeper.files() == []

    asyncio.run(check())


NOT_KEPT: dict[str, tuple[str, Callable[[Keeper, list[pb.WorkerPart]], Any]]] = {
    "a name that leads elsewhere": (
        "no name for a set", lambda keeper, parts: keeper.keep(parts, "../../../etc/x")
    ),
    "an image that ends early": ("a part of it is missing", lambda keeper, parts: keeper.keep(parts[:-1])),
    "an image of another rank": ("it is of another rank", lambda keeper, parts: keeper.keep(parts, rank=1)),
    "parts in disorder": ("not in order", lambda keeper, parts: keeper.keep(parts[::-1])),
    "no parts": ("a part of it is missing", lambda keeper, parts: keeper.keep([])),
    "no image at all": ("of no rank", lambda keeper, parts: keeper.kept.keep(stream([]))),
}  # fmt: skip


@pytest.mark.parametrize("what", NOT_KEPT)
def test_what_makes_no_sense_is_not_kept_and_leaves_nothing(what: str, tmp_path: Path) -> None:
    async def check() -> None:
        sentence, act = NOT_KEPT[what]
        keeper = Keeper(tmp_path / "b")
        with pytest.raises(NotKept, match=sentence):
            await act(keeper, image(tmp_path))
        known = keeper.kept.get(ID)
        assert keeper.files() == [] and (known is None or not known.images)
        assert not (tmp_path / "etc").exists()

    asyncio.run(check())


def test_a_host_that_cannot_keep_says_why(tmp_path: Path) -> None:
    async def check() -> None:
        parts = image(tmp_path)
        with pytest.raises(NotKept, match="without --cpu-image-every"):
            await Keeper(tmp_path / "b", images=False).keep(parts)
        with pytest.raises(NotKept, match="proxyrun --migratable"):
            await Keeper(tmp_path / "b", store=False).keep(parts)
        with pytest.raises(NotKept, match="does not have the images"):
            Keeper(tmp_path / "b").release(ID, 1)

    asyncio.run(check())


def test_what_comes_too_late_does_not_undo_what_came_later(tmp_path: Path) -> None:
    async def check() -> None:
        keeper = Keeper(tmp_path / "b")
        parts = image(tmp_path)
        await keeper.keep(parts, number=3)
        keeper.release(ID, number=3)
        with pytest.raises(NotKept, match="too late"):
            await keeper.keep(parts, OTHER, number=2)
        await keeper.keep(parts, OTHER, number=1, leadership=2)  # another one leads
        with pytest.raises(NotKept, match="another set has that name"):
            await keeper.keep(parts, OTHER, rank=1, number=9)
        keeper.release("", number=9, leadership=1)  # of the former one
        assert keeper.files() == [f"j.kept/{OTHER}/rank-0"]

    asyncio.run(check())


def test_sets_of_which_none_comes_to_count_do_not_pile_up(tmp_path: Path) -> None:
    async def check() -> None:
        keeper = Keeper(tmp_path / "b")
        parts = image(tmp_path)
        for number in range(1, MOST_SETS + 1):
            await keeper.keep(parts, f"{number:016x}", number=number)
        with pytest.raises(NotKept, match="sets are kept already"):
            await keeper.keep(parts, OTHER, number=9)

    asyncio.run(check())
