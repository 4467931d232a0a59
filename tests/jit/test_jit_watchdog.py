"""What is a hang, and what is merely late (paper 001 §3.1)."""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from understudy.jit import watchdog
from understudy.jit.at_work import AtWork
from understudy.jit.watchdog import Alone, History, Limits, Observation, judge

LIMITS = Limits(minimum=1.0, timeout=100.0, gap=3.0)


def verdicts(seen: list[Observation], limits: Limits = LIMITS) -> list[bool]:
    history, found = History(), []
    for one in seen:
        history, hangs = judge(history, one, limits)
        found.append(hangs)
    return found


def steps(stalls: list[float], every: float = 0.1) -> list[Observation]:
    """A rank that waits in each step for as long as `stalls` says, then completes the step."""
    now, found = 0.0, []
    for step, stall in enumerate(stalls):
        end = now + stall
        while now < end:
            found.append(Observation(now, step, (("0", step + 1, step),), place=step))
            now += every
        found.append(Observation(now, step + 1, (("0", step + 1, step + 1),), place=-step))
        now += every
    return found


def test_peer_that_is_merely_late_is_no_hang_however_slow_its_steps_become() -> None:
    assert not any(verdicts(steps([0.3 * 1.5**n for n in range(12)])))


def test_peer_that_does_not_come_is_a_hang_after_ten_times_the_longest_stall() -> None:
    seen = steps([0.5] * 5 + [20.0])
    first = verdicts(seen).index(True)
    began = min(one.time for one in seen if one.step == 5 and one.waits)
    assert 5.0 <= seen[first].time - began <= 6.3, "ten times what was seen, to one look"


def test_minimum_stall_is_waited_for_where_steps_are_fast() -> None:
    seen = steps([0.01] * 5 + [20.0])
    began = min(one.time for one in seen if one.step == 5 and one.waits)
    assert seen[verdicts(seen).index(True)].time - began == pytest.approx(1.0, abs=0.2)


def test_first_steps_have_no_history_and_may_wait_ten_times_as_long() -> None:
    assert not any(verdicts(steps([0.1, 9.0, 0.1])))
    seen = steps([0.1, 90.0])
    began = min(one.time for one in seen if one.step == 1 and one.waits)
    assert seen[verdicts(seen).index(True)].time - began == pytest.approx(10.0, abs=0.2)


def test_steps_before_the_first_look_are_history_as_well() -> None:
    waits = [Observation(0.1 * n, 5, (("0", 6, 5),)) for n in range(15)]
    assert waits[verdicts(waits).index(True)].time == pytest.approx(1.0, abs=0.2)


def test_peer_that_is_heard_to_be_at_work_is_waited_for_until_it_is_heard_no_more() -> None:
    seen = steps([0.1] * 5)
    began = seen[-1].time
    waits = Observation(began, 5, (("0", 6, 5),))
    for n in range(1, 400):  # 40 s, of which it is heard at work for 30, each second
        time = began + 0.1 * n
        seen.append(replace(waits, time=time, late=n % 10 == 0 and n <= 300))
    first = verdicts(seen).index(True)
    assert seen[first].time - began == pytest.approx(31.0, abs=0.2)


def test_what_was_waited_for_while_another_rank_was_at_work_makes_no_hang_longer() -> None:
    history = History(Observation(0.0, 9, (("0", 6, 5),)), since=0.0)
    for n in range(1, 500):
        history, _ = judge(history, Observation(0.1 * n, 9, (("0", 6, 5),), late=n % 5 == 0), LIMITS)
    history, _ = judge(history, Observation(50.0, 9, (("0", 6, 6),)), LIMITS)
    assert history.longest < 1.0


@pytest.mark.parametrize(("recorded", "seen"), [(False, 5), (True, 4), (None, 4)])
def test_works_that_only_seem_to_be_under_way_are_none(
    monkeypatch: pytest.MonkeyPatch, folder: Path, recorded: bool | None, seen: int
) -> None:
    """PyTorch counts the work that ended last, and of two at once the older one may have."""
    monkeypatch.setattr(watchdog, "counts", lambda: (("0", 5, 4),))
    monkeypatch.setattr(watchdog, "outstanding", lambda: recorded)
    dog = watchdog.Watchdog(1.0, lambda: 0, lambda: 0, print, AtWork(folder / "at-work", 0, print), print)
    assert dog._works(inside=False) == (("0", 5, 4),)
    assert dog._works(inside=True) == (("0", 5, 4),)
    assert dog._works(inside=False) == (("0", 5, seen),)


def test_rank_says_that_it_is_at_work_only_behind_a_while_without_waiting() -> None:
    alone = Alone(2.0)
    counts, pending = (("0", 5, 5),), (("0", 6, 5),)
    seen = [(0.0, 1, counts), (1.9, 1, counts), (2.1, 1, counts), (2.2, 2, counts), (4.1, 2, counts)]
    seen += [(4.3, 2, counts), (4.4, 2, pending), (9.0, 2, pending), (9.1, 2, counts), (11.2, 2, counts)]
    works = [alone.works(Observation(*one)) for one in seen]
    assert works == [False, False, True, False, False, True, False, False, False, True]


def test_ranks_hear_one_another_at_work_by_a_file_that_they_share(folder: Path) -> None:
    said: list[str] = []
    first, second = (AtWork(folder / "at-work", rank, said.append) for rank in range(2))
    assert [first.heard(0.0), first.heard(1.0)] == [False, False]
    second.tell(1.5)
    assert [first.heard(1.9), first.heard(2.0), first.heard(3.0)] == [False, True, False]
    second.tell(2.4)  # too soon: each second is enough
    assert not first.heard(4.0)
    second.tell(2.5)
    assert first.heard(5.0)
    assert said == [] and stat.S_IMODE((folder / "at-work").stat().st_mode) == 0o600


@pytest.mark.parametrize("what", ["link", "folder", "missing folder"])
def test_file_that_cannot_be_shared_is_told_of_once(folder: Path, what: str) -> None:
    place = folder / "no" / "at-work" if what == "missing folder" else folder / "at-work"
    if what == "link":
        place.symlink_to(folder / "else")
    elif what == "folder":
        place.mkdir()
    said: list[str] = []
    at_work = AtWork(place, 0, said.append)
    for n in range(3):
        at_work.tell(float(2 * n))
        assert not at_work.heard(float(2 * n))
    assert len(said) == 1 and "cannot tell one another that they are at work" in said[0]
    assert not (folder / "else").exists()


def test_no_stall_may_outlast_four_fifths_of_the_time_out() -> None:
    history = History(Observation(0.0, 9, ()), first_step=0, longest=60.0)
    assert history.limit(LIMITS) == 80.0


@pytest.mark.parametrize(
    "moves",
    [
        lambda one, n: replace(one, place=n),
        lambda one, n: replace(one, step=one.step + n),
        lambda one, n: replace(one, counts=(("0", 6, 5), ("1", n + 1, n))),
        lambda one, n: replace(one, counts=(("0", 5, 5),)),
    ],
    ids=["training thread moves", "steps go on", "another group works", "nothing is pending"],
)
def test_work_that_is_left_pending_by_a_training_that_moves_is_no_hang(
    moves: Callable[[Observation, int], Observation],
) -> None:
    seen = steps([0.1] * 5)
    last = Observation(seen[-1].time, 5, (("0", 6, 5),))
    seen += [moves(replace(last, time=last.time + 0.1 * n), n) for n in range(1, 900)]
    assert not any(verdicts(seen))


def test_process_that_was_stopped_itself_does_not_take_that_time_for_a_stall_of_others() -> None:
    seen = steps([0.1] * 5)
    waits = Observation(seen[-1].time + 0.1, 5, (("0", 6, 5),))
    assert not any(verdicts([*seen, waits, replace(waits, time=waits.time + 60.0)]))


def test_a_thread_that_stays_inside_point_to_point_calls_hangs_as_well() -> None:
    seen = steps([0.1] * 5)
    seen += [Observation(seen[-1].time + 0.1 * n, 5, (("0", 5, 5),), 7, inside=True) for n in range(1, 40)]
    assert verdicts(seen)[-1]
