"""A plan as what device servers do: stages that follow each other, and their steps.

Pure: no clock, no I/O, no randomness.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from understudy.recovery.planning.cuts import Place
from understudy.recovery.planning.planner import FailRank, Plan, Reload, Rewind
from understudy.recovery.planning.replicas import Copy
from understudy.recovery.planning.restarts import Restart
from understudy.recovery.planning.roll_forward import RollForward
from understudy.recovery.state.recovery_progress import Stage


class RoundFailed(RuntimeError):
    """A step could not be done; plan again from what is true then."""


@dataclass(frozen=True)
class LoadFromStorage:
    """Servers of ranks end, and snapshots of these places in the logs come into memory that was theirs."""

    places: tuple[tuple[int, Place], ...]
    """Ranks, and where each of them goes back to."""


@dataclass(frozen=True)
class RewindServer:
    """The rank's server goes back to a commit by its pre-images; `connects`: it is the one that goes on."""

    rank: int
    commit: int
    connects: bool


@dataclass(frozen=True)
class ReplaceServer:
    """A ready server is attached to the rank's log at a commit; `keeps_source`: the former one lives on."""

    rank: int
    commit: int
    keeps_source: bool


@dataclass(frozen=True)
class RestoreFromReplicas:
    """The rank's new server reads the state of a commit from servers that hold it, and rolls it forward."""

    rank: int
    commit: int
    copies: tuple[Copy, ...]
    roll_forward: RollForward | None


@dataclass(frozen=True)
class RestoreFromSnapshot:
    """The rank's server takes the state of a commit from memory of the log; `arrives`: it is a new one."""

    rank: int
    commit: int
    arrives: bool


@dataclass(frozen=True)
class ReleaseFormer:
    """Nobody needs the server any more that the rank had before."""

    rank: int


@dataclass(frozen=True)
class Rebuild:
    """The rank's server connects its communicators anew."""

    rank: int


@dataclass(frozen=True)
class Resume:
    """The rank's server goes on."""

    rank: int


Step = (
    LoadFromStorage
    | RewindServer
    | ReplaceServer
    | RestoreFromReplicas
    | RestoreFromSnapshot
    | ReleaseFormer
    | Rebuild
    | Resume
)
Wave = tuple[tuple[Step, ...], ...]
"""Chains of steps that go on side by side, each of them of one rank, a step behind the other."""


@dataclass(frozen=True)
class StageOfPlan:
    """Its waves follow each other."""

    stage: Stage
    waves: tuple[Wave, ...]


def stages_of(plan: Plan, ranks: Collection[int]) -> tuple[StageOfPlan, ...]:
    """What these ranks do, which are all that go on."""
    acting = [action for action in plan.actions if not isinstance(action, FailRank)]
    stored = [one.rank for one in acting if isinstance(one, Reload) and one.stored]
    load = LoadFromStorage(tuple((rank, plan.cut[rank].place) for rank in stored))
    return (
        StageOfPlan(
            Stage.REPLACING,
            (
                ((load,),) if stored else (),
                tuple(chain for action in acting if (chain := _replacing(action))),
            ),
        ),
        StageOfPlan(
            Stage.RESTORING,
            (
                tuple(chain for action in acting if (chain := _restoring(action))),
                _each(ReleaseFormer(rank) for rank in ranks),
            ),
        ),
        StageOfPlan(
            Stage.REBUILDING,
            (_each(Rebuild(rank) for rank in ranks), _each(Resume(rank) for rank in ranks)),
        ),
    )


def _each(steps: Iterable[Step]) -> Wave:
    return tuple((step,) for step in steps)


def _replacing(action: Restart | Rewind | Reload) -> tuple[Step, ...]:
    match action:
        case Restart(rank=rank, commit=commit, keeps_source=keeps_source):
            replace = ReplaceServer(rank, commit, keeps_source)
            return (RewindServer(rank, commit, connects=False), replace) if keeps_source else (replace,)
        case Rewind(rank=rank, commit=commit):
            return (RewindServer(rank, commit, connects=True),)
        case Reload(rank=rank, commit=commit, fresh=True):
            return (ReplaceServer(rank, commit, keeps_source=False),)
    return ()


def _restoring(action: Restart | Rewind | Reload) -> tuple[Step, ...]:
    match action:
        case Restart(rank=rank, commit=commit, copies=copies, roll_forward=roll_forward):
            return (RestoreFromReplicas(rank, commit, copies, roll_forward),)
        case Reload(rank=rank, commit=commit, fresh=fresh):
            return (RestoreFromSnapshot(rank, commit, arrives=fresh),)
    return ()
