"""Validations seen from proxyd: what is ordered, who waits for whom, and who is let go on."""

from __future__ import annotations

import asyncio

import pytest
from made_up_ranks import a_coordinator, a_job, log_of, step, stub_of
from simulation.snapshots import Snapshot

from understudy import replay
from understudy.recovery.host.evidence import rank_facts
from understudy.recovery.planning.facts import Facts, FaultFacts, FaultKind
from understudy.recovery.planning.planner import goes_back_a_minibatch
from understudy.recovery.state.jobs import Job
from understudy.recovery.upkeep.validation import FIRST, ValidationSchedule


def orders(job: Job) -> set[int]:
    return {session.log.validate_step for session in job.sessions.values()}


def test_no_validation_is_ordered_once_one_has_failed() -> None:
    job = a_job(2)
    schedule = ValidationSchedule(job, 10)
    for session in job.sessions.values():
        schedule.arm(session)
    assert orders(job) == {FIRST}
    for session in job.sessions.values():
        session.log.step = FIRST + 1
        log_of(job, session.rank).validated_step = FIRST
    schedule.look(job.active_sessions())
    assert orders(job) == {10}
    log_of(job, 1).validations_failed = 1
    log_of(job, 1).validation_message = "buffer 3 after record 17"
    for session in job.sessions.values():
        session.log.step = 11
        log_of(job, session.rank).validated_step = 10
    for _ in range(3):
        schedule.look(job.active_sessions())
    assert orders(job) == {0}
    assert job.validations == 2
    assert "rank 1" in job.not_replayable and "record 17" in job.not_replayable


def test_what_is_never_executed_twice_is_named_and_why() -> None:
    def named(world: int, every: int = 10, preimages: bool = True, snapshots: bool = True) -> str:
        job = a_job(world)
        ValidationSchedule(job, every, preimages, snapshots).look(job.active_sessions())
        return job.sessions[0].not_validated

    assert named(1) == named(2) == named(2, snapshots=False) == named(1, preimages=False) == ""
    assert "--validate-every 0" in named(2, every=0)
    assert "no optimizer step" in named(2, preimages=False)
    assert "rank 0, which is alone" in named(1, snapshots=False)


def test_a_rank_alone_that_left_a_minibatch_out_is_given_one_of_the_next() -> None:
    """There, a snapshot of another commit was awaited; peers that cannot wait cost time each time."""
    for world, next_order in ((1, FIRST + 3), (2, 1000)):
        job = a_job(world)
        schedule = ValidationSchedule(job, 1000)
        for session in job.sessions.values():
            schedule.arm(session)
            session.log.step = FIRST + 1
        schedule.look(job.active_sessions())
        assert orders(job) == {next_order}
        assert job.validations == 0


def test_a_lone_ranks_snapshots_for_validations_take_a_hundredth_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("understudy.recovery.upkeep.validation.time.monotonic", lambda: now)
    job = a_job(1)
    schedule = ValidationSchedule(job, 10)
    session, log = job.sessions[0], log_of(job, 0)
    schedule.arm(session)
    for _ in range(FIRST):
        step(job, 0)
    log.validated_step = FIRST
    log.published.append(Snapshot(1, log.entry(FIRST), 0.5, []))
    schedule.look([session])
    assert (orders(job), job.validations) == ({FIRST}, 1)
    now += 99  # twice half a second is a hundredth of 100 s
    schedule.look([session])
    assert orders(job) == {FIRST}
    now += 2
    schedule.look([session])
    assert (orders(job), job.validations) == ({10}, 1)


def test_a_rank_alone_goes_back_to_a_snapshot_of_its_minibatchs_beginning_or_is_let_go_on() -> None:
    for taken_at, ordered_back in ((FIRST - 1, True), (FIRST - 2, False)):
        job = a_job(1)
        for _ in range(FIRST - 1):
            step(job, 0)
        log = log_of(job, 0)
        log.validate_step = FIRST
        snapshot = Snapshot(1, log.entry(taken_at), 0.001, [])
        log.published.append(snapshot)
        fault = FaultFacts(FaultKind.VALIDATION, (0,), sound=(0,))
        asked = Facts((rank_facts(job.sessions[0], True),), fault)
        assert goes_back_a_minibatch(asked) is ordered_back


def stand(job: Job, *ranks: int) -> list[list[int]]:
    """These ranks stand at their validation; answers when each was resumed, if nothing was done with them."""

    async def main() -> None:
        coordinator = a_coordinator(job)
        for rank in ranks:
            coordinator.validation_reached(job.sessions[rank], job.sessions[rank].generation)
        await coordinator.finish()

    asyncio.run(main())
    return [stub_of(job, rank).resumed for rank in sorted(job.sessions)]


def ordered(job: Job) -> Job:
    for session in job.sessions.values():
        session.log.validate_step = FIRST
    return job


def test_ranks_of_a_job_that_does_not_replay_are_let_go_on_and_none_is_lost() -> None:
    job = ordered(a_job(2))
    step(job, 1, 1)
    job.not_replayable = "buffer 3"
    assert stand(job, 0, 1) == [[0], [0]]
    assert {session.state for session in job.sessions.values()} == {"running"}
    assert job.generation == 0


def test_ranks_are_let_go_on_at_once_if_one_of_them_has_left() -> None:
    job = ordered(a_job(3))
    step(job, 1, 1, 1)
    job.departed[2] = True
    del job.sessions[2]
    assert stand(job, 0, 1) == [[0], [0]]
    assert orders(job) == {0}


def test_a_rank_that_is_let_go_on_after_a_recovery_is_told_in_its_generation() -> None:
    """Its server refused to, as a request of an older generation, and the rank stood there for ever."""
    job = ordered(a_job(2))
    job.generation = 3
    for session in job.sessions.values():
        session.generation = 3
    job.departed[2] = True
    assert stand(job, 0) == [[3], []]


def test_a_report_of_an_older_generation_makes_nobody_stand() -> None:
    job = ordered(a_job(2))
    job.sessions[0].generation = job.generation = 2

    async def main() -> None:
        coordinator = a_coordinator(job)
        coordinator.validation_reached(job.sessions[0], 1)
        assert not coordinator.recovering

    asyncio.run(main())


def corruption(job: Job) -> tuple[bool, bool]:
    """Whether it will be repaired, and whether a recovery began."""

    async def main() -> tuple[bool, bool]:
        coordinator = a_coordinator(job)
        found = coordinator.corruption_found(job.sessions[1], "replicas differ", {0: 1, 1: 1})
        begun = coordinator.recovering
        await coordinator.cancel()
        return found, begun

    return asyncio.run(main())


def test_corruption_of_a_job_that_does_not_replay_is_reported_and_nobody_is_lost() -> None:
    job = a_job(2)
    step(job, 1, 1)
    step(job, 2, 3)
    job.not_replayable = "buffer 3"
    assert corruption(job) == (False, False)
    assert "not repaired" in job.sessions[1].note
    assert {session.state for session in job.sessions.values()} == {"running"}


def test_corruption_of_a_job_that_replays_is_repaired() -> None:
    job = a_job(2)
    step(job, 1, 1)
    step(job, 2, 3)
    assert corruption(job) == (True, True)


def test_snapshots_of_corrupted_state_are_refused_and_older_ones_are_not() -> None:
    """Replay would come to where they were taken, and they would look as sound as any."""
    job = a_job(2)
    for number in (1, 2, 3):
        step(job, number, number)
        for rank in (0, 1):
            log = log_of(job, rank)
            if number != 2:
                log.published.append(Snapshot(number, log.commits()[-1], 0.0, []))
    assert corruption(job) == (True, True)
    assert [job.sessions[rank].refused_snapshots for rank in (0, 1)] == [{3}, {3}]
    facts = [rank_facts(job.sessions[rank], True) for rank in (0, 1)]
    assert [[number for _, number in one.refused_snapshots] for one in facts] == [[3], [3]]


def test_shadows_of_a_former_server_are_no_evidence() -> None:
    """Manifests may look whole while the server that was restored behind them overwrites the contents."""
    job = a_job(2)
    for number in range(1, 5):
        step(job, number, number)
    session = job.sessions[1]
    session.restored_commit = 3
    session.lacks_state = True
    assert all(commit.has_manifest for commit in rank_facts(session, True).commits), "it has not run"
    session.resumed_commit = 3
    facts = rank_facts(session, True)
    assert [(commit.number, commit.has_manifest) for commit in facts.commits] == [
        (1, False), (2, False), (3, True), (4, True),
    ]  # fmt: skip
    assert facts.floor_commit == 0, "its log may still be whole"


def test_commits_that_a_server_lets_go_although_the_floor_stays_behind_are_no_choice() -> None:
    job = a_job(2)
    for number in range(1, 80):
        step(job, number, number)
    facts = rank_facts(job.sessions[0], True)
    assert facts.commits[0].number < facts.floor_commit == 79 - (replay.COMMIT_RING - 4)


def test_a_rank_that_does_not_go_on_gets_another_server() -> None:
    job = ordered(a_job(2))
    step(job, 1, 1)
    job.not_replayable = "buffer 3"
    stub_of(job, 1).problem = "RuntimeError: out of file descriptors"

    async def main() -> None:
        coordinator = a_coordinator(job)
        for session in job.sessions.values():
            coordinator.validation_reached(session, 0)
        await coordinator.finish()
        assert coordinator.recovering
        await coordinator.cancel()

    asyncio.run(main())
    assert [job.sessions[rank].has_state for rank in (0, 1)] == [True, False]
