"""How the ranks of a run tell one another things: the only collectives of this package."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Who takes part. Alone (`world_size` 1 without a process group), nothing is sent."""

    rank: int
    world_size: int
    group: Any = None

    @classmethod
    def of(cls, group: Any = None) -> Ranks:
        """Those of a process group, or of the default one, or this process alone.

        Raises RuntimeError where the launcher started several ranks and none can know of the others yet: each
        would take itself for the only one.
        """
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(group), dist.get_world_size(group), group)
        started = os.environ.get("WORLD_SIZE", "1")
        if started != "1":
            raise RuntimeError(
                f"WORLD_SIZE is {started}, but this process has no process group yet; call "
                "torch.distributed.init_process_group first, or pass rank and world_size where they are "
                "taken."
            )
        return cls(0, 1)

    def gather(self, mine: T) -> list[T]:
        """What each rank has brought, by rank. Ends when all have: a barrier with something to carry."""
        if self.world_size == 1:
            return [mine]
        brought: list[Any] = [None] * self.world_size
        dist.all_gather_object(brought, mine, group=self.group)
        return brought
