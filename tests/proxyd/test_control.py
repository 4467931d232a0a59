"""Requests to servers: what asyncio and gRPC make of a channel that is closed meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from understudy.recovery.base.control import ChannelClosed, answer, asynchronous_channel, pb, rpc, trouble


def test_a_channel_that_is_closed_while_a_server_is_asked_cancels_nobody(tmp_path: Path) -> None:
    async def ask() -> str:
        channel = asynchronous_channel(tmp_path / "nobody.sock")
        request = rpc.DeviceServerStub(channel).Health(pb.HealthRequest(), wait_for_ready=True, timeout=60)
        asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(channel.close()))
        with pytest.raises(ChannelClosed) as closed:
            await answer(request)
        return trouble(closed.value)

    assert asyncio.run(ask()) == "its channel was closed"


def test_who_is_cancelled_while_asking_stays_cancelled() -> None:
    async def cancelled() -> bool:
        task = asyncio.create_task(answer(asyncio.Event().wait()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(cancelled())
