"""Who writes which parts of a set on several hosts, and what neither side takes from the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_persistence_decisions import made_up_commit

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.commands import NotDone
from understudy.recovery.base.errors import Refused
from understudy.recovery.snapshots.persistence import Persistence, run_name
from understudy.recovery.snapshots.settings import MirrorSettings, PersistenceSettings
from understudy.recovery.snapshots.writing.request import Discard, Persist, Release, Written
from understudy.recovery.snapshots.writing.writer import RunStores
from understudy.recovery.spanning.leader.far_parts import FarParts
from understudy.recovery.spanning.member.deputy import Deputy
from understudy.recovery.spanning.member.member import MemberSide, NotAdmitted
from understudy.recovery.spanning.member.member_parts import NO_STORAGE, MemberParts
from understudy.recovery.spanning.persisting import begin_persisting
from understudy.recovery.spanning.way_on import way_on
from understudy.recovery.state.counts import CopyCounts
from understudy.recovery.state.jobs import Job
from understudy.recovery.state.journaled_job import journaled_job, restored_job
from understudy.recovery.state.snapshot_leases import SnapshotLeases
from understudy.recovery.state.span import Span, Stored
from understudy.recovery.upkeep.rehearsal import rehearse

TOKEN, OTHER_TOKEN = b"t" * 32, b"o" * 32
STORE = Path("/store")
RUN = "understudy-1.rank-0.0123abcd"
PERSIST = {"job": "j", "token": TOKEN, "leadership": 5, "serial": 7, "run": RUN, "ranks": [1], "known": [6]}


def a_session(rank: int, host: str = "", directory: str = "", pid: int = 0) -> Any:
    log = SimpleNamespace(
        lease_snapshots=lambda serials: None, describe_snapshot=lambda serial: None, step=10 * rank
    )
    return SimpleNamespace(
        rank=rank, world=2, host=host, directory=Path(directory or f"/dev/shm/understudy-1/j/rank-{rank}"),
        state="running", active=True, persist_note="", mirror_note="", durable=[], log=log,
        worker=SimpleNamespace(pid=pid or 100 + rank, start_ticks=1), persist_interval=0, persist_choice="",
    )  # fmt: skip


class Member:
    """Host b with rank 1 of job j, which host a leads."""

    def __init__(self, settings: PersistenceSettings | None = PersistenceSettings(STORE)) -> None:  # noqa: B008
        self.session = a_session(1)
        self.span = Span(2, TOKEN, "a")
        self.job = SimpleNamespace(name="j", span=self.span, sessions={1: self.session})
        self.noted = 0
        self.parts = MemberParts(cast(Any, self.job), settings, lambda work: work.close(), self._note)
        deputy = Deputy(
            cast(Any, self.job),
            cast(Any, None),
            cast(Any, None),
            cast(Any, None),
            self.parts,
            cast(Any, None),
        )
        jobs, unused = {"j": cast(Any, self.job)}, cast(Any, None)
        self.side = MemberSide(jobs, {"j": deputy}, *[unused] * 6)

    def _note(self) -> None:
        self.noted += 1

    def asked(self) -> list[Any]:
        """Of the writer."""
        return self.parts._writer._unsent if self.parts._writer is not None else []

    async def write(self, answers: list[Written], **other: Any) -> list[pb.WrittenPart]:
        """What a leader hears."""
        stream = self.side.write_parts(pb.WritePartsRequest(**PERSIST | other))
        hearing = asyncio.ensure_future(_all(stream))
        await asyncio.sleep(0)
        for answer in answers:
            self.parts._take(answer)
        return await asyncio.wait_for(hearing, 5)


async def _all(stream: AsyncIterator[pb.WrittenPart]) -> list[pb.WrittenPart]:
    return [part async for part in stream]


def test_member_writes_its_own_rank_from_its_own_directory_into_its_own_storage() -> None:
    member = Member()
    (part,) = asyncio.run(member.write([Written(7, RUN, 1, step=40, bytes=3)]))
    assert (part.rank, part.step, part.bytes, part.error) == (1, 40, 3, "")
    assert member.asked() == [Persist(7, RUN, 2, {1: "/dev/shm/understudy-1/j/rank-1"}, (6,))]


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"ranks": [0]}, "rank 0 does not run here"),
        ({"ranks": [0, 1]}, "rank 0 does not run here"),
        ({"ranks": []}, "nothing to write"),
        ({"token": OTHER_TOKEN}, "not the token"),
        ({"job": "other"}, "no member"),
        ({"leadership": 4}, "another leader has followed"),
        ({"run": ".."}, "no name for a run"),
        ({"run": "../../etc"}, "no name for a run"),
        ({"run": ""}, "no name for a run"),
        ({"serial": 0}, "no serial"),
    ],
)
def test_member_refuses_what_its_leader_has_no_right_to(other: dict[str, Any], sentence: str) -> None:
    member = Member()
    asyncio.run(member.write([Written(7, RUN, 1)]))  # the leader of number 5 is known from here on
    del member.asked()[:]
    with pytest.raises(NotAdmitted, match=sentence):
        asyncio.run(member.write([], **{"serial": 8} | other))
    if "ranks" not in other:
        request = pb.ConcludeSetRequest(
            job="j", token=TOKEN, leadership=5, serial=8, run=RUN, complete=True, step=50
        )
        request.MergeFrom(pb.ConcludeSetRequest(**other))
        if other.get("run") == "" or other.get("serial") == 0:
            request.ClearField(next(iter(other)))
        with pytest.raises(NotAdmitted, match=sentence):
            member.side.conclude_set(request)
    assert member.asked() == [] and member.span.stored is None


def test_member_without_storage_says_so_and_a_disk_that_fails_shows_in_its_status() -> None:
    (part,) = asyncio.run(Member(None).write([]))
    assert part.error == NO_STORAGE
    member = Member()
    (part,) = asyncio.run(member.write([Written(7, RUN, 1, error="No space left on device")]))
    assert part.error == "No space left on device"
    assert member.session.persist_note == "no snapshot reaches /store: No space left on device"
    asyncio.run(member.write([Written(8, RUN, 1)], serial=8))
    assert member.session.persist_note == ""


def test_member_learns_which_set_is_complete_and_lets_go_of_others() -> None:
    member = Member()
    asyncio.run(member.write([Written(7, RUN, 1)]))
    common = {"job": "j", "token": TOKEN, "leadership": 5, "run": RUN}
    member.side.conclude_set(pb.ConcludeSetRequest(serial=7, complete=True, step=40, **common))
    member.side.conclude_set(pb.ConcludeSetRequest(serial=8, **common))
    assert member.asked()[1:] == [Release(7, RUN), Discard(8, RUN)]
    assert member.span.stored == Stored(40, STORE / "j" / RUN) and member.noted == 1


def test_leader_that_hangs_up_leaves_nobody_waiting() -> None:
    async def checks() -> None:
        member = Member()
        hearing = asyncio.ensure_future(_all(member.side.write_parts(pb.WritePartsRequest(**PERSIST))))
        await asyncio.sleep(0)
        assert member.parts._waiting
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        assert not member.parts._waiting
        member.parts._take(Written(7, RUN, 1))

    asyncio.run(checks())


class Leading:
    """Host a with rank 0 of job j, and rank 1 on host b, which answers as told."""

    def __init__(self, answer: Callable[[pb.WritePartsRequest], AsyncIterator[pb.WrittenPart]]) -> None:
        self.sessions = [a_session(0), a_session(1, "b", "/dev/shm/understudy-1/j/rank-1-4")]
        self.concluded: list[pb.ConcludeSetRequest] = []
        self._answer = answer
        self.flushed: list[Any] = []
        self.flush_problem: Exception | None = None
        self.work: list[Any] = []
        self.span = Span(2, TOKEN)
        job = SimpleNamespace(
            name="j",
            persist=CopyCounts(),
            active_sessions=lambda: self.sessions,
            span=self.span,
            leases=SnapshotLeases(),
        )
        self.counts = job.persist
        member = SimpleNamespace(stream=self._stream, ask=self._ask)
        lead = SimpleNamespace(
            members={"b": member}, run_beside=self.work.append, steering=SimpleNamespace(flush=self._flush),
            credentials=lambda: {"job": "j", "token": TOKEN, "leadership": 5},
        )  # fmt: skip
        self.persistence = Persistence(
            cast(Any, job), PersistenceSettings(STORE, 0.0, 20), parts=partial(FarParts, cast(Any, lead))
        )

    async def _ask(self, method: str, request: Any, timeout: float) -> Any:
        assert method == "ConcludeSet"
        self.concluded.append(request)

    def _stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        assert method == "WriteParts"
        return self._answer(request)

    async def _flush(self, session: Any) -> None:
        if self.flush_problem is not None:
            raise self.flush_problem
        self.flushed.append(session.rank)

    def set_counts(self, serial: int, step: int) -> None:
        """On all ranks, and is sent; rank 0 writes its part, but after rank 1."""
        asyncio.run(self.carry_out(serial, step))

    async def carry_out(self, serial: int, step: int) -> None:
        commits = {session.rank: made_up_commit(serial, step) for session in self.sessions}
        assert self.persistence.next_step(step - 1, self.sessions, float(step)) == step
        self.persistence.announce(serial, step, self.sessions)
        self.persistence.offer(serial, self.sessions, commits, float(step))
        here = [one for one in self.persistence.writer._unsent if isinstance(one, Persist)]
        assert [list(one.directories) for one in here] == [
            [0] for session in self.sessions if not session.host
        ]
        self.persistence.writer._unsent.clear()
        await self.work.pop(0)
        for one in here:
            self.persistence.take_now(Written(serial, one.run, 0, step=step))
        while self.work:
            await self.work.pop(0)


async def good(request: pb.WritePartsRequest) -> AsyncIterator[pb.WrittenPart]:
    yield pb.WrittenPart(rank=1, step=10**18)


def test_set_is_complete_once_every_host_has_written_its_ranks() -> None:
    leading = Leading(good)
    leading.set_counts(3, 20)
    assert leading.flushed == [1], "its lease must be there before it is read"
    run = run_name(leading.sessions)
    assert leading.span.stored == Stored(20, STORE / "j" / run)
    ((told),) = leading.concluded
    assert (told.serial, told.run, told.complete, told.step) == (3, run, True, 20)
    assert all(not session.durable for session in leading.sessions), "nothing here can bring it back"


async def other_ranks(request: pb.WritePartsRequest) -> AsyncIterator[pb.WrittenPart]:
    yield pb.WrittenPart(rank=0, error="of no concern")
    yield pb.WrittenPart(rank=5)


async def broken(request: pb.WritePartsRequest) -> AsyncIterator[pb.WrittenPart]:
    raise NotDone("host b: the link is cut")
    yield


async def full(request: pb.WritePartsRequest) -> AsyncIterator[pb.WrittenPart]:
    yield pb.WrittenPart(rank=1, error="No space left on device" + 1000 * ".")


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (other_ranks, "host b: its answer is missing"),
        (broken, "host b: the link is cut"),
        (full, "host b: No space left on device"),
    ],
)
def test_set_fails_with_a_sentence_when_a_host_does_not_write_its_part(answer: Any, sentence: str) -> None:
    leading = Leading(answer)
    leading.set_counts(3, 20)
    assert leading.span.stored is None and leading.counts.failures == 1
    for session in leading.sessions:
        assert session.persist_note.startswith(f"no snapshot reaches /store: {sentence}")
        assert len(session.persist_note) < 400
    assert [(one.serial, one.complete) for one in leading.concluded] == [(3, False)]


def test_set_fails_when_its_lease_cannot_be_told() -> None:
    leading = Leading(good)
    leading.flush_problem = NotDone("host b is not reached")
    leading.set_counts(3, 20)
    assert leading.span.stored is None and leading.counts.failures == 1


def test_every_stay_of_a_rank_on_a_host_has_stores_of_its_own() -> None:
    base = "/dev/shm/understudy-1/j/rank"
    here = [a_session(0), a_session(1)]
    assert run_name(here) == "understudy-1.rank-0"
    stays = [
        [a_session(0), a_session(1, "b", f"{base}-1-2")],
        [a_session(0), a_session(1, "c", f"{base}-1-3")],
        [a_session(0, "b", f"{base}-0-4"), a_session(1, "c", f"{base}-1-3")],
        [a_session(0, pid=900), a_session(1, "c", f"{base}-1-3")],
    ]
    names = [run_name(sessions) for sessions in stays]
    assert len(set(names)) == len(names)
    assert names == [run_name(sessions) for sessions in stays]


def test_leading_host_without_ranks_starts_no_writer() -> None:
    leading = Leading(good)
    leading.sessions[:] = [a_session(1, "b", "/dev/shm/understudy-1/j/rank-1-4")]
    asyncio.run(leading.carry_out(3, 20))
    assert leading.span.stored is not None and leading.persistence.writer._unsent == []


def test_rank_that_moves_amid_a_set_has_it_let_go_of_and_the_next_one_counts() -> None:
    leading = Leading(good)
    leases: dict[int, list[int]] = {}
    for session in leading.sessions:
        session.log.lease_snapshots = partial(leases.__setitem__, session.rank)
    commit = made_up_commit(3, 20)
    assert leading.persistence.next_step(19, leading.sessions, 20.0) == 20
    leading.persistence.announce(3, 20, leading.sessions)
    leading.persistence.offer(3, leading.sessions, {0: commit, 1: commit}, 20.0)
    assert leases == {0: [3], 1: [3]}
    former = run_name(leading.sessions)
    leading.work.pop(0).close()
    leading.sessions[1].directory = Path("/dev/shm/understudy-1/j/rank-1-5")
    leading.persistence.next_step(39, leading.sessions, 40.0)
    assert leases == {0: [], 1: []}
    leading.persistence.take_now(Written(3, former, 0, step=20))
    leading.persistence.take_now(Written(3, former, 1, step=20))
    assert leading.span.stored is None
    leading.persistence.writer._unsent.clear()
    leading.set_counts(4, 40)
    assert leading.span.stored == Stored(40, STORE / "j" / run_name(leading.sessions))


def test_parts_of_sets_that_failed_unheard_go_with_the_next_set(tmp_path: Path) -> None:
    stores = RunStores(tmp_path / "j" / RUN, [1], 2, slots=5)
    for serial in (1, 2, 3, 4):
        stores.of_rank[1].fitting([1000], serial).persist(
            job="j", rank=1, world=2, step=serial, serial=serial, extents=[(1, 1, bytes(1000))], timeout_s=5
        )
    stores.keep_only({1, 3}, before=4)
    assert stores.of_rank[1].serials == {1, 3, 4}


def test_end_of_a_job_names_the_newest_set_what_it_takes_and_what_is_lost() -> None:
    job = SimpleNamespace(name="j", span=Span(2, TOKEN), sessions={1: a_session(1)})
    assert "no set of its snapshots on storage is known here" in way_on(cast(Any, job))
    job.span.stored = Stored(7, STORE / "j" / RUN)
    sentence = way_on(cast(Any, job))
    assert "step 7 is on storage, steps lost since then: 3" in sentence
    assert "`recoveryctl snapshots export /store OUT --job j`" in sentence and f"/store/j/{RUN}" in sentence


@pytest.mark.parametrize("stored", [None, Stored(40, STORE / "j" / RUN)])
def test_successor_of_a_proxyd_that_died_knows_the_newest_set(stored: Stored | None) -> None:
    span = Span(2, TOKEN, "a", members={"b"}, stored=stored)
    written = journaled_job(Job("j", None, [], span=span), None).SerializeToString()
    known = restored_job(pb.JournaledJob.FromString(written)).span
    assert known is not None
    assert (known.hosts, known.leader, known.members, known.stored) == (2, "a", {"b"}, stored)


def test_what_needs_all_memory_or_all_stores_here_is_left_out_and_said() -> None:
    asked = PersistenceSettings(STORE, 0.0, 20, stays_in_memory=False, mirror=MirrorSettings("s3://bucket/x"))
    sessions = [a_session(0), a_session(1, "b", "/dev/shm/understudy-1/j/rank-1-4")]
    spans: Any = SimpleNamespace(parts=lambda job, writer, take: writer)
    for hosts, note in ((1, ""), (2, "a job on several hosts has no --mirror and no --persist-only")):
        job = SimpleNamespace(
            name="j", persist=CopyCounts(), span=Span(hosts, TOKEN), leases=SnapshotLeases()
        )
        persistence = begin_persisting(cast(Any, job), asked, spans, lambda: None)
        assert persistence is not None and persistence.stays_in_memory is (hosts > 1)
        assert (persistence.mirroring is None) is (hosts > 1)
        persistence.next_step(0, cast(Any, sessions), 0.0)
        assert [session.mirror_note for session in sessions] == [note, note]


def test_a_job_on_several_hosts_does_not_go_back_to_storage_while_it_runs() -> None:
    job = SimpleNamespace(name="j", span=Span(2, TOKEN), active_sessions=list)
    with pytest.raises(Refused, match="export a snapshot"):
        asyncio.run(rehearse(cast(Any, job), cast(Any, None)))
