"""CPU images of workers on other hosts: when they are taken, and what is kept for their sake."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from imaged_job import Call, TwoHosts, lose_snapshot, session
from made_up_facts import commit, rank

from understudy import replay
from understudy.protos import control_pb2 as pb
from understudy.recovery.base.errors import BadInput
from understudy.recovery.base.timing import Timing
from understudy.recovery.config.proxyd_settings import settings_of
from understudy.recovery.host.evidence import rank_facts
from understudy.recovery.planning.facts import Facts, FaultFacts, FaultKind
from understudy.recovery.planning.planner import PlanName, Reload, Rewind, plan
from understudy.recovery.spanning.leader.cpu_images import FOLDER
from understudy.recovery.state.jobs import Job
from understudy.recovery.state.snapshot_leases import SnapshotLeases


@pytest.fixture
def stage(tmp_path: Path) -> TwoHosts:
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
        assert [one.restores_from_image for one in stage.sessions] == [0, 0]
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
        assert [one.restores_from_image for one in stage.sessions] == [0, 2]
        assert [one.log.snapshot_floor for one in stage.sessions] == [2, 2]
        # Its worker runs elsewhere then, and the image is as good as before.
        stage.sessions[1].host, stage.sessions[1].worker = "c", SimpleNamespace(pid=99, start_ticks=1)
        assert stage.images.bring_back([stage.sessions[1]]) != ""
        stage.images.came_back(stage.sessions[1])
        assert stage.images.bring_back([stage.sessions[1]]) == ""
        stage.job.departed = {0: True}
        assert "a rank has ended already" in stage.images.bring_back([stage.sessions[1]])

    asyncio.run(take())


def test_a_host_that_falls_silent_amid_an_image_is_not_waited_for(tmp_path: Path) -> None:
    stage = TwoHosts(tmp_path, timing=Timing(image_part_s=0.05))

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
    settings = settings_of(["--devices=cpu:1", "--persist=/tmp", "--persist-slots=16"])
    assert settings.persist is not None
    assert settings.persist.in_flight == 4 and settings.persist.in_flight + 2 <= replay.SNAPSHOT_LEASES


# ------------------------------------------------------------------ the decision
def test_a_rank_that_comes_back_goes_back_to_its_image_and_takes_the_others_along() -> None:
    kept = commit(2)
    back = rank(1, alive=False, snapshots=(kept,), commits=(kept,), restores_from_image=True, manifests={})
    other = rank(0, 6, snapshots=(kept, commit(5)))
    chosen = plan(Facts((other, back), FaultFacts(FaultKind.HOST_LOST, (1,))))
    assert chosen.name is PlanName.RESTORE_SNAPSHOT_REPLAY
    assert Reload(1, 2, True) in chosen.actions and chosen.targets == {0: 2, 1: 2}
    assert all(action.commit == 2 for action in chosen.actions if isinstance(action, Reload | Rewind))
    assert "comes back from a CPU image" in chosen.reason


def test_without_the_set_that_goes_with_the_image_the_job_is_given_up() -> None:
    back = rank(
        1,
        alive=False,
        snapshots=(),
        commits=(),
        restores_from_image=True,
        manifests={},
        log_complete_from_start=False,
    )
    chosen = plan(Facts((rank(0, 6), back), FaultFacts(FaultKind.HOST_LOST, (1,))))
    assert chosen.name is PlanName.GIVE_UP


def test_of_a_rank_that_comes_back_nothing_counts_but_what_goes_with_its_image(tmp_path: Path) -> None:
    job = Job("j", None, [])
    found = [
        SimpleNamespace(serial=serial, commit=SimpleNamespace(
            number=10 * serial, record_index=10 * serial, step=serial, complete=True, has_manifest=True,
            communicators=[], members=[],
            optimizer=False, step_digest=0, call=0, log_offset=0,
        )) for serial in (3, 4)
    ]  # fmt: skip
    log = SimpleNamespace(snapshots=lambda: found, freed_segments=2)
    one: Any = SimpleNamespace(
        job=job,
        rank=1,
        world=2,
        restores_from_image=3,
        log=log,
        generation=4,
        refused_snapshots=set(),
        has_state=True,
    )
    facts = rank_facts(one, True)
    assert facts.restores_from_image and not facts.alive and not facts.log_complete_from_start
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
    asked = settings_of(["--devices=cpu:1", *ETCD, "--persist=/tmp", "--cpu-image-every=90s"])
    assert asked.cpu_image_every_s == 90
    assert settings_of(["--devices=cpu:1"]).cpu_image_every_s == 0


def test_time_is_measured_from_the_beginning_of_the_last_image(tmp_path: Path) -> None:
    stage = TwoHosts(tmp_path, every_s=50.0)
    before = time.monotonic()
    asyncio.run(stage.offer(1))
    assert before + 50.0 <= stage.images._due_s <= time.monotonic() + 50.0
