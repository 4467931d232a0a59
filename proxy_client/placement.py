"""Which rank of how many this worker is, however it was started.

proxyd knows sessions by rank, and a session opens at the first use of the device: with torchrun that is after
RANK was set, but a script that starts its ranks itself may tell nobody but init_process_group.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """One rank of a world; ranks count from 0."""

    rank: int
    world: int


_of_group: Placement | None = None


def learn_from_group(rank: int, world: int) -> None:
    """The first process group of a worker spans all of them; what later ones say is not looked at."""
    global _of_group
    if _of_group is None:
        _of_group = Placement(rank, world)


def current(device_index: int, device_count: int) -> Placement:
    """The placement of this process, which is about to use `device_index` of `device_count` devices.

    Raises RuntimeError if the launcher's variables make no sense.
    """
    return (
        _of_group
        or _of_default_group()
        or _of_launcher(os.environ)
        or _of_started_process(multiprocessing.parent_process() is not None, device_index, device_count)
    )


def _of_default_group() -> Placement | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return Placement(distributed.get_rank(), distributed.get_world_size())


def _of_launcher(variables: Mapping[str, str]) -> Placement | None:
    """torchrun sets RANK; lightning's launcher sets only LOCAL_RANK, which is the same on one host."""
    rank = variables.get("RANK") or variables.get("LOCAL_RANK")
    if rank is None:
        return None
    world = variables.get("WORLD_SIZE", "1")
    if not (rank.isascii() and rank.isdigit() and world.isascii() and world.isdigit()):
        raise RuntimeError(
            f"rank {rank!r} of {world!r} is not possible: RANK (or LOCAL_RANK) and WORLD_SIZE must be whole "
            "numbers, as torchrun sets them"
        )
    return Placement(int(rank), int(world))


def _of_started_process(is_child: bool, device_index: int, device_count: int) -> Placement:
    """A script that starts its ranks with multiprocessing gives each the device of its number."""
    if is_child and device_count > 1:
        return Placement(device_index, device_count)
    return Placement(0, 1)
