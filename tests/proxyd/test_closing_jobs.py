"""Whose ranks end with the launcher of a host, and whose go on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent import host_agent
from understudy.recovery.agent.host_agent import HostAgent
from understudy.recovery.base.background import BackgroundTasks
from understudy.recovery.state.jobs import Job
from understudy.recovery.state.span import Span

OURS, ANOTHER = Path("/dev/shm/understudy-0-1-1-ours"), Path("/dev/shm/understudy-0-2-2-another")


class Rank:
    """A session whose worker ends when it is failed."""

    def __init__(self, job: Job, rank: int, relay: Path | None, host: str = "") -> None:
        self.job, self.rank, self.host = job, rank, host
        self.relay = str(relay / "r.00000000" / "rabc" / "s") if relay is not None else ""
        self.worker = SimpleNamespace(ended=asyncio.Event(), running=True)
        self.closed, self.log = asyncio.Event(), SimpleNamespace(drills=list)
        self.failed, self.active = "", False
        job.sessions[rank] = cast(Any, self)

    def fail(self, message: str) -> None:
        self.failed = message

    def end(self) -> None:
        self.worker.ended.set()
        self.worker.running = False
        self.job.sessions.pop(self.rank, None)
        self.closed.set()


class Agent(HostAgent):
    """As much of it as closes jobs."""

    def __init__(self) -> None:
        self.runtime = cast(Any, SimpleNamespace(path=OURS))
        self._background, self._lingering = BackgroundTasks("test"), set()
        self.finished: list[str] = []

    def end_soon(self, session: Any) -> None:
        session.end()

    async def _finish(self, job: Job, why: str) -> pb.JobReport:
        self.finished.append(job.name)
        return pb.JobReport()


async def closed(agent: Agent, job: Job) -> None:
    async with asyncio.timeout(10):
        await agent._close(job, "its launcher has ended")


async def finished(agent: Agent) -> None:
    async with asyncio.timeout(10):
        while not agent.finished:
            await asyncio.sleep(0.01)


def a_job(monkeypatch: Any) -> tuple[Agent, Job]:
    monkeypatch.setattr(host_agent, "log", SimpleNamespace(info=lambda *_, **__: None))
    return Agent(), Job("j", None, [], span=Span(2, b"t" * 32))


def test_a_rank_that_has_come_from_another_host_outlives_the_launcher_of_the_host_where_it_is(
    monkeypatch: Any,
) -> None:
    async def close() -> None:
        agent, job = a_job(monkeypatch)
        plain, ours, guest = Rank(job, 0, None), Rank(job, 1, OURS), Rank(job, 2, ANOTHER)
        for leaves in (plain, ours):
            leaves.end()
        await closed(agent, job)
        await closed(agent, job)  # whoever asks again changes nothing
        assert not guest.failed and not agent.finished
        guest.end()
        await finished(agent)
        assert agent.finished == ["j"]
        await agent._background.cancel()

    asyncio.run(close())


def test_a_job_is_not_over_before_other_hosts_have_told_of_their_ranks(monkeypatch: Any) -> None:
    """A proxyd that has just been started anew knows none of them."""

    async def close() -> None:
        agent, job = a_job(monkeypatch)
        assert job.span is not None
        job.span.awaited.add("b")
        await closed(agent, job)
        assert not agent.finished
        elsewhere = Rank(job, 1, OURS, host="b")
        job.span.awaited.clear()
        await asyncio.sleep(0)
        assert not agent.finished
        elsewhere.end()
        await finished(agent)
        await agent._background.cancel()

    asyncio.run(close())
