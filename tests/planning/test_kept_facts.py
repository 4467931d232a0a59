"""What the planner knows of a log's commits is understood once, and is always what the log says now."""

from __future__ import annotations

import random

import pytest
from executor_harness import COMMUNICATOR_CREATE, Harness

from understudy import replay
from understudy.recovery.host import evidence
from understudy.recovery.host.evidence import commit_facts, facts_of
from understudy.recovery.planning.facts import CommitFacts

IRRELEVANT = {1, 2, 5, 6}
"""Words of a row of which facts say nothing: where log and manifest lie, how long the manifest is."""


def understood(h: Harness) -> tuple[CommitFacts, ...]:
    """Of all its commits, without anything that was kept."""
    return tuple(facts_of(commit) for commit in h.log.commits())


def test_facts_are_those_of_the_log_through_commits_and_rewinds_that_use_their_numbers_again() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    with Harness() as h:
        h.new(1, [0, 0, 0, 0])
        for _ in range(12):
            for _ in range(rng.randrange(1, 20)):
                h.add(1, 1)
                h.commit()
            h.synchronize()
            assert commit_facts(h.log) == understood(h) != ()
            if rng.random() < 0.5:
                h.executor.park()
                h.executor.rewind(rng.choice(h.log.commits()[-8:]).number)
                assert commit_facts(h.log) == understood(h)
                h.executor.resume()


def test_a_commit_is_understood_once_and_one_that_changed_again() -> None:
    with Harness() as h:
        h.new(1, [0, 0, 0, 0])
        for _ in range(100):
            h.commit()
        h.synchronize()
        before = commit_facts(h.log)
        assert all(one is another for one, another in zip(commit_facts(h.log), before, strict=True))
        h.commit()
        h.synchronize()
        after = commit_facts(h.log)
        assert all(one is another for one, another in zip(after[:-1], before[1:], strict=True))
        assert after[-1].number == 101


def test_rows_say_all_that_tells_two_commits_apart_and_a_wrong_one_is_refused() -> None:
    with Harness() as h:
        for uid in range(1, 41):  # more than a commit's own row has room for
            h.writer.append(COMMUNICATOR_CREATE, uid, [uid, 9, 0, 2, 60_000])
        h.commit()
        h.synchronize()
        [row] = h.log.commit_rows()
        said = facts_of(h.log.commit_of(row))
        assert said == facts_of(h.log.commits()[0])
        assert len(said.communicators) == len(said.members) == 40
        for place in range(0, len(row), 8):
            other = bytearray(row)
            other[place] ^= 1
            if place // 8 not in IRRELEVANT:
                assert facts_of(h.log.commit_of(bytes(other))) != said, place
        for wrong in (row[:-1], row + bytes(32), row[:16], b"", row[:60] + b"\xff" + row[61:]):
            with pytest.raises(replay.LogError, match="the row of a commit"):
                h.log.commit_of(wrong)


def test_facts_of_a_log_that_is_gone_are_not_kept() -> None:
    with Harness() as h:
        h.commit()
        h.synchronize()
        commit_facts(h.log)
        kept = len(evidence._facts_by_row)
    del h
    assert len(evidence._facts_by_row) < kept
