"""A rehearsed restore reads its snapshot first: one that is damaged must not cost the job its servers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from understudy.recovery.base.errors import Refused
from understudy.recovery.snapshots.restore.restorer import NotRestored
from understudy.recovery.upkeep import rehearsal


def rehearsed(monkeypatch: pytest.MonkeyPatch, durable: list[Any], read: Any) -> tuple[list[int], str]:
    """Which sets were read, and why nothing came of it; "asked": the coordinator was."""
    seen: list[int] = []

    async def check(one: Any) -> None:
        seen.append(one.serial)
        read(one)

    monkeypatch.setattr(rehearsal, "check", check)
    session = SimpleNamespace(durable=durable)
    job = SimpleNamespace(span=None, name="job", recoveries=[], active_sessions=lambda: [session])
    coordinator = SimpleNamespace(rehearse_restore=lambda: "asked")
    with pytest.raises(Refused) as refused:
        asyncio.run(rehearsal.rehearse(cast(Any, job), cast(Any, coordinator)))
    return seen, str(refused.value)


def test_a_set_that_makes_way_for_a_newer_one_while_it_is_read_is_not_called_damaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    durable = [SimpleNamespace(serial=5)]

    def read(one: Any) -> None:
        if one.serial == 5:
            durable[:] = [SimpleNamespace(serial=6)]
            raise NotRestored("holds no complete snapshot 5")

    assert rehearsed(monkeypatch, durable, read) == ([5, 6], "asked")


def test_a_damaged_set_is_refused_if_there_is_no_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(one: Any) -> None:
        raise NotRestored("a checksum differs")

    said = rehearsed(monkeypatch, [SimpleNamespace(serial=5)], read)
    assert said == ([5], "snapshot 5 is of no use: a checksum differs")


def test_sets_that_are_never_there_long_enough_end_the_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    durable = [SimpleNamespace(serial=1)]

    def read(one: Any) -> None:
        durable[:] = [SimpleNamespace(serial=one.serial + 1)]
        raise NotRestored("it is gone")

    seen, why = rehearsed(monkeypatch, durable, read)
    assert seen == [1, 2, 3, 4, 5] and "become durable faster than they can be read" in why
