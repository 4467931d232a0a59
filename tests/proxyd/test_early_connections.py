"""Communicators of a rank that goes back connect while its state is still on its way."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist
from executor_harness import COLLECTIVE, COMMUNICATOR_CREATE, PHASE, Harness
from made_up_ranks import a_job
from training_run import driver

from understudy.protos import control_pb2 as pb
from understudy.proxy_server import _server
from understudy.recovery.host.leases import Leases
from understudy.recovery.host.placement import HostPlacement
from understudy.recovery.job.former_servers import FormerServers
from understudy.recovery.job.server_steps import ServerSteps
from understudy.recovery.job.stages import RestoreFromReplicas, RewindServer, RoundFailed
from understudy.recovery.planning.replicas import Copy

LONG_S = 20.0


class Member(Harness):
    """One of two ranks, and the generations for which it has begun to connect."""

    def __init__(self, rank: int, store: dist.Store) -> None:
        self.rank, self.store = rank, store
        self.begun: list[int] = []
        self.ended = 0
        """Connections that were made, or came to nothing."""
        self.within_s = LONG_S
        self.backends: list[object] = []
        super().__init__()

    def connect(self, uid: str, generation: int, rank: int, size: int, timeout_ms: int) -> dist.ProcessGroup:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = datetime.timedelta(seconds=self.within_s)
        self.begun.append(generation)
        store = dist.PrefixStore(f"{generation}/{uid}", self.store)
        try:
            self.backends.append(dist.ProcessGroupGloo(store, rank, size, options))
        finally:
            self.ended += 1
        return self.backends[-1]

    def new_executor(self) -> _server.Executor:
        executor = _server.Executor(self.connect)
        executor.attach(self.directory, device=f"{driver()}:0", threads=1, generation=0, **self.options)
        return executor

    def all_reduce(self) -> None:
        header = [1, 0, 0, 0, 1, 0, 1, 0]  # kind, reduction, peer, tag, sequence, inputs, outputs, splits
        self.writer.append(COLLECTIVE, 7, [*header, 1 | 6 << 8 | 1 << 16, 1, 0, 4, 1])


@pytest.fixture
def members() -> Iterator[list[Member]]:
    """Both have used their communicator and stand at a commit behind that."""
    store = dist.HashStore()
    with ExitStack() as stack:
        both = [stack.enter_context(Member(rank, store)) for rank in range(2)]
        for member in both:
            member.new(1, [1.0 + member.rank] * 4)
            member.writer.append(COMMUNICATOR_CREATE, 7, [1, 2, member.rank, 2, 10_000])
            member.all_reduce()
        for member in both:
            assert member.read(1) == (3.0,) * 4
            member.commit()  # with no collective under way
            member.writer.append(PHASE, 0, [])
            member.synchronize()
            member.executor.park()
            member.executor.rewind(1)
            assert member.begun == [0]
        yield both
        for member in both:  # a thread that came back to an interpreter that ends would end the process
            member.wait(lambda member=member: member.ended == len(member.begun), "still connects")  # type: ignore[misc]


def go_on(members: list[Member], generation: int) -> None:
    for member in members:
        member.executor.begin_rebuild(generation)
    for member in members:
        assert member.executor.rebuild(generation) == 1
        member.executor.resume()
    for member in members:
        member.all_reduce()
    for member in members:
        assert member.read(1) == (6.0,) * 4


def test_communicators_that_were_begun_are_waited_for_and_made_once(members: list[Member]) -> None:
    for member in members:
        member.executor.begin_rebuild(1)
        member.wait(lambda member=member: member.begun == [0, 1], "did not begin")  # type: ignore[misc]
    go_on(members, 1)
    assert [member.begun for member in members] == [[0, 1]] * 2


def test_what_was_begun_for_a_generation_that_came_to_nothing_is_begun_anew(members: list[Member]) -> None:
    """Its peer never came: it died, and the next generation is that of its successor."""
    members[0].within_s = 1.0
    members[0].executor.begin_rebuild(1)
    members[0].wait(lambda: members[0].begun == [0, 1], "did not begin")
    members[0].within_s = LONG_S
    members[0].executor.park()
    members[0].executor.rewind(1)
    go_on(members, 2)
    assert [member.begun for member in members] == [[0, 1, 2], [0, 2]]


class Asked:
    """A device server that notes what it is asked for."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    async def Rewind(self, request: Any, timeout: float) -> Any:
        self.requests.append(request)
        return pb.RewindReply(memory=pb.StateMemory(pid=9, places=[pb.StatePlace(handle=20, bytes=8)]))

    async def Restore(self, request: Any, timeout: float) -> Any:
        self.requests.append(request)
        return pb.RestoreReply(error="that is enough")


@pytest.mark.parametrize("there", ("unix:/s", "tls:b@10.0.0.2:1"))
def test_who_is_asked_for_its_state_once_connects_at_once_and_reads_it_by_itself(there: str) -> None:
    """Of a server on another host it may have to be had in another way, and then all begins anew."""

    class Where(HostPlacement):
        def read_from(self, holder: Any, reader: Any) -> str:
            return there

    job, pool = a_job(2), cast(Any, SimpleNamespace())
    asked = [Asked(), Asked()]
    for rank, session in job.sessions.items():
        cast(Any, session.server).stub = asked[rank]
    placement = Where(pool, Leases([], pool))
    steps = ServerSteps(job, placement, FormerServers(placement), True, lambda _: None, None)
    steps.begin(job.sessions)
    copies = (Copy(10, 1, 20, 8, 5),)

    async def one() -> None:
        await steps.carry_out(((RewindServer(1, 3, connects=True),),))
        await steps.carry_out(((RestoreFromReplicas(0, 3, copies, None),),))

    with pytest.raises(RoundFailed, match="that is enough"):
        asyncio.run(one())
    (rewind,), (restore,) = asked[1].requests, asked[0].requests
    here = there.startswith("unix:")
    assert (rewind.connect, restore.connect) == (True, here)
    assert [source.HasField("memory") for source in restore.sources] == [here]
    assert not here or restore.sources[0].memory.pid == 9
