"""Facts of jobs as they stand when something breaks: small ones in any state, and large ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum

from understudy.recovery.planning.facts import (
    BufferFacts,
    CommitFacts,
    Facts,
    FaultFacts,
    FaultKind,
    Manifest,
    Phase,
    RankFacts,
)

GIVEN_UP = (1 << 64) - 1
"""What a commit says of a communicator that its rank has given up."""
TENSOR, PIPELINE = 8, 8
"""Ranks of one layer, and parts of a model, of a large job; the rest are replicas."""


# ------------------------------------------------------------------ small ones
class Steps(Enum):
    """Whether commits lie around optimizer steps, and whether all ranks do the same in them."""

    NONE = 0
    ANY = 1
    ALIKE = 2


def small_job(chance: random.Random) -> Facts:
    """Up to five ranks; all that the planner tells apart occurs, likely or not."""
    numbers = range(chance.choice([0, 0, 0, 1]), chance.randint(2, 5))
    groups = {
        uid: chance.sample(numbers, chance.randint(1, len(numbers))) for uid in range(chance.randint(0, 3))
    }
    steps = chance.choice([Steps.NONE, Steps.NONE, Steps.ANY, Steps.ALIKE])
    sizes = {uid: len(group) + (chance.random() < 0.05) for uid, group in groups.items()}
    told = sizes if chance.random() < 0.5 else {}
    hosts = chance.randint(1, 3)
    ranks = tuple(_rank(chance, number, groups, told, steps, numbers, hosts) for number in numbers)
    dead = tuple(rank.rank for rank in ranks if not rank.alive)
    fault = FaultFacts(
        chance.choice(list(FaultKind)), dead or (chance.choice(numbers),),
        attempts=chance.choice([1, 1, 1, 1, 2, 3]), message=chance.choice(["", "what was said"]),
        trusted={n: chance.randint(0, 5) for n in numbers if chance.random() < 0.8}
        if chance.random() < 0.1 else {},
    )  # fmt: skip
    return Facts(
        ranks, fault, departed=(9,) if chance.random() < 0.03 else (),
        homeless=dead if chance.random() < 0.06 else (), free_devices=chance.randint(0, 3),
        not_replayable="it was seen" if chance.random() < 0.03 else "",
        storage_problem="a disk is full" if chance.random() < 0.1 else "",
    )  # fmt: skip


def _rank(
    chance: random.Random,
    number: int,
    groups: Mapping[int, Sequence[int]],
    told: Mapping[int, int],
    steps: Steps,
    numbers: Sequence[int],
    hosts: int,
) -> RankFacts:
    alive = chance.random() < 0.65
    count = chance.randint(0, 5)
    if steps is Steps.ALIKE and chance.random() < 0.8:  # the dead ones before a step, the others behind it
        count = 4 if alive else 3
    uids = [uid for uid, group in groups.items() if number in group]
    commits = tuple(_commits(chance, count, uids, told, steps))
    manifests = {one.number: _manifest(chance, one, steps) for one in commits if chance.random() < 0.95}
    snapshots = tuple(one for one in commits if chance.random() < 0.2)
    known = () if chance.random() < 0.03 else commits  # a restore that failed leaves none behind
    return RankFacts(
        number, alive=alive, commits=known, manifests=manifests,
        log_complete_from_start=chance.random() < 0.5, floor_commit=chance.choice([0, 0, 1, 2]),
        phase=chance.choice([*Phase, Phase.FORWARD_BACKWARD]),
        optimizer_preimages=chance.random() < (0.9 if steps is Steps.NONE else 0.3),
        suspect=alive and chance.random() < 0.12, leaving=chance.random() < 0.1, snapshots=snapshots,
        protected=chance.random() < 0.93, refused_commit=chance.choice([0, 0, 0, 1, 3]),
        stored=tuple(one for one in commits if chance.random() < 0.1),
        refused_snapshots=frozenset(one.place for one in snapshots if chance.random() < 0.15),
        restores_from_image=not alive and chance.random() < 0.05,
        unread=frozenset(other for other in numbers if chance.random() < 0.06),
        begun=((((7, 7)), chance.randint(1, 3)),) if chance.random() < 0.05 else (),
        host=str(chance.randrange(hosts) or ""),
    )  # fmt: skip


def _commits(
    chance: random.Random, count: int, uids: Sequence[int], told: Mapping[int, int], steps: Steps
) -> Iterator[CommitFacts]:
    done = dict.fromkeys(uids, 0)
    gone: set[int] = set()
    step = 0
    for number in range(1, count + 1):
        for uid in uids:
            done[uid] += number % 2 if steps is Steps.ALIKE else chance.choice([0, 0, 1, 1, 2])
            if done[uid] and chance.random() < 0.04:
                gone.add(uid)
        shown = [uid for uid in uids if done[uid] and (uid not in gone or chance.random() < 0.3)]
        step += chance.choice([0, 1, 1]) if steps is Steps.NONE else number % 2 == 0
        yield CommitFacts(
            number, step, complete=chance.random() < 0.85, has_manifest=chance.random() < 0.93,
            uids=tuple((uid, 0) for uid in shown),
            sequences=tuple(GIVEN_UP if uid in gone else done[uid] for uid in shown),
            members=tuple(told[uid] for uid in shown) if told else (),
            optimizer=steps is not Steps.NONE and number % 2 == 1,
            step_digest=chance.choice([0, 1, 1, 1]), index=10 * number,
        )  # fmt: skip


def _manifest(chance: random.Random, commit: CommitFacts, steps: Steps) -> Manifest:
    contents = chance.choice([1, 2, 3])
    base = 0 if steps is Steps.NONE else 100 * commit.step
    if steps is Steps.ALIKE:
        return tuple(BufferFacts(10 + place, 8, base + place, chance.random() < 0.1) for place in range(2))
    return tuple(
        BufferFacts(
            10 + place, chance.choice([0, 8, 8, 8, 8]),
            None if chance.random() < 0.04 else base + chance.randint(1, contents), chance.random() < 0.3,
        )
        for place in range(chance.randint(0, 3))
    )  # fmt: skip


# ------------------------------------------------------------------ large ones
class Manifests(Mapping[int, Manifest]):
    """Of one rank: buffers that its replicas hold, too, and two that are shadowed.

    `shared`: the first, by commit.  `alone`: at its newest commit it has one more, which nobody else holds
    and no shadow has.
    """

    def __init__(
        self, shared: Mapping[int, Manifest], rank: int, newest: int, kept: int, alone: bool
    ) -> None:
        self._shared, self._rank, self._newest, self._kept = shared, rank, newest, kept
        self._alone = alone

    def __getitem__(self, number: int) -> Manifest:
        if not self._newest - self._kept < number <= self._newest:
            raise KeyError(number)
        own = (self._rank << 20 | number) << 40
        made = [BufferFacts(900 + place, 64, own + place, True) for place in range(2)]
        if self._alone and number == self._newest:
            made.append(BufferFacts(999, 4096, own + 9, False))
        return (*self._shared[number], *made)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._newest - self._kept + 1, self._newest + 1))

    def __len__(self) -> int:
        return self._kept


def large_job(
    world: int,
    dead: Sequence[int],
    *,
    alone: Sequence[int] = (),
    behind: Sequence[int] = (),
    sharded: bool = False,
    snapshots: bool = False,
    commits: int = 3,
    buffers: int = 50,
) -> Facts:
    """Tensor, pipeline and data parallel, eight ranks a host; `sharded`: one group, and nobody is a replica.

    `behind`: ranks that have not reached the newest commit; `snapshots`: each has one, of its oldest.
    """
    gone, ranks = set(dead), []
    shared: dict[int, dict[int, Manifest]] = {}
    for rank in range(world):
        groups = [(1, world)] if sharded else _groups(rank, world)
        uids, members = tuple((uid, 7) for uid, _ in groups), tuple(size for _, size in groups)
        newest = 20 - (rank in behind)
        made = tuple(
            CommitFacts(
                number, number, not sharded, uids=uids, sequences=(2 * number,) * len(uids),
                members=members, index=10 * number,
            )
            for number in range(newest - commits + 1, newest + 1)
        )  # fmt: skip
        kind = rank if sharded else rank % (TENSOR * PIPELINE)
        if kind not in shared:
            shared[kind] = {number: _shared_by(kind, number, buffers) for number in range(20 - commits, 21)}
        ranks.append(
            RankFacts(
                rank, alive=rank not in gone, commits=made, log_complete_from_start=False,
                manifests=Manifests(shared[kind], rank, newest, commits, rank in alone),
                floor_commit=newest - commits + 1, host=str(rank // 8),
                snapshots=made[:1] if snapshots else (),
            )
        )  # fmt: skip
    return Facts(tuple(ranks), FaultFacts(FaultKind.SERVER_DIED, tuple(dead)), free_devices=world)


def _shared_by(kind: int, number: int, buffers: int) -> Manifest:
    first = (kind << 20 | number) << 20
    return tuple(BufferFacts(100 + place, 1 << 20, first + place, False) for place in range(buffers))


def _groups(rank: int, world: int) -> list[tuple[int, int]]:
    """Names of a rank's communicators, and how many have each."""
    place = rank % (TENSOR * PIPELINE)
    found = [(1_000_000 + rank // TENSOR, TENSOR), (2_000_000 + place, world // (TENSOR * PIPELINE))]
    stage = place // TENSOR
    if stage > 0:
        found.append((3_000_000 + rank - TENSOR, 2))
    if stage < PIPELINE - 1:
        found.append((3_000_000 + rank, 2))
    return found
