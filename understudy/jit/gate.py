"""Where ranks of a job with several shards wait for one another, before any of them changes its parameters.

The all-reduce of gradients is a barrier between the replicas of one shard, and of no other (paper 001 §3.3
looks at one shard). A rank that dies in front of it, but behind its last collective with other shards, keeps
its own shard's replicas at step i while those of the others come to i + 1, and then no step has all shards.
With the gate, for a step that takes the state from i to i + 1:

    in front of it   a rank has the state of step i, and nobody has that of i + 1: nobody passes before all
                     have come
    at the gate      a rank has the state of step i, and its reduced gradients. If the gate breaks, it saves
                     step i, does the step to its end alone, and saves i + 1 as well
    behind it        a rank will have the state of i + 1; all others have come to the gate at least

So there is a step that all who are left have saved, wherever the fault lies, and nobody has to know where the
others are. A job whose ranks all have the same shard needs none of this: any replica will do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch

from .identity import Identity, JitError, one_line
from .watchdog import shortest_timeout

_LOOK = timedelta(seconds=0.2)
"""How long one wait lasts; between two of them signals are handled, and it is seen whether to wait on."""
_calls = 0
"""Of `for_job`, as many on all ranks."""


class Gate:
    """A collective of one byte over all ranks, in a group of its own. Entered by the training thread."""

    def __init__(self, group: Any, shards: Mapping[int, str]) -> None:
        """`shards`: the name of each rank's."""
        self.shards = shards
        self._group = group
        self._byte = torch.zeros(1, dtype=torch.uint8)

    def passed(self, interrupted: Callable[[], bool]) -> bool:
        """Waits until all ranks have come. False: `interrupted()` came first.

        Raises RuntimeError when the collective fails, because a rank is dead.
        """
        import torch.distributed as dist

        work = dist.all_reduce(self._byte, group=self._group, async_op=True)
        while not interrupted():
            try:
                work.wait(_LOOK)
                return True
            except RuntimeError:
                if work.is_completed():  # it has failed; else only the wait is over
                    raise
        return False

    def close(self) -> None:
        """The group is given up, unless the script has ended all groups."""
        import torch.distributed as dist

        if dist.is_initialized() and self._group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(self._group)


def for_job(identity: Identity) -> Gate | None:
    """None for a job of one shard, or without a process group. All ranks call it, and wait for one another.

    Raises JitError where some do not come.
    """
    global _calls
    import torch.distributed as dist

    if identity.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return None
    _calls += 1
    prefix = f"understudy.jit/shards/{identity.attempt}/{_calls}"
    store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
    first = store.compare_set("first", "", identity.shard).decode()
    if first != identity.shard:
        store.set("several", "yes")
    if store.add("arrived", 1) == identity.world_size:
        store.set("all", "yes")
    try:
        store.wait(["all"])
    except RuntimeError as error:
        raise JitError(
            f"Rank {identity.rank} has waited in jit.init for other ranks, of which not all have come; call "
            f"it on all ranks ({one_line(str(error))})."
        ) from error
    if store.compare_set("several", "", "no") != b"yes":
        return None
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=shortest_timeout()))
    names: list[Any] = [None] * identity.world_size
    dist.all_gather_object(names, identity.shard, group=group)
    return Gate(group, dict(enumerate(names)))
