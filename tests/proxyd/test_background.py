"""What runs beside everything else ends when it is told to, also at an unlucky moment."""

from __future__ import annotations

import asyncio

from understudy.recovery.base.background import BackgroundTasks
from understudy.recovery.base.timing import Timing
from understudy.recovery.membership.stores.embedded import EmbeddedStore
from understudy.recovery.membership.stores.followed import Followed

SOON_S = 20.0


def test_a_task_that_forgets_a_cancellation_is_cancelled_again() -> None:
    forgotten: list[int] = []

    async def forgetful() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                forgotten.append(1)
                if len(forgotten) > 2:
                    raise

    async def end() -> None:
        tasks = BackgroundTasks("test", Timing(cancel_again_s=0.01))
        tasks.start(forgetful())
        await asyncio.sleep(0)
        await asyncio.wait_for(tasks.cancel(), SOON_S)

    asyncio.run(end())
    assert len(forgotten) == 3


def test_whoever_follows_a_store_ends_when_cancelled_as_something_changes() -> None:
    """proxyd did not stop: its last note of its own end came just before the cancellation."""

    async def end(turns: int) -> None:
        store = EmbeddedStore()
        followed = Followed(store, "/")
        lease = await store.grant(1000.0)  # a watch waits for its end, at most
        following = asyncio.create_task(followed.run())
        await followed.changed.wait()
        for _ in range(3):
            await asyncio.sleep(0)
        await store.revoke(lease)
        for _ in range(turns):
            await asyncio.sleep(0)
        following.cancel()
        await asyncio.wait({following}, timeout=SOON_S)
        assert following.cancelled()

    for turns in range(8):
        asyncio.run(end(turns))
