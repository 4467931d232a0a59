"""A second tier that takes connections and never answers: given up after a while, and tried again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mirrors import JOB, RUN, Stores, assert_whole, new_bucket, object_server

from understudy.recovery.base.timing import Timing
from understudy.recovery.snapshots.remote.mirroring import CompleteSet, Mirroring
from understudy.recovery.snapshots.settings import MirrorSettings, PersistenceSettings
from understudy.recovery.state.counts import CopyCounts


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """An endpoint that accepts, in the kernel, and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


async def until(holds: Any, within_s: float = 60) -> None:
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.01)  # what another process does has no event here


def test_an_uploader_that_hangs_is_ended_holds_nothing_then_and_another_one_copies_the_newest_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timing = Timing(uploader_hangs_s=5.0, uploader_again_s=0.1)
    stores = Stores(tmp_path / "stores")
    session = cast(Any, SimpleNamespace(rank=0, mirrored_step=0, mirror_note=""))
    counts = CopyCounts()
    job = cast(Any, SimpleNamespace(name=JOB, mirror=counts, active_sessions=lambda: [session]))
    let_go: list[str] = []

    async def hang_and_go_on(url: str, hole: str) -> None:
        settings = PersistenceSettings(stores.directory)
        tier = Mirroring(job, settings, MirrorSettings(url), lambda: let_go.append("held no more"), timing)
        running = asyncio.create_task(tier.run())
        try:
            right = os.environ["AWS_ENDPOINT_URL"]
            monkeypatch.setenv("AWS_ENDPOINT_URL", hole)
            stores.put(1)
            tier.offer(CompleteSet(1, RUN, [session]))
            await until(lambda: tier.held(RUN) == 1)
            assert let_go == []
            await until(lambda: "handed over nothing for 5 s" in session.mirror_note)
            assert let_go and tier.held(RUN) == 0 and session.mirrored_step == 0
            stores.put(2)
            tier.offer(CompleteSet(2, RUN, [session]))
            monkeypatch.setenv("AWS_ENDPOINT_URL", right)  # of the uploaders that start from now on
            await until(lambda: session.mirrored_step == 20)
            assert session.mirror_note == "" and counts.failures >= 1 and counts.skipped == 1
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

    with object_server() as server, black_hole() as hole:
        url = new_bucket(server)
        asyncio.run(hang_and_go_on(url, hole))
        assert [one.serial for one in assert_whole(url)] == [2]
