"""A job as it is written down, for a proxyd that follows this one here or on another host, and read again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import astuple
from pathlib import Path

from understudy.protos import control_pb2 as pb
from understudy.recovery.history.recorder import Recorder
from understudy.recovery.history.report import drill_of
from understudy.recovery.machine.processes import Watched
from understudy.recovery.planning.facts import CommitFacts, RankFacts
from understudy.recovery.planning.takeover.histories import History, JobHosts
from understudy.recovery.planning.takeover.workers import GivenUp
from understudy.recovery.state.counts import Ended, ScheduledDrill
from understudy.recovery.state.durable import Durable
from understudy.recovery.state.jobs import Job
from understudy.recovery.state.span import Span, Stored


def journaled_job(
    job: Job, found: pb.JournaledCorruption | None, sessions: Sequence[pb.JournaledSession] = ()
) -> pb.JournaledJob:
    """What outlives a proxyd.  `found`: the corruption that is being repaired; `sessions`: of this host."""
    return pb.JournaledJob(
        name=job.name,
        launcher=job.launcher.message() if job.launcher is not None else None,
        generation=job.generation,
        openings=job.openings,
        drills=[pb.JournaledDrill(drill=s.drill.message(), slot=s.slot, fired=s.fired) for s in job.drills],
        sessions=sessions,
        departures=[_departure(job, rank) for rank in sorted(job.departed)],
        ends=[_end(ended) for ended in job.ended],
        recoveries=job.recoveries,
        adoptions=job.adoptions,
        validations=job.validations,
        not_replayable=job.not_replayable,
        corruption=found or job.corruption,
        decision=job.decision,
        span=_span(job, job.span) if job.span is not None else None,
    )


def _span(job: Job, span: Span) -> pb.JournaledSpan:
    relays, remote = job.foreign_relays, [session for session in job.sessions.values() if session.host]
    hosts = {session.host for session in remote}
    return pb.JournaledSpan(
        hosts=span.hosts,
        leader=span.leader,
        token=span.token,
        members=sorted(span.members),
        awaited=sorted(hosts | span.awaited | span.destinations),
        remote_ranks=sorted({session.rank for session in remote} | span.remote_ranks),
        astray=sorted(span.astray),
        given_up_hosts=sorted(span.given_up_hosts),
        guest=str(relays) if relays is not None else "",
        stored_run=str(span.stored.run) if span.stored is not None else "",
        stored_step=span.stored.step if span.stored is not None else 0,
        given_up=[
            pb.JournaledWorker(host=one.host, process=pb.Process(pid=one.pid, start_ticks=one.start_ticks))
            for one in sorted(span.given_up, key=astuple)
        ],
    )


def journaled_durable(durable: Durable) -> pb.JournaledDurable:
    """A snapshot that is durable."""
    return pb.JournaledDurable(
        serial=durable.serial, run=str(durable.run), bytes=durable.bytes, log_offset=durable.log_offset,
        commit=_commit(durable.commit),
    )  # fmt: skip


def _commit(commit: CommitFacts) -> pb.JournaledCommit:
    return pb.JournaledCommit(
        number=commit.number, step=commit.step, call=commit.call, members=commit.members,
        index=commit.index,
        communicators=[word for mark in commit.communicators for word in mark],
    )  # fmt: skip


def _departure(job: Job, rank: int) -> pb.JournaledDeparture:
    departure = pb.JournaledDeparture(rank=rank, clean=job.departed[rank])
    if rank in job.last_facts:
        facts = job.last_facts[rank]
        departure.generation = facts.generation
        departure.newest.CopyFrom(_commit(facts.newest))
    return departure


def _end(ended: Ended) -> pb.JournaledEnd:
    return pb.JournaledEnd(
        clean=ended.clean,
        steps=ended.steps,
        calls_per_step=ended.calls_per_step,
        bytes_per_step=ended.bytes_per_step,
        replies_compared=ended.replies_compared,
        replies_different=ended.replies_different,
        recent_calls=ended.recent_calls,
        status=ended.status,
        automatic_commits=ended.automatic_commits,
        records=ended.records,
    )


def departures(job: Job, but: Collection[int]) -> Iterator[pb.RankDeparted]:
    """What is known of ranks that have ended on this host; `but` of these."""
    for rank in sorted(job.departed.keys() - job.sessions.keys() - set(but)):
        ends = [_end(ended) for ended in job.ended if ended.rank == rank]
        yield pb.RankDeparted(departure=_departure(job, rank), end=ends[-1] if ends else None)


def take_departure(job: Job, told: pb.RankDeparted) -> None:
    """Takes over what another host knows of a rank's end, if nothing is known of that rank here."""
    departure, rank = told.departure, told.departure.rank
    if rank in job.sessions or rank in job.departed:
        return
    job.departed[rank] = departure.clean
    if departure.HasField("newest"):
        job.last_facts[rank] = _last_facts(departure)
    if told.HasField("end") and told.end.status.rank == rank:
        job.ended.append(_restored_end(told.end))


def restored_job(written: pb.JournaledJob, history: Recorder | None = None) -> Job:
    """A job as it was written down, but for its sessions.  `history`: where its events go on."""
    launcher = written.launcher
    drills = [ScheduledDrill(drill_of(entry.drill), entry.slot, entry.fired) for entry in written.drills]
    return Job(
        name=written.name,
        launcher=Watched.of(launcher.pid, launcher.start_ticks) if written.HasField("launcher") else None,
        drills=drills,
        ended=[_restored_end(end) for end in written.ends],
        departed={departure.rank: departure.clean for departure in written.departures},
        last_facts={one.rank: _last_facts(one) for one in written.departures if one.HasField("newest")},
        recoveries=list(written.recoveries),
        adoptions=list(written.adoptions),
        validations=written.validations,
        not_replayable=written.not_replayable,
        decision=written.decision if written.HasField("decision") else None,
        corruption=written.corruption if written.HasField("corruption") else None,
        generation=written.generation,
        openings=written.openings,
        span=_restored_span(written.span) if written.HasField("span") else None,
        foreign_relays=Path(written.span.guest) if written.span.guest else None,
        history=history or Recorder(),
    )


def history_of(job: Job) -> History[Ended, ScheduledDrill]:
    """What is known of it but for its sessions."""
    return History(
        generation=job.generation, ended=tuple(job.ended), departed=dict(job.departed),
        last_facts=dict(job.last_facts), recoveries=tuple(job.recoveries), adoptions=tuple(job.adoptions),
        drills=tuple(job.drills), validations=job.validations, not_replayable=job.not_replayable,
        corruption=job.corruption, under_way=job.decision is not None,
    )  # fmt: skip


def take_history(job: Job, history: History[Ended, ScheduledDrill]) -> None:
    """That is what is known of it from here on."""
    job.generation, job.ended = history.generation, list(history.ended)
    job.departed, job.last_facts = dict(history.departed), dict(history.last_facts)
    job.recoveries, job.adoptions = list(history.recoveries), list(history.adoptions)
    job.drills, job.validations = list(history.drills), history.validations
    job.not_replayable, job.corruption = history.not_replayable, history.corruption
    job.decision = None  # it is made anew


def hosts_of(span: Span) -> JobHosts[GivenUp, Stored]:
    """Other hosts, and the newest set on storage, as the leader knew them, or as a member knows them."""
    return JobHosts(
        frozenset(span.members), frozenset(span.awaited), frozenset(span.given_up), span.stored,
        frozenset(span.remote_ranks), frozenset(span.astray), frozenset(span.given_up_hosts),
    )  # fmt: skip


def take_hosts(span: Span, hosts: JobHosts[GivenUp, Stored]) -> None:
    """That is what is known of them from here on."""
    span.members, span.awaited = set(hosts.members), set(hosts.awaited)
    span.given_up, span.stored = set(hosts.given_up), hosts.stored
    span.remote_ranks, span.astray = set(hosts.remote_ranks), set(hosts.astray)
    span.given_up_hosts = set(hosts.given_up_hosts)


def _restored_span(written: pb.JournaledSpan) -> Span:
    members, awaited = set(written.members), set(written.awaited)
    stored = Stored(written.stored_step, Path(written.stored_run)) if written.stored_run else None
    return Span(
        written.hosts, written.token, written.leader, members=members, awaited=awaited & members,
        given_up={
            GivenUp(one.host, one.process.pid, one.process.start_ticks) for one in written.given_up
        },
        stored=stored, remote_ranks=set(written.remote_ranks), astray=set(written.astray),
        given_up_hosts=set(written.given_up_hosts),
    )  # fmt: skip


def _restored_end(end: pb.JournaledEnd) -> Ended:
    return Ended(
        rank=end.status.rank, clean=end.clean, steps=end.steps, calls_per_step=end.calls_per_step,
        bytes_per_step=end.bytes_per_step, replies_compared=end.replies_compared,
        replies_different=end.replies_different, recent_calls=tuple(end.recent_calls), status=end.status,
        automatic_commits=end.automatic_commits, records=end.records,
    )  # fmt: skip


def _last_facts(departure: pb.JournaledDeparture) -> RankFacts:
    return RankFacts(
        departure.rank, departure.generation, alive=False, commits=(_restored_commit(departure.newest),)
    )


def restored_durable(written: pb.JournaledDurable) -> Durable:
    """A snapshot that is durable."""
    return Durable(
        written.serial, Path(written.run), written.bytes, _restored_commit(written.commit), written.log_offset
    )


def _restored_commit(written: pb.JournaledCommit) -> CommitFacts:
    words = list(written.communicators)
    return CommitFacts(
        written.number, written.step, members=tuple(written.members), call=written.call,
        index=written.index,
        uids=tuple(zip(words[::3], words[1::3], strict=False)), sequences=tuple(words[2::3]),
    )  # fmt: skip
