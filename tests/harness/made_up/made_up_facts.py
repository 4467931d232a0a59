"""Facts for the planner: ranks whose commits and buffers are made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from understudy.recovery.planning.facts import (
    BufferFacts,
    CommitFacts,
    FaultFacts,
    FaultKind,
    Manifest,
    RankFacts,
)
from understudy.recovery.planning.planner import FailRank, Plan
from understudy.recovery.planning.restarts import Restart

WORLD = (1, 2)
"""A communicator of all ranks."""


def having(*communicators: tuple[int, int, int]) -> dict[str, Any]:
    """What a commit says of communicators: (uid_low, uid_high, collectives done) of each."""
    return {
        "uids": tuple((low, high) for low, high, _ in communicators),
        "sequences": tuple(done for *_, done in communicators),
    }


def commit(number: int, sequence: int | None = None, **other: object) -> CommitFacts:
    done = number if sequence is None else sequence
    return replace(CommitFacts(number, step=number, index=number, **having((*WORLD, done))), **other)  # type: ignore[arg-type]


def parameters(*digests: int, shadowed: bool = False, size: int = 100) -> Manifest:
    return tuple(BufferFacts(10 + n, size, digest, shadowed) for n, digest in enumerate(digests))


def rank(number: int, newest: int = 3, **other: object) -> RankFacts:
    """Commits 1…newest, each with one replicated buffer whose content changes from commit to commit."""
    commits = tuple(commit(n) for n in range(1, newest + 1))
    manifests = {n: parameters(1000 + n) for n in range(1, newest + 1)}
    return replace(
        RankFacts(
            number, commits=commits, manifests=manifests, log_complete_from_start=False, floor_commit=1
        ),
        **other,  # type: ignore[arg-type]
    )


def died(*ranks: int, **other: object) -> FaultFacts:
    return replace(FaultFacts(FaultKind.SERVER_DIED, ranks), **other)  # type: ignore[arg-type]


def lost_ranks(chosen: Plan) -> list[int]:
    return [action.rank for action in chosen.actions if isinstance(action, FailRank)]


def restarts(chosen: Plan) -> list[Restart]:
    return [action for action in chosen.actions if isinstance(action, Restart)]
