"""A plan as stages of steps: what each action becomes, and what waits for what."""

from __future__ import annotations

import random
from collections import Counter

from made_up_facts import commit
from made_up_jobs import small_job

from understudy.recovery.job.stages import (
    LoadFromStorage,
    Rebuild,
    ReleaseFormer,
    ReplaceServer,
    RestoreFromReplicas,
    RestoreFromSnapshot,
    Resume,
    RewindServer,
    Step,
    stages_of,
)
from understudy.recovery.planning.planner import FailRank, Plan, PlanName, Reload, Rewind, plan
from understudy.recovery.planning.replicas import Copy
from understudy.recovery.planning.restarts import Restart
from understudy.recovery.state.recovery_progress import Stage

COPIES = (Copy(10, 1, 20, 8, 5),)


def test_each_action_becomes_steps_that_wait_for_those_they_need() -> None:
    cut = {rank: commit(rank + 1) for rank in range(5)}
    made = Plan(
        PlanName.RESTART_COPY_REPLAY,
        "",
        (
            Restart(0, 1, COPIES),
            Restart(1, 2, (), keeps_source=True),
            Rewind(2, 3),
            Reload(3, 4, fresh=True, stored=True),
            Reload(4, 5, fresh=False),
            FailRank(5, "no way back"),
        ),
        cut,
    )
    replacing, restoring, rebuilding = stages_of(made, range(5))
    assert (replacing.stage, replacing.waves) == (
        Stage.REPLACING,
        (
            ((LoadFromStorage(((3, cut[3].place),)),),),
            (
                (ReplaceServer(0, 1, keeps_source=False),),
                (RewindServer(1, 2, connects=False), ReplaceServer(1, 2, keeps_source=True)),
                (RewindServer(2, 3, connects=True),),
                (ReplaceServer(3, 4, keeps_source=False),),
            ),
        ),
    )
    assert (restoring.stage, restoring.waves) == (
        Stage.RESTORING,
        (
            (
                (RestoreFromReplicas(0, 1, COPIES, None),),
                (RestoreFromReplicas(1, 2, (), None),),
                (RestoreFromSnapshot(3, 4, arrives=True),),
                (RestoreFromSnapshot(4, 5, arrives=False),),
            ),
            tuple((ReleaseFormer(rank),) for rank in range(5)),
        ),
    )
    assert (rebuilding.stage, rebuilding.waves) == (
        Stage.REBUILDING,
        (tuple((Rebuild(rank),) for rank in range(5)), tuple((Resume(rank),) for rank in range(5))),
    )


def test_in_a_plan_of_any_job_each_rank_has_its_steps_once_and_holds_the_commit_it_resumes_from(
    seed: int,
) -> None:
    chance = random.Random(seed)
    seen: Counter[type[Step]] = Counter()
    for _ in range(2000):
        facts = small_job(chance)
        made = plan(facts)
        given_up = {action.rank for action in made.actions if isinstance(action, FailRank)}
        ranks = [rank.rank for rank in facts.ranks if rank.rank not in given_up]
        stages = stages_of(made, ranks)
        steps = [step for stage in stages for wave in stage.waves for chain in wave for step in chain]
        seen.update(type(step) for step in steps)
        kinds = Counter((type(step), step.rank) for step in steps if not isinstance(step, LoadFromStorage))
        assert set(kinds.values()) <= {1}, made
        at = {s.rank: s.commit for s in steps if isinstance(s, RestoreFromReplicas | RestoreFromSnapshot)}
        at |= {s.rank: s.commit for s in steps if isinstance(s, RewindServer) and s.connects}
        assert at == made.targets, made
        assert [s.rank for s in steps if isinstance(s, Resume)] == ranks
        assert {s.rank for s in steps if isinstance(s, ReplaceServer)} == made.replaced
        loaded = {rank for s in steps if isinstance(s, LoadFromStorage) for rank, _ in s.places}
        assert loaded <= made.replaced, "nobody else's memory is written into"
    assert len(seen) == 8, seen
