"""What a worker from another host tells of its job is checked before a job is begun for it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from understudy import replay
from understudy.protos import control_pb2 as pb
from understudy.recovery.base.errors import Refused
from understudy.recovery.host.evidence import rank_facts
from understudy.recovery.job_hosts.arrivals import Arrivals
from understudy.recovery.job_hosts.spans import Spans
from understudy.recovery.planning.facts import CommitFacts
from understudy.recovery.spanning.member.member import NotAdmitted
from understudy.recovery.spanning.ranks.image_pair import EVERY_COMMIT
from understudy.recovery.spanning.ranks.mark import read_mark
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.state.span import Span

GOOD = pb.SpanMark(token=b"t" * 32, leader="host-a.b", hosts=2, recoveries=3, device="cuda:1")


def changed(**fields: Any) -> bytes:
    mark = pb.SpanMark()
    mark.CopyFrom(GOOD)
    for name, value in fields.items():
        setattr(mark, name, value)
    return mark.SerializeToString()


def test_a_mark_that_makes_sense_is_read() -> None:
    assert read_mark(changed()) == GOOD
    assert read_mark(changed(device="", hosts=1)).hosts == 1


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"\xff", "cannot be read"),
        (b"", "leader"),
        (changed(leader=""), "leader"),
        (changed(leader="../etc"), "leader"),
        (changed(leader="x" * 64), "leader"),
        (changed(leader="a\n"), "leader"),
        (changed(hosts=0), "number of hosts"),
        (changed(hosts=1 << 31), "number of hosts"),
        (changed(token=b""), "token"),
        (changed(token=b"t" * 31), "token"),
        (changed(device="cpu"), "device"),
        (changed(device="cpu:0\n"), "device"),
    ],
)
def test_a_mark_that_makes_no_sense_is_refused_with_one_sentence(raw: bytes, why: str) -> None:
    with pytest.raises(Refused, match=why) as refused:
        read_mark(raw)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("more", "why"),
    [(changed(token=b""), "the token"), (changed(leader="here"), "this host leads no job j")],
)
def test_no_job_is_begun_for_a_worker_whose_mark_is_refused_and_the_worker_is_told(
    tmp_path: Path, more: bytes, why: str
) -> None:
    directory = tmp_path / "rank-1"
    directory.mkdir()
    replay.create_log(str(directory), rank=1, world=2, segment_bytes=4 << 20, segment_count=4)
    agent = SimpleNamespace(jobs={}, leases=None)
    header = pb.WorkerHeader(job="j", rank=1, world=2, relay=f"{tmp_path}/r/r1", more=more)
    Arrivals(cast(Any, agent), cast(Any, None), "here").take_in(header, 1, directory)
    assert why in replay.Log(str(directory)).lost_message
    assert not agent.jobs


@pytest.mark.parametrize(("free", "log", "why"), [([], True, "no free device"), ([0], False, "")])
def test_no_job_is_begun_for_a_worker_that_gets_no_device_or_has_no_log(
    tmp_path: Path, free: list[int], log: bool, why: str
) -> None:
    """The job would be open here for ever: none of its ranks ends."""
    directory, begun = tmp_path / "rank-1", list[Job]()
    directory.mkdir()
    if log:
        replay.create_log(str(directory), rank=1, world=2, segment_bytes=4 << 20, segment_count=4)
    agent: Any = SimpleNamespace(
        jobs={}, begin=lambda job, _: begun.append(job), leases=SimpleNamespace(for_arrivals=lambda: free),
        settings=SimpleNamespace(devices=SimpleNamespace(names=["cpu:0"])), history=None,
    )  # fmt: skip
    header = pb.WorkerHeader(job="j", rank=1, world=2, relay=f"{tmp_path}/r/r1", more=changed())
    Arrivals(agent, cast(Any, None), "here").take_in(header, os.getpid(), directory)
    assert begun == []
    assert not log or why in replay.Log(str(directory)).lost_message


def test_a_rank_that_comes_from_an_image_is_restored_from_no_shadows(tmp_path: Path) -> None:
    """Its log may tell of commits whose shadows the image leaves out; its host says so."""
    directory = tmp_path / "rank-1"
    directory.mkdir()
    replay.create_log(str(directory), rank=1, world=2, segment_bytes=4 << 20, segment_count=4)
    job = Job("j", None, [], span=Span(2, GOOD.token, "host-a.b"))
    arrived: list[Session] = []
    agent: Any = SimpleNamespace(
        jobs={"j": job}, deputies={"j": SimpleNamespace(arrived=arrived.append)},
        leases=SimpleNamespace(for_arrivals=lambda: [0], hold=lambda _: None),
        settings=SimpleNamespace(devices=SimpleNamespace(names=["cpu:0"])),
        remote_ranks=SimpleNamespace(receive=lambda _: None),
    )  # fmt: skip
    more = changed(resumed_commit=EVERY_COMMIT)
    header = pb.WorkerHeader(job="j", rank=1, world=2, relay=f"{tmp_path}/r/r1", more=more)

    async def arrive() -> None:
        Arrivals(agent, cast(Any, None), "here").take_in(header, os.getpid(), directory)
        arrived[0].worker.close()

    asyncio.run(arrive())
    [session] = arrived
    assert session.resumed_commit == EVERY_COMMIT
    commit = CommitFacts(7, 3, complete=True, has_manifest=True)
    assert not rank_facts(session, True, [commit]).commits[0].has_manifest


def test_a_member_that_opened_one_rank_tells_of_no_other() -> None:
    told: list[int] = []
    lead: Any = SimpleNamespace(
        members={"b": "b"},
        opened=lambda member, one: told.append(one.rank),
        turns=SimpleNamespace(end=lambda host, rank: True),
    )

    def end(rank: int, opened: int) -> None:
        request = pb.EndRankRequest(rank=rank, opened=pb.RankDescription(rank=opened))
        Spans.let_end(cast(Any, None), lead, "b", request)

    end(1, 1)
    with pytest.raises(NotAdmitted, match="it opened rank 1, and tells of rank 0"):
        end(1, 0)
    assert told == [1]
