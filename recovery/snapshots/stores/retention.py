"""Which set is newer, and what may go: of the second tier, and of runs of a job in its stores.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

Set = TypeVar("Set")


@dataclass(frozen=True)
class Retention:
    """Keep the newest `keep_last` sets of a job (1 or more), and of every `keep_every` steps of a run the
    first set; 0: none of these."""

    keep_last: int = 3
    keep_every: int = 0


DEFAULT = Retention()


@dataclass(frozen=True)
class KeptSet:
    """A complete set, as retention sees it."""

    run: str
    serial: int
    step: int
    time_ns: int


def newest_first(sets: Collection[Set], age: Callable[[Set], tuple[str, int, int]]) -> list[Set]:
    """`age`: of a set its run (JOB/RUN), serial, and when it was written, nanoseconds.

    Between runs time decides.  Within a run serials do: an older set may be written later.
    """
    newest: dict[str, int] = {}
    for run, _, time_ns in map(age, sets):
        newest[run] = max(newest.get(run, 0), time_ns)

    def key(one: Set) -> tuple[int, str, int]:
        run, serial, _ = age(one)
        return newest[run], run, serial

    return sorted(sets, key=key, reverse=True)


def superfluous_sets(sets: Collection[KeptSet], present: str, rule: Retention) -> list[KeptSet]:
    """Those of a job that may go, oldest first; `present` is the run to which sets are being added.

    Within a run serials tell which set is newer; between runs time does, but a clock that was put back never
    makes another run newer than the present one.
    """
    began: dict[str, int] = {}
    for one in sets:
        began[one.run] = min(began.get(one.run, one.time_ns), one.time_ns)
    by_age = sorted(sets, key=lambda one: (one.run == present, began[one.run], one.run, one.serial))
    kept = set(by_age[-max(1, rule.keep_last) :])
    if rule.keep_every:
        firsts: dict[tuple[str, int], KeptSet] = {}
        for one in by_age:
            firsts.setdefault((one.run, one.step // rule.keep_every), one)
        kept |= set(firsts.values())
    return [one for one in by_age if one not in kept]


@dataclass(frozen=True)
class LocalRun:
    """A run's directory of stores."""

    name: str
    newest_ns: int
    """When its newest snapshot was written, or the directory changed."""
    complete: bool
    """Whether it holds a set that is complete on all ranks."""
    readable: bool
    """Whether every store in it could be read."""


def superfluous_runs(runs: Sequence[LocalRun], present: str, keep: int) -> list[str]:
    """Those of a job that may go: older than the `keep` newest that hold a complete set, the present one
    among them; and none before the present run holds one.  What cannot be read is left to a person.
    """
    if not any(run.name == present and run.complete for run in runs):
        return []
    former = sorted(
        (run for run in runs if run.name != present), key=lambda run: (run.newest_ns, run.name), reverse=True
    )
    kept = {run.name for run in [run for run in former if run.complete][: max(1, keep) - 1]}
    return [run.name for run in reversed(former) if run.readable and run.name not in kept]
