"""CPU images of workers on other hosts: when they are taken, and what is kept for their sake."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from images_of_workers import some_parts
from made_up_facts import commit, rank

import replay
from recovery.control import pb
from recovery.evidence import rank_facts
from recovery.facts import Facts, FaultFacts, FaultKind
from recovery.jobs import Job
from recovery.planner import PlanName, Reload, Rewind, plan
from recovery.proxyd import settings_of
from recovery.settings import BadInput
from recovery.snapshot_leases import SnapshotLeases
from recovery.spanning import cpu_images
from recovery.spanning.bequest import NotLeft
from recovery.spanning.cpu_images import FOLDER, CpuImages
from recovery.spanning.estate import Estate
from recovery.spanning.image_file import Taken


# ------------------------------------------------------------------ a job with a rank at b
def kept(rank: int, serial: int) -> Any:
    return SimpleNamespace(serial=serial, commit=place(rank, serial))


def place(rank: int, serial: int) -> Any:
    return SimpleNamespace(log_offset=1000 * serial + rank, step=10 * serial)


class Log:
    def __init__(self, rank: int) -> None:
        self.kept = [kept(rank, serial) for serial in (1, 2, 3)]
        self.freed_segments, self.segment_bytes = 0, 1000
        self.log_kept_from = self.snapshot_floor = self.snapshot_suspended = self.progress_ns = 0
        self.leased: list[int] = []

    def snapshots(self) -> list[Any]:
        return self.kept

    def lease_snapshots(self, serials: list[int]) -> None:
        self.leased = serials


def session(job: Any, number: int, host: str = "") -> Any:
    return SimpleNamespace(
        job=job, rank=number, host=host, relay="/r/s", log=Log(number), active=True, cpu_image_step=0,
        cpu_image_note="",
        note="", returning=0, worker=SimpleNamespace(pid=10 + number, start_ticks=7), destination_device="",
        recoveries=0,
    )  # fmt: skip


class Call:
    """A stream of answers."""

    def __init__(self, answers: AsyncIterator[pb.ImagePart]) -> None:
        self._answers, self.cancelled = answers, False

    def __aiter__(self) -> AsyncIterator[pb.ImagePart]:
        return self._answers

    def cancel(self) -> None:
        self.cancelled = True


class TwoHosts:
    """Two ranks, and host b, which answers as the test says."""

    def __init__(self, folder: Path, every_s: float = 3600.0) -> None:
        self.folder = folder
        self.asked: list[pb.TakeImageRequest] = []
        self.work: list[asyncio.Task[None]] = []
        self.error, self.left_out = "", 0
        self.during: Callable[[], None] = lambda: None
        self.sessions: list[Any] = []
        self.job: Any = SimpleNamespace(
            name="j", generation=0, departed={}, span=SimpleNamespace(token=b"t", hosts=2),
            leases=SnapshotLeases(),            active_sessions=lambda: list(self.sessions),
        )  # fmt: skip
        self.sessions += [session(self.job, 0), session(self.job, 1, "b")]

        async def flush(_: Any) -> None:
            """All orders are there."""

        lead: Any = SimpleNamespace(
            here="a", steering=SimpleNamespace(flush=flush),
            members={"b": SimpleNamespace(stub=lambda: self)},
            credentials=lambda: {"job": "j", "token": b"t", "leadership": 1},
            run_beside=lambda work: self.work.append(asyncio.ensure_future(work)),
        )  # fmt: skip
        self.images = CpuImages(cast(Any, self.job), lead, cast(Any, None), folder / FOLDER, every_s)

    def TakeImage(self, request: pb.TakeImageRequest) -> Call:
        self.asked.append(request)
        return Call(self._answers())

    async def _answers(self) -> AsyncIterator[pb.ImagePart]:
        found = some_parts(self.folder)
        for part in found[: len(found) - self.left_out]:
            yield pb.ImagePart(part=part)
        self.during()
        yield pb.ImagePart(error=self.error, paused_s=0.25)

    async def offer(self, serial: int, *, pressed: bool = False) -> None:
        """And until what it begins has ended."""
        commits = {one.rank: place(one.rank, serial) for one in self.sessions}
        self.images.offer(serial, self.sessions, cast(Any, commits), pressed=pressed)
        await asyncio.gather(*self.work)

    def leased(self) -> list[list[int]]:
        return [one.log.leased for one in self.sessions]

    def kept(self) -> list[int]:
        return [one.log.log_kept_from for one in self.sessions]

    def files(self) -> list[str]:
        return sorted(
            str(path.relative_to(self.folder / FOLDER)) for path in (self.folder / FOLDER).glob("*/*/*/*")
        )


@pytest.fixture
def stage(tmp_path: Path) -> TwoHosts:
    (tmp_path / FOLDER).mkdir()
    return TwoHosts(tmp_path)


def test_an_image_is_taken_with_the_set_that_counts_and_both_are_kept_until_newer_ones_are_there(
    stage: TwoHosts,
) -> None:
    async def take() -> None:
        await stage.offer(1)
        assert [(one.rank, one.serial) for one in stage.asked] == [(1, 1)]
        assert stage.leased() == [[1], [1]] and stage.kept() == [1000, 1001]
        assert stage.files() == ["a/j/1/rank-1"]
        assert [one.cpu_image_step for one in stage.sessions] == [0, 10]
        await stage.offer(2)
        assert len(stage.asked) == 1, "it is not due"
        stage.images._due_s = 0.0
        await stage.offer(3)
        assert stage.leased() == [[3], [3]] and stage.kept() == [3000, 3001]
        assert stage.files() == ["a/j/2/rank-1"]
        assert all(not path.stat().st_mode & 0o077 for path in (stage.folder / FOLDER).rglob("*"))
        stage.images.close()
        assert stage.files() == []

    asyncio.run(take())


def test_both_sets_are_kept_while_the_newer_image_is_on_its_way(stage: TwoHosts) -> None:
    seen: list[Any] = []

    async def take() -> None:
        await stage.offer(1)
        stage.images._due_s = 0.0
        stage.during = lambda: seen.append((stage.leased(), stage.kept()))
        await stage.offer(2)

    asyncio.run(take())
    assert seen == [([[1, 2], [1, 2]], [1000, 1001])]


def lose_snapshot(stage: TwoHosts) -> None:
    stage.sessions[0].log.kept = [kept(0, 3)]


def lose_log(stage: TwoHosts) -> None:
    stage.sessions[1].log.freed_segments = 3


def move(stage: TwoHosts) -> None:
    stage.sessions[1].worker.pid += 1


def recover(stage: TwoHosts) -> None:
    stage.job.generation += 1


def say_no(stage: TwoHosts) -> None:
    stage.error = "the worker of rank 1 cannot be moved: it holds a connection"


def cut_short(stage: TwoHosts) -> None:
    stage.left_out = 1


PROBLEMS: dict[Callable[[TwoHosts], None], str] = {
    lose_snapshot: "the snapshot that goes with them is gone on rank 0",
    lose_log: "the log of rank 1 does not reach back to them",
    move: "rank 1 has moved since they were taken",
    recover: "a recovery came between",
    say_no: "host b: the worker of rank 1 cannot be moved: it holds a connection",
    cut_short: "a part of it is missing",
}


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("pressed", [False, True])
def test_what_was_not_taken_leaves_nothing_but_a_sentence_and_the_former_ones(
    stage: TwoHosts, problem: Callable[[TwoHosts], None], pressed: bool
) -> None:
    async def take() -> None:
        await stage.offer(1)
        before = list(stage.asked)
        stage.images._due_s = stage.images._begun_s = 0.0
        if problem in (say_no, cut_short):
            problem(stage)
        stage.during = lambda: problem(stage)
        await stage.offer(2, pressed=pressed)
        assert len(stage.asked) == len(before) + 1

    asyncio.run(take())
    assert PROBLEMS[problem] in stage.sessions[1].cpu_image_note
    assert stage.sessions[0].cpu_image_note == ""
    if pressed:  # what is kept for the former ones fills the log
        assert stage.files() == [] and stage.leased() == [[], []] and stage.kept() == [0, 0]
        assert stage.images.bring_back([stage.sessions[1]]).startswith(
            "no CPU image of it is kept: a log was"
        )
    else:
        assert stage.files() == ["a/j/1/rank-1"] and stage.leased() == [[1], [1]]
        assert stage.kept() == [1000, 1001]


@pytest.mark.parametrize("problem", [lose_snapshot, lose_log, move], ids=lambda one: one.__name__)
def test_images_that_nobody_can_go_back_to_are_let_go_of_and_new_ones_taken_at_once(
    stage: TwoHosts, problem: Callable[[TwoHosts], None]
) -> None:
    async def take() -> None:
        await stage.offer(1)
        problem(stage)
        told = stage.images.bring_back([stage.sessions[1]])
        assert told == f"its CPU image is of no use: {PROBLEMS[problem]}"
        assert [one.returning for one in stage.sessions] == [0, 0]
        await stage.offer(3)
        assert len(stage.asked) == 2 and stage.leased() == [[3], [3]]

    asyncio.run(take())


def test_nothing_is_kept_for_ranks_that_all_run_on_the_leading_host_by_now(stage: TwoHosts) -> None:
    async def take() -> None:
        await stage.offer(1)
        stage.sessions[1].host, stage.sessions[1].worker = "", SimpleNamespace(pid=99, start_ticks=1)
        stage.images.came_back(stage.sessions[1])
        await stage.offer(2, pressed=True)
        assert len(stage.asked) == 1 and stage.leased() == [[], []]
        assert stage.kept() == [0, 0] and stage.files() == []

    asyncio.run(take())


def test_a_rank_that_cannot_move_gets_no_image_and_is_told_of(stage: TwoHosts) -> None:
    stage.sessions[1].relay = ""
    asyncio.run(stage.offer(1))
    assert stage.asked == [] and stage.leased() == [[], []]
    assert stage.sessions[1].cpu_image_note.endswith("rank 1 was not started with proxyrun --migratable")


def test_lost_ranks_come_back_to_their_image_and_all_go_back_to_its_set(stage: TwoHosts) -> None:
    async def take() -> None:
        await stage.offer(2)
        for one in stage.sessions:
            one.log.snapshot_floor = 3
        assert stage.images.bring_back([stage.sessions[1]]) == ""
        assert [one.returning for one in stage.sessions] == [0, 2]
        assert [one.log.snapshot_floor for one in stage.sessions] == [2, 2]
        # Its worker runs elsewhere then, and the image is as good as before.
        stage.sessions[1].host, stage.sessions[1].worker = "c", SimpleNamespace(pid=99, start_ticks=1)
        assert stage.images.bring_back([stage.sessions[1]]) != ""
        stage.images.came_back(stage.sessions[1])
        assert stage.images.bring_back([stage.sessions[1]]) == ""
        stage.job.departed = {0: True}
        assert "a rank has ended already" in stage.images.bring_back([stage.sessions[1]])

    asyncio.run(take())


def test_a_host_that_falls_silent_amid_an_image_is_not_waited_for(
    stage: TwoHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_images, "ANSWER_S", 0.05)

    async def silent() -> AsyncIterator[pb.ImagePart]:
        await asyncio.Event().wait()
        yield pb.ImagePart()

    async def take() -> None:
        calls = [Call(silent())]
        stage.TakeImage = lambda request: calls[0]  # type: ignore[method-assign]
        await stage.offer(1)
        assert calls[0].cancelled

    asyncio.run(take())
    assert stage.sessions[1].cpu_image_note.endswith("host b has fallen silent") and stage.files() == []


# ------------------------------------------------------------------ an heir
class Heir:
    """In place of a Bequest."""

    def __init__(self, stage: TwoHosts) -> None:
        self._stage = stage
        self.heir, self.problem = "b", ""
        self.left: list[tuple[int, list[int], list[str]]] = []
        self.voided: list[str] = []
        self.during: Callable[[], None] = lambda: None

    async def leave(self, pair: Any, sessions: Any) -> float:
        self.left.append((pair.serial, [one.rank for one in sessions], self._stage.files()))
        self.during()
        if self.problem:
            raise NotLeft(self.problem)
        return 0.125

    async def void(self, why: str) -> None:
        self.voided.append(why)
        self.heir = ""


def with_heir(stage: TwoHosts) -> Heir:
    heir = Heir(stage)
    stage.images.bequest = cast(Any, heir)
    return heir


def test_images_of_the_leaders_own_workers_go_to_its_heir_once_the_others_are_here(stage: TwoHosts) -> None:
    heir = with_heir(stage)

    async def take() -> None:
        await stage.offer(1)
        assert heir.left == [(1, [0], ["a/j/1/rank-1"])]
        assert [one.cpu_image_step for one in stage.sessions] == [10, 10]
        assert [one.cpu_image_note for one in stage.sessions] == ["", ""]
        heir.during = lambda: seen.append(stage.leased())
        stage.images._due_s = 0.0
        await stage.offer(2)

    seen: list[Any] = []
    asyncio.run(take())
    assert seen == [[[1, 2], [1, 2]]]  # the former estate counts until the new one is named
    assert stage.leased() == [[2], [2]] and not heir.voided


def test_without_an_heir_images_of_the_others_count_and_the_status_says_what_may_happen(
    stage: TwoHosts,
) -> None:
    heir = with_heir(stage)
    heir.problem = "no other host has ranks of the job"

    async def take() -> None:
        await stage.offer(1)
        assert [one.cpu_image_step for one in stage.sessions] == [0, 10]
        assert stage.sessions[0].cpu_image_note.endswith(f"the job may end: {heir.problem}")
        assert stage.sessions[1].cpu_image_note == ""
        heir.problem = ""
        stage.images._due_s = 0.0
        await stage.offer(2)
        assert stage.sessions[0].cpu_image_note == "" and stage.sessions[0].cpu_image_step == 20
        stage.images.not_left("it fell silent")
        assert [one.cpu_image_step for one in stage.sessions] == [0, 20]
        assert stage.images._due_s <= time.monotonic() + cpu_images.AGAIN_S

    asyncio.run(take())


def test_nobody_stays_named_for_images_that_came_to_nothing(stage: TwoHosts) -> None:
    heir = with_heir(stage)
    heir.during = lambda: setattr(stage.job, "generation", 1)

    async def take() -> None:
        await stage.offer(1)
        assert heir.voided == ["a recovery came between"] and stage.leased() == [[], []]
        heir.during, heir.heir = lambda: None, "b"
        stage.images._due_s = 0.0
        await stage.offer(2)
        assert stage.leased() == [[2], [2]]
        lose_snapshot(stage)
        stage.images._due_s = time.monotonic() + 3600
        await stage.offer(3)
        assert len(heir.voided) == 2 and "is gone on rank 0" in heir.voided[1]

    asyncio.run(take())


def test_an_heir_brings_back_the_ranks_of_the_former_leader_and_no_others(stage: TwoHosts) -> None:
    """Host b has followed host c, where rank 1 ran."""

    async def take() -> None:
        folder = stage.folder / FOLDER / "a" / "j.heir" / "0123"
        folder.mkdir(parents=True)
        (folder / "rank-1").write_bytes(b"image")
        told = pb.RankDescription(rank=1, worker=pb.Process(pid=11, start_ticks=7))
        estate = Estate(folder, {1: Taken(folder / "rank-1", pb.WorkerHeader(), 5)}, 2)
        estate.cut = {rank: pb.CutPlace(rank=rank, log_offset=2000 + rank, step=20) for rank in (0, 1)}
        estate.ranks = [told]
        stage.images.inherit(estate, "c")
        assert stage.files() == ["a/j/inherited/rank-1"] and not folder.parent.exists()
        assert stage.leased() == [[2], [2]] and stage.kept() == [2000, 2001]
        ours, lost = stage.sessions
        lost.host = "c"
        assert "it was on another host when they were taken" in stage.images.bring_back([ours])
        assert stage.images.bring_back([lost]) == "" and lost.returning == 2
        lost.worker.pid += 1
        assert "has moved since" in stage.images.bring_back([lost])
        lost.worker.pid -= 1
        ours.log.kept = [SimpleNamespace(serial=2, commit=place(0, 3))]  # another job's, as it were
        assert "is gone on rank 0" in stage.images.bring_back([lost])
        ours.log.kept = [kept(0, 2)]
        lost.host = "b"  # where it came back
        await stage.offer(3)
        assert len(stage.asked) == 1

    asyncio.run(take())


# ------------------------------------------------------------------ leases
def test_leases_of_all_who_need_snapshots_are_held_together() -> None:
    leases, ranks = SnapshotLeases(), [session(None, 0), session(None, 1)]
    leases.hold("storage", [4, 5], ranks)
    leases.hold("CPU images", [2, 4], ranks)
    assert [one.log.leased for one in ranks] == [[2, 4, 5], [2, 4, 5]]
    leases.hold("storage", [], ranks)
    ranks[1].active = False
    leases.hold("CPU images", [], ranks)
    assert [one.log.leased for one in ranks] == [[], [2, 4]]


def test_a_log_has_places_for_all_leases_that_may_be_held_at_once() -> None:
    settings, *_ = settings_of(["--devices=cpu:1", "--persist=/tmp", "--persist-slots=16"])
    assert settings.persist is not None
    assert settings.persist.in_flight == 4 and settings.persist.in_flight + 2 <= replay.SNAPSHOT_LEASES


# ------------------------------------------------------------------ the decision
def test_a_rank_that_comes_back_goes_back_to_its_image_and_takes_the_others_along() -> None:
    kept = commit(2)
    back = rank(1, alive=False, snapshots=(kept,), commits=(kept,), returning=True, manifests={})
    other = rank(0, 6, snapshots=(kept, commit(5)))
    chosen = plan(Facts((other, back), FaultFacts(FaultKind.HOST_LOST, (1,))))
    assert chosen.name is PlanName.RESTORE_SNAPSHOT_REPLAY
    assert Reload(1, 2, True) in chosen.actions and chosen.targets == {0: 2, 1: 2}
    assert all(action.commit == 2 for action in chosen.actions if isinstance(action, Reload | Rewind))
    assert "comes back from a CPU image" in chosen.reason


def test_without_the_set_that_goes_with_the_image_the_job_is_given_up() -> None:
    back = rank(
        1, alive=False, snapshots=(), commits=(), returning=True, manifests={}, log_complete_from_start=False
    )
    chosen = plan(Facts((rank(0, 6), back), FaultFacts(FaultKind.HOST_LOST, (1,))))
    assert chosen.name is PlanName.GIVE_UP


def test_of_a_rank_that_comes_back_nothing_counts_but_what_goes_with_its_image(tmp_path: Path) -> None:
    job = Job("j", None, [])
    found = [
        SimpleNamespace(serial=serial, commit=SimpleNamespace(
            number=10 * serial, step=serial, complete=True, has_manifest=True, communicators=[], members=[],
            optimizer=False, call=0, log_offset=0,
        )) for serial in (3, 4)
    ]  # fmt: skip
    log = SimpleNamespace(snapshots=lambda: found, freed_segments=2)
    one: Any = SimpleNamespace(
        job=job,
        rank=1,
        world=2,
        returning=3,
        log=log,
        generation=4,
        refused_snapshots=set(),
        has_state=True,
    )
    facts = rank_facts(one, True)
    assert facts.returning and not facts.alive and not facts.log_complete_from_start
    assert [kept.number for kept in facts.snapshots] == [kept.number for kept in facts.commits] == [30]
    assert facts.floor_commit == 30 and not facts.commits[0].has_manifest


# ------------------------------------------------------------------ options
ETCD = ["--etcd=http://127.0.0.1:2379"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--persist=/tmp", "--cpu-image-every=60"], "--cpu-image-every 60 is of no use without --etcd"),
        ([*ETCD, "--cpu-image-every=60"], "--cpu-image-every 60 is of no use without --persist DIRECTORY"),
        ([*ETCD, "--persist=/tmp", "--cpu-image-every=soon"], "--cpu-image-every 'soon' is no time"),
        ([*ETCD, "--persist=/tmp", "--cpu-image-every=0"], "--cpu-image-every '0' is no time"),
    ],
)
def test_a_mistake_in_how_often_is_one_sentence(options: list[str], sentence: str) -> None:
    with pytest.raises(BadInput) as problem:
        settings_of(["--devices=cpu:1", *options])
    assert sentence in str(problem.value)


def test_how_often_is_what_was_asked_for_and_off_without() -> None:
    assert (
        settings_of(["--devices=cpu:1", *ETCD, "--persist=/tmp", "--cpu-image-every=90s"])[
            0
        ].cpu_image_every_s
        == 90
    )
    assert settings_of(["--devices=cpu:1"])[0].cpu_image_every_s == 0


def test_time_is_measured_from_the_beginning_of_the_last_image(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    stage = TwoHosts(tmp_path, every_s=50.0)
    before = time.monotonic()
    asyncio.run(stage.offer(1))
    assert before + 50.0 <= stage.images._due_s <= time.monotonic() + 50.0
