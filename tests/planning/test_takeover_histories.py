"""What is known of a job that is taken over: what was written of it, and what its new leader has seen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.protos import control_pb2 as pb
from understudy.recovery.planning.facts import RankFacts
from understudy.recovery.planning.takeover.histories import History, JobHosts, merged, merged_hosts
from understudy.recovery.planning.takeover.workers import GivenUp
from understudy.recovery.state.jobs import Job
from understudy.recovery.state.journaled_job import (
    history_of,
    hosts_of,
    journaled_job,
    restored_job,
    take_history,
    take_hosts,
)
from understudy.recovery.state.span import Span, Stored


@dataclass(frozen=True)
class End:
    rank: int
    told_by: str


WRITTEN: History[End, str] = History(
    generation=4, ended=(End(1, "record"), End(2, "record")), departed={1: True, 2: False},
    last_facts={2: RankFacts(2, generation=3)}, recoveries=(pb.Recovery(rank=1),),
    adoptions=(pb.Adoption(pid=7),), drills=("kill rank 2",), validations=3,
    corruption=pb.JournaledCorruption(rank=1),
)  # fmt: skip
HERE: History[End, str] = History(
    generation=5, ended=(End(2, "host"), End(3, "host")), departed={3: True, 2: True},
    last_facts={3: RankFacts(3)}, drills=("of another time",), not_replayable="it differs",
)  # fmt: skip
NOTHING: History[End, str] = History()


def test_a_proxyd_that_was_started_anew_knows_what_was_written_and_the_newest_generation_there_is() -> None:
    assert merged(WRITTEN, NOTHING, present=(0,)) == WRITTEN
    assert merged(WRITTEN, NOTHING, (0,), newest_generation=3) == WRITTEN
    assert merged(WRITTEN, NOTHING, (0,), newest_generation=9) == replace(WRITTEN, generation=9)


def test_a_host_that_leads_on_knows_what_was_written_and_what_it_has_seen_itself() -> None:
    found = merged(WRITTEN, HERE, present=(0, 1))
    assert found.ended == (End(1, "record"), End(2, "record"), End(3, "host"))
    assert found.departed == {2: False, 3: True}  # 1 is there again
    assert found.last_facts == {2: RankFacts(2, generation=3), 3: RankFacts(3)}
    assert (found.generation, found.not_replayable) == (5, "it differs")
    assert replace(found, ended=(), departed={}, last_facts={}) == replace(
        WRITTEN, generation=5, ended=(), departed={}, last_facts={}, not_replayable="it differs"
    )


@pytest.mark.parametrize("decided", [False, True])
@pytest.mark.parametrize("cut_short", [False, True])
def test_a_recovery_is_done_again_if_it_was_decided_or_a_rank_stands_as_it_left_it(
    decided: bool, cut_short: bool
) -> None:
    found = merged(replace(WRITTEN, under_way=decided), NOTHING, (), cut_short=cut_short)
    assert found.under_way == (decided or cut_short)


def test_neither_who_leads_nor_who_led_is_another_host_of_the_job() -> None:
    written = JobHosts(frozenset("abcd"), frozenset("bcde"), frozenset((GivenUp("d", 4),)), "a set")
    here = JobHosts(frozenset("x"), frozenset("x"), frozenset((GivenUp("c", 3),)), "")
    found = merged_hosts(written, here, {"a", "b"})
    assert (found.members, found.awaited, found.stored) == ({"c", "d"}, {"c", "d"}, "a set")
    assert found.given_up == {GivenUp("c", 3), GivenUp("d", 4)}
    assert merged_hosts(written, replace(here, stored="ours"), {"a"}).stored == "ours"


RANKS = st.integers(0, 4)
HISTORIES = st.builds(
    History,
    generation=st.integers(0, 9),
    ended=st.lists(st.builds(End, RANKS, st.just("record")), unique_by=lambda end: end.rank).map(tuple),
    departed=st.dictionaries(RANKS, st.booleans()),
    last_facts=st.dictionaries(RANKS, RANKS.map(RankFacts)),
    not_replayable=st.sampled_from(("", "it differs")),
    under_way=st.booleans(),
)


@given(HISTORIES, HISTORIES, st.frozensets(RANKS), st.integers(0, 9), st.booleans())
def test_nothing_that_was_written_is_forgotten_and_to_take_over_again_changes_nothing(
    written: Any, here: Any, present: frozenset[int], newest: int, cut_short: bool
) -> None:
    found = merged(written, here, present, newest, cut_short)
    assert found.generation >= max(written.generation, here.generation, newest)
    assert found.ended[: len(written.ended)] == written.ended
    assert {end.rank for end in found.ended} == {end.rank for end in (*written.ended, *here.ended)}
    assert found.departed.keys() == (written.departed.keys() | here.departed.keys()) - present
    assert found.last_facts.keys() <= found.departed.keys()
    assert found.under_way >= written.under_way
    assert merged(found, here, present, newest, cut_short) == found
    assert merged(found, NOTHING, present) == found


def test_of_a_job_all_of_it_is_taken_from_what_was_written() -> None:
    """A field that either side forgets would be lost with the leader."""
    span = Span(
        2, b"t" * 32, members={"b"}, awaited={"b"}, given_up={GivenUp("b", 3)}, stored=Stored(4, Path())
    )
    job = Job("j", None, [], span=span, generation=4, validations=2, not_replayable="it differs")
    job.departed, job.recoveries, job.adoptions = {1: True}, [pb.Recovery(rank=1)], [pb.Adoption(pid=3)]
    job.corruption, job.decision = pb.JournaledCorruption(rank=1), pb.JournaledDecision(generation=4)
    job.last_facts = {1: RankFacts(1)}
    other = Job("j", None, [], span=Span(2, b"t" * 32))
    take_history(other, history_of(job))
    assert other.span is not None
    take_hosts(other.span, hosts_of(span))
    assert hosts_of(other.span) == hosts_of(span)
    assert history_of(other) == replace(history_of(job), under_way=False)  # it is decided anew
    read = restored_job(journaled_job(job, None))
    assert replace(history_of(read), last_facts={}) == replace(history_of(job), last_facts={})
