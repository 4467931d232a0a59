"""Whether anybody else has what a rank has: what sharded parameters and names of shards say of it.

A save needs a replica of each shard that is left (paper 001 §3.1: FSDP with hybrid sharding). Where there is
none, that is told before anything has happened; and ranks that have different parts must not call them by one
name, or the part of one would be given to the other.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .assembly import listed
from .identity import Identity, JitError, shown

_WHAT_TO_DO = "save periodic checkpoints too, and tell jit.saved of them."


@dataclass(frozen=True)
class Spread:
    """How something is spread over ranks, as one of them sees it."""

    what: str
    """As the subject of a sentence, with how it is spread."""
    elsewhere: frozenset[int]
    """Ranks that have other parts of it."""
    alike: frozenset[int]
    """Ranks that are known to have the same part, this one included."""


def warn_without_replica(replica_group: Any) -> bool:
    """A state that one rank alone has dies with it. Whether that was told."""
    import torch.distributed as dist

    up = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size() if up else int(os.environ.get("WORLD_SIZE", "1") or 1)
    members = dist.get_world_size(replica_group) if up else world
    if members == 1:
        who = "this rank alone" if world > 1 else "one process alone"
        warnings.warn(
            f"Nothing to save from: {who} has this state (ZeRO, FSDP without replicas, one rank), so that it "
            f"is lost when the rank is killed; {_WHAT_TO_DO}",
            stacklevel=3,
        )
    return members == 1


def complaint(spread: Spread, who: Identity, shards: Mapping[int, str]) -> str | None:
    """Ranks with other parts whose shard has this rank's name, as a sentence. `shards`: names by rank."""
    same = sorted(rank for rank in spread.elsewhere if shards.get(rank) == who.shard)
    if not same:
        return None
    none = "Nothing to save from: " if len(spread.elsewhere) == who.world_size - 1 else ""
    return (
        f"{none}{spread.what}; rank {listed(same)} has another part of it than rank {who.rank}, and both are "
        f"named {shown(who.shard)!r}: give jit.init a shard= that is the same for those who have the same "
        "part, and for no one else (for a mesh: its coordinate in each dimension that shards)."
    )


def lonely(who: Identity, shards: Mapping[int, str], spreads: Iterable[Spread]) -> str | None:
    """That nobody else has this rank's shard, as a sentence; None if somebody has."""
    if any(shards.get(rank) == who.shard for rank in range(who.world_size) if rank != who.rank):
        return None
    why = next((f" ({one.what})" for one in spreads if one.alike == {who.rank}), "")
    return (
        f"Nothing to save from: no other rank has the shard {shown(who.shard)!r} of rank {who.rank}{why}, so "
        f"that it is lost when this rank is killed; replicate (hybrid sharding), or {_WHAT_TO_DO}"
    )


def warning(spreads: Sequence[Spread], who: Identity, shards: Mapping[int, str]) -> str | None:
    """What is wrong with what optimizers of this process change, if it is they that train."""
    found = (complaint(one, who, shards) for one in spreads)
    return next((one for one in found if one is not None), None) or lonely(who, shards, spreads)


def check(spreads: Iterable[Spread], who: Identity, shards: Mapping[int, str]) -> None:
    """Raises JitError where one name stands for several parts of what optimizers change."""
    for spread in spreads:
        if (sentence := complaint(spread, who, shards)) is not None:
            raise JitError(sentence)


def optimizers_now() -> list[Any]:
    """All that this process has made, by a pass over all objects."""
    from torch.optim import Optimizer

    return [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]


def spreads_of(optimizers: Iterable[Any]) -> list[Spread]:
    """Of ZeroRedundancyOptimizer's state, and of parameters that are sharded DTensors, one of each kind."""
    found: dict[frozenset[int], Spread] = {}
    for optimizer in optimizers:
        for spread in (*_of_zero(optimizer), *_of_parameters(optimizer)):
            found.setdefault(spread.elsewhere, spread)
    return list(found.values())


def _of_zero(optimizer: Any) -> Iterator[Spread]:
    if not any(one.__name__ == "ZeroRedundancyOptimizer" for one in type(optimizer).__mro__):
        return
    import torch.distributed as dist

    ranks, me = dist.get_process_group_ranks(optimizer.process_group), dist.get_rank()
    if len(ranks) > 1:
        what = f"the state of ZeroRedundancyOptimizer is sharded over {len(ranks)} ranks"
        yield Spread(what, frozenset(ranks) - {me}, frozenset({me}))


def _of_parameters(optimizer: Any) -> Iterator[Spread]:
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor

    known = set()
    for group in getattr(optimizer, "param_groups", ()):  # one that is half made has none
        for parameter in group["params"]:
            if not isinstance(parameter, DTensor):
                continue
            kind = (parameter.device_mesh, parameter.placements)
            if kind not in known:
                known.add(kind)
                yield from _of_mesh(*kind)


def _of_mesh(mesh: Any, placements: Any) -> Iterator[Spread]:
    coordinate = mesh.get_coordinate()
    axes = [at for at, one in enumerate(placements) if not one.is_replicate() and mesh.size(at) > 1]
    if coordinate is None or not axes:
        return
    everyone, part = mesh.mesh, mesh.mesh
    for axis in axes:  # of all ranks, those at this one's place along what shards
        part = part.narrow(axis, coordinate[axis], 1)
    alike = frozenset(part.flatten().tolist())
    names = mesh.mesh_dim_names or tuple(str(at) for at in range(mesh.ndim))
    over = " and ".join(f"{names[at]} ({mesh.size(at)})" for at in axes)
    what = f"parameters are sharded over the mesh's {over}"
    yield Spread(what, frozenset(everyone.flatten().tolist()) - alike, alike)
