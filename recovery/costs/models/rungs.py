"""Which rung of the ladder a failure takes: the real planner is asked, on facts made from a layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from understudy.recovery.costs.models.layout import Layout
from understudy.recovery.planning.facts import (
    BufferFacts,
    CommitFacts,
    Facts,
    FaultFacts,
    FaultKind,
    RankFacts,
)
from understudy.recovery.planning.planner import PlanName, plan

ASKED_EVERY_TIME = 256
"""Ranks up to which the planner decides; above, `by_rule`, which tests hold against it at 64, 128 and 256."""
BYTES_OF_SHARD = 1 << 30
"""Any size will do: the rung does not depend on it."""


class Failure(Enum):
    """What fails, as operators count it; the value is its name in files."""

    TRANSIENT = "transient"
    """A link for a moment, a call that fails once: every device server lives."""
    SERVER = "server"
    """A driver, or the device server: its memory is gone, the GPU can be used again."""
    DRIVER = "driver"
    """A driver that is not to be trusted any more, though its memory can be read."""
    DEVICE = "device"
    """A GPU for good."""
    HOST = "host"
    """With all its ranks and their workers."""

    @property
    def takes_devices(self) -> bool:
        """Whether the ranks need others."""
        return self in (Failure.DEVICE, Failure.HOST)


FAULT_OF = {
    Failure.TRANSIENT: FaultKind.COLLECTIVE_FAILED,
    Failure.SERVER: FaultKind.SERVER_DIED,
    Failure.DRIVER: FaultKind.DRIVER_SUSPECT,
    Failure.DEVICE: FaultKind.DEVICE_GONE,
    Failure.HOST: FaultKind.HOST_LOST,
}
_KEPT = CommitFacts(1, step=1, uids=((1, 2),), sequences=(1,), index=1)
"""What images and snapshots are of: some steps ago."""
_NOW = CommitFacts(2, step=2, uids=((1, 2),), sequences=(2,), index=2)


@dataclass(frozen=True)
class Kept:
    """What a job keeps beside its replicas."""

    images: bool = False
    """Images of its workers on another host, with snapshots in host memory (`--cpu-image-every`)."""
    stored: bool = False
    """Snapshots on storage (`--persist`)."""
    shadows: bool = True
    """Copies in host memory of state that no other rank has (`--shadow-limit`)."""


Failed = Mapping[int, Failure]
"""Ranks that have failed and are not back yet -> how."""


@dataclass
class Ladder:
    """Answers for one job; remembers what it has asked."""

    layout: Layout
    kept: Kept
    _known: dict[tuple[object, ...], PlanName] = field(default_factory=dict)

    def rung(self, failed: Failed, free_devices: int) -> PlanName:
        """What is done about ranks that are down at one moment; `free_devices`: spares that are ready."""
        if self.layout.gpus > ASKED_EVERY_TIME:
            return by_rule(self.layout, self.kept, failed, free_devices)
        lost = _failed_by(failed, Failure.HOST)
        gone = dead(failed)
        key = (
            frozenset(failed.values()), len(failed) == self.layout.gpus,
            self.layout.lost_shards(gone) > 0, images_outlive(self.layout.hosts_of(lost)),
            devices_wanted(failed) <= free_devices,
        )  # fmt: skip
        if key not in self._known:
            self._known[key] = plan(facts_of(self.layout, self.kept, failed, free_devices)).name
        return self._known[key]


def images_outlive(hosts: frozenset[int]) -> bool:
    """Whether the images of workers on these hosts, lost at once, are still somewhere.

    The leading host, the first, has those of all others, and its standby those of the leading host.
    """
    return not (0 in hosts and len(hosts) > 1)


def devices_wanted(failed: Failed) -> int:
    """How many ranks need another one."""
    return sum(failure.takes_devices for failure in failed.values())


def worst_of(failures: Iterable[Failure]) -> Failure:
    """The one that takes most along."""
    return max(failures, key=_BY_SEVERITY.index)


def facts_of(layout: Layout, kept: Kept, failed: Failed, free_devices: int) -> Facts:
    """What a coordinator would know if these failed in the forward pass behind the newest commit.

    A host takes its workers along.  Without an image of them they have departed, as have those that end.
    """
    fault = FaultFacts(FAULT_OF[worst_of(failed.values())], tuple(sorted(failed)))
    lost = _failed_by(failed, Failure.HOST)
    departed = () if kept.images and images_outlive(layout.hosts_of(lost)) else tuple(sorted(lost))
    return Facts(
        tuple(
            _rank(layout, kept, rank, failed.get(rank)) for rank in range(layout.gpus) if rank not in departed
        ),
        fault,
        departed=departed,
        homeless=tuple(
            rank for rank in sorted(failed) if failed[rank].takes_devices and rank not in departed
        ),
        free_devices=free_devices,
    )


def by_rule(layout: Layout, kept: Kept, failed: Failed, free_devices: int) -> PlanName:
    """The same answer as the planner's on `facts_of`, however many ranks there are."""
    if devices_wanted(failed) > free_devices:
        return PlanName.GIVE_UP
    if lost := _failed_by(failed, Failure.HOST):
        comes_back = kept.images and images_outlive(layout.hosts_of(lost))
        return PlanName.RESTORE_SNAPSHOT_REPLAY if comes_back else PlanName.GIVE_UP
    gone = dead(failed)
    if not layout.lost_shards(gone) or (layout.replicas == 1 and kept.shadows):
        if gone:
            return PlanName.RESTART_COPY_REPLAY
        suspect = Failure.DRIVER in failed.values()
        return PlanName.STASH_RESTART_RESTORE if suspect else PlanName.REWIND_IN_PLACE
    if kept.images:
        return PlanName.RESTORE_SNAPSHOT_REPLAY
    return PlanName.RESTORE_STORED_REPLAY if kept.stored else PlanName.GIVE_UP


_BY_SEVERITY = tuple(Failure)


def _failed_by(failed: Failed, failure: Failure) -> frozenset[int]:
    return frozenset(rank for rank, how in failed.items() if how is failure)


def dead(failed: Failed) -> frozenset[int]:
    """Those whose memory nobody can read."""
    return frozenset(rank for rank, how in failed.items() if how not in (Failure.TRANSIENT, Failure.DRIVER))


def _rank(layout: Layout, kept: Kept, rank: int, how: Failure | None) -> RankFacts:
    returns = how is Failure.HOST
    newest = _KEPT if returns else _NOW
    alone = layout.replicas == 1 and kept.shadows
    content = hash((layout.shard_of(rank), newest.step)) & (1 << 64) - 1
    return RankFacts(
        rank,
        alive=how in (None, Failure.TRANSIENT, Failure.DRIVER),
        commits=(newest,),
        log_complete_from_start=False,
        manifests={} if returns else {newest.number: (BufferFacts(10, BYTES_OF_SHARD, content, alone),)},
        floor_commit=newest.number,
        suspect=how is Failure.DRIVER,
        snapshots=(_KEPT,) if kept.images else (),
        stored=(_KEPT,) if kept.stored else (),
        restores_from_image=returns,
    )
