"""When a device server or a collective is given up: judged in virtual time, without processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from understudy.recovery.agent_api.server import Pace
from understudy.recovery.machine import activity as activity_module
from understudy.recovery.machine.activity import ASK_NS, Activity, ProcessState, process_state
from understudy.recovery.planning.collective_watch import Arrival, CollectiveWatch, Member, arrivals
from understudy.recovery.planning.facts import FaultKind
from understudy.recovery.planning.progress import SECOND, Finding, Position, Progress
from understudy.recovery.upkeep.watch import UNHEARD_NS, Watch

LOOK_NS = SECOND // 50
TIMEOUT_NS = 300 * SECOND
UID = (7, 9)


class Process(Activity):
    """A process of which the test says what the kernel would."""

    def __init__(self) -> None:
        super().__init__(0)
        self.at_work = self.is_stopped = False

    def look(self, now_ns: int) -> None:
        if self.at_work:
            self.quiet_since_ns = now_ns
        if not self.is_stopped:
            self.stopped_since_ns = 0
        elif not self.stopped_since_ns:
            self.stopped_since_ns = now_ns


class Server:
    """A server under watch, and the clock."""

    def __init__(self, timeout_ns: int = TIMEOUT_NS) -> None:
        self.process = Process()
        self.progress = Progress(self.process, timeout_ns)
        self.position = Position(cursor=0, tail=0, record=0, step=1, in_collective=False)
        self.now_ns = 1000 * SECOND

    def moves(self, **changes: int | bool) -> None:
        self.position = replace(self.position, **changes)  # type: ignore[arg-type]

    def watched(self, seconds: float, doublings: int = 0) -> tuple[Finding | None, float]:
        """Look for so long; the finding, and seconds until it."""
        begin = self.now_ns
        while self.now_ns < begin + seconds * SECOND:
            found = self.progress.look(self.position, self.now_ns, doublings)
            if found is not None:
                return found, (self.now_ns - begin) / SECOND
            self.now_ns += LOOK_NS
        return None, seconds


def test_a_server_without_records_is_idle_for_ever() -> None:
    server = Server()
    assert server.watched(1000)[0] is None


def test_a_stopped_idle_server_is_no_fault_until_there_is_something_to_do() -> None:
    server = Server()
    server.process.is_stopped = True
    assert server.watched(1000)[0] is None
    server.moves(tail=100)
    found, after = server.watched(10)
    assert found is not None and found.kind is FaultKind.SERVER_STOPPED
    assert after < 1


def test_a_server_that_a_debugger_stopped_for_a_moment_is_left_alone() -> None:
    server = Server()
    server.moves(tail=100)
    server.process.is_stopped = True
    assert server.watched(0.2)[0] is None
    server.process.is_stopped = False
    server.moves(cursor=100)
    assert server.watched(10)[0] is None


def test_a_long_kernel_is_left_alone_until_the_hang_timeout() -> None:
    server = Server()
    server.moves(tail=100)
    server.process.at_work = True
    found, after = server.watched(1000)
    assert found is not None and found.kind is FaultKind.SERVER_HUNG and found.counts
    assert 300 <= after < 301
    assert "--hang-timeout" in found.evidence


def test_a_server_asleep_at_a_record_is_given_up_after_a_second() -> None:
    server = Server()
    server.moves(tail=100)
    found, after = server.watched(1000)
    assert found is not None and found.kind is FaultKind.SERVER_HUNG and not found.counts
    assert 1 <= after < 1.2


def test_patience_follows_the_longest_record_of_a_server() -> None:
    server = Server()
    server.process.at_work = True
    for cursor in range(0, 400, 100):  # records of two seconds each
        server.moves(cursor=cursor, tail=cursor + 100)
        assert server.watched(2)[0] is None
    server.process.at_work = False
    server.moves(cursor=400, tail=500)
    found, after = server.watched(1000)
    assert found is not None
    assert 10 <= after < 10.5


def test_each_false_alarm_at_a_record_doubles_the_patience_up_to_the_hang_timeout() -> None:
    for doublings, expected in ((0, 1), (1, 2), (3, 8), (20, 300)):
        server = Server()
        server.moves(tail=100)
        found, after = server.watched(1000, doublings)
        assert found is not None
        assert expected <= after < expected + 0.2


def test_a_server_that_waits_in_a_collective_is_not_judged_by_itself() -> None:
    server = Server()
    server.moves(tail=100, in_collective=True)
    assert server.watched(200)[0] is None


def test_a_record_that_waited_for_a_late_peer_counts_from_where_the_peer_has_come() -> None:
    """It is not over yet, and was waited for longer than it may take by itself."""
    server = Server()
    server.moves(tail=100, in_collective=True)
    assert server.watched(2 * TIMEOUT_NS / SECOND)[0] is None
    server.moves(in_collective=False)
    found, after = server.watched(1000)
    assert found is not None and not found.counts
    assert 1 <= after < 1.2


def test_a_recovery_may_let_a_server_stand_still_but_not_stop_it() -> None:
    server = Server()
    server.moves(tail=100)
    server.progress.look(server.position, server.now_ns, 0)
    server.now_ns += 100 * SECOND
    assert server.progress.look_aside(server.now_ns) is None
    server.process.is_stopped = True
    assert server.progress.look_aside(server.now_ns) is None
    found = server.progress.look_aside(server.now_ns + SECOND)
    assert found is not None and found.kind is FaultKind.SERVER_STOPPED
    server.process.is_stopped = False
    assert server.progress.look(server.position, server.now_ns + SECOND, 0) is None, (
        "time under recovery counts"
    )


# ------------------------------------------------------------------ collectives
def member(
    waits: int | None, begun: int, size: int = 2, quiet_since_ns: int = 0, stuck: bool = False
) -> Member:
    return Member(None if waits is None else (UID, waits), {UID: (begun, size)}, quiet_since_ns, stuck)


def given_up(watch: CollectiveWatch, members: dict[int, Member], seconds: float, begin_s: float = 0) -> float:
    """Seconds until the watch gives a collective up, or infinity."""
    now_ns = int(begin_s * SECOND)
    while now_ns < (begin_s + seconds) * SECOND:
        if watch.look(members, now_ns) is not None:
            return now_ns / SECOND - begin_s
        now_ns += LOOK_NS
    return float("inf")


def test_a_rank_that_waits_for_a_peer_whose_program_has_not_come_yet_waits_for_ever() -> None:
    watch = CollectiveWatch(TIMEOUT_NS)
    assert given_up(watch, {0: member(5, 5), 1: member(None, 4)}, 1000) == float("inf")


def test_a_collective_that_all_have_begun_is_given_up_when_nothing_moves() -> None:
    watch = CollectiveWatch(TIMEOUT_NS)
    assert 1 <= given_up(watch, {0: member(5, 5), 1: member(5, 5)}, 1000) < 1.2


def test_a_member_that_has_got_through_already_counts_as_having_begun() -> None:
    watch = CollectiveWatch(TIMEOUT_NS)
    assert 1 <= given_up(watch, {0: member(5, 5), 1: member(6, 6)}, 1000) < 1.2


def test_a_collective_in_which_somebody_is_at_work_gets_until_the_hang_timeout() -> None:
    watch = CollectiveWatch(TIMEOUT_NS)
    at_work = {0: member(5, 5), 1: member(5, 5, quiet_since_ns=10**18)}
    assert 300 <= given_up(watch, at_work, 1000) < 301


def test_a_member_stuck_outside_of_collectives_is_judged_by_itself() -> None:
    watch = CollectiveWatch(TIMEOUT_NS)
    assert given_up(watch, {0: member(5, 5), 1: member(None, 5, stuck=True)}, 1000) == float("inf")


def test_patience_with_a_collective_follows_the_longest_one_and_doubles_with_each_alarm() -> None:
    watch = CollectiveWatch(TIMEOUT_NS)
    both = {0: member(5, 5, quiet_since_ns=10**18), 1: member(5, 5, quiet_since_ns=10**18)}
    assert given_up(watch, both, 3) == float("inf")  # it takes three seconds
    later = {0: member(6, 6), 1: member(6, 6)}
    first = given_up(watch, later, 1000, begin_s=3)
    assert 14 <= first < 15.2
    assert given_up(watch, later, 1000, begin_s=100) > 1.9 * first
    others = {0: member(7, 7), 1: member(7, 7)}
    assert given_up(watch, others, 1000, begin_s=1000) < 1.1 * first


# ------------------------------------------------------------------ the kernel's answers
@pytest.mark.parametrize(
    ("threads", "quiet"),
    [
        (["1", "1", "1"], False),
        (["1", "2", "1"], True),  # each had just woken up for a moment
        (["", "", ""], True),
    ],
)
def test_a_thread_that_waits_for_a_processor_is_at_work_if_it_still_does_the_next_time(
    threads: list[str], quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [ProcessState("S", frozenset(thread), 7) for thread in ["", *threads]]
    monkeypatch.setattr(activity_module, "process_state", lambda _: answers.pop(0))
    activity = Activity(0)
    for look in range(4):
        activity.look(SECOND + look * ASK_NS)
    assert activity.quiet_since_ns == SECOND + (0 if quiet else 3 * ASK_NS)


@dataclass(eq=False)
class OnDevice:
    """What the watch asks a server for."""

    device: str
    pid: int = 0


@pytest.mark.parametrize(("device", "counts"), [("cpu:0", True), ("cuda:0", False)])
def test_a_thread_that_spins_is_at_work_but_on_a_gpu(
    device: str, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's does so while a collective waits, and a dead one would be given up after minutes only."""
    ticks = iter(range(0, 1000, 10))
    answer = lambda _: ProcessState("R", frozenset({"1"}), next(ticks))  # noqa: E731
    monkeypatch.setattr(activity_module, "process_state", answer)
    watch: Any = Watch({}, {}, {}, Mock(), hang_timeout_s=300)
    server = OnDevice(device)
    activity, _ = watch._of(server)
    for look in range(4):
        activity.look(SECOND + look * ASK_NS)
    assert watch.pace(server).quiet_since_ns == SECOND + (3 * ASK_NS if counts else 0)
    activity.look(9 * SECOND)  # nobody has looked meanwhile
    assert watch.pace(server).quiet_since_ns == 9 * SECOND


@pytest.mark.parametrize(("unheard_ns", "quiet_since"), [(0, 3), (UNHEARD_NS, 3), (UNHEARD_NS + 1, 20)])
def test_what_a_host_told_last_is_no_evidence_once_it_has_fallen_silent(
    unheard_ns: int, quiet_since: int
) -> None:
    """A collective that its rank waited for may be over since, and would be taken for one that hangs."""
    watch: Any = Watch({}, {}, {}, Mock(), hang_timeout_s=300)
    pace = Pace(quiet_since_ns=3 * SECOND, stuck_ns=5, moved_ns=2 * SECOND)
    server = SimpleNamespace(host="b", pace=pace, heard_ns=20 * SECOND - unheard_ns)
    log = SimpleNamespace(in_collective=1, waits_for=(7, 0), wait_sequence=4, started=list)
    member = watch._member(SimpleNamespace(server=server, log=log), 20 * SECOND)
    assert member.quiet_since_ns == quiet_since * SECOND


def test_the_kernel_tells_a_stopped_process_from_a_sleeping_one() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        state = process_state(child.pid)
        assert state is not None and state.stopped
        activity = Activity(child.pid)
        activity.look(SECOND)
        assert activity.stopped_since_ns == SECOND
        os.kill(child.pid, signal.SIGCONT)
        os.waitid(os.P_PID, child.pid, os.WCONTINUED | os.WNOWAIT)
        activity.look(SECOND + ASK_NS)
        assert activity.stopped_since_ns == 0
    finally:
        child.kill()
        child.communicate()


def test_there_is_no_answer_about_a_process_that_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert process_state(child.pid) is None


def who_has_come(members: dict[int, Member], uid: tuple[int, int], sequence: int) -> list[Member]:
    """By looking at all members for each that waits."""
    return [one for one in members.values() if one.started.get(uid, (0, 0))[0] >= sequence]


def test_those_who_have_come_to_a_collective_are_the_same_however_they_are_counted(seed: int) -> None:
    chance = random.Random(seed)
    uids = [(number, 0) for number in range(1, 5)]
    for _ in range(200):
        members = {}
        for rank in range(chance.randint(1, 12)):
            started = {uid: (chance.randint(0, 3), 4) for uid in uids if chance.random() < 0.6}
            waits = (chance.choice(uids), chance.randint(1, 4)) if chance.random() < 0.7 else None
            members[rank] = Member(waits, started, chance.randint(0, 9), chance.random() < 0.2)
        found = arrivals(members.values())
        assert found.keys() == {one.waits_for for one in members.values() if one.waits_for is not None}
        for (uid, sequence), arrival in found.items():
            having = who_has_come(members, uid, sequence)
            assert arrival == Arrival(
                len(having),
                any(one.stuck_outside for one in having),
                max((one.quiet_since_ns for one in having), default=0),
            )


def test_a_look_at_many_ranks_that_wait_looks_at_each_of_them_once() -> None:
    class Counted(dict[tuple[int, int], tuple[int, int]]):
        looks = 0

        def items(self) -> Any:
            Counted.looks += 1
            return super().items()

    members = {
        rank: Member((UID, 5), Counted({UID: (5, 300), (rank // 2, 1): (5, 2)}), 0, stuck_outside=False)
        for rank in range(300)
    }
    watch = CollectiveWatch(TIMEOUT_NS)
    assert watch.look(members, 0) is None and watch.waiting
    assert Counted.looks == len(members)
