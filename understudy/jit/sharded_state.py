"""The state of sharded modules and optimizers as what this rank has of it: plain tensors, and no collective.

`state_dict()` of FSDP2 and tensor parallelism answers with DTensors. Saved as they are, they need the process
groups of the job that saved them when they are read, and code that is unpickled. Here each one becomes its
local tensor, with a record of which part of the whole that is; when it is loaded, the record has to be that
of the tensor that takes it, so that another mesh is refused and never loaded as if it were the same.

Replicas answer with the same bytes: nothing in a record tells them apart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from .identity import JitError, shown

_LOCAL, _RECORD = "understudy.local", "understudy.part"
Record = dict[str, Any]
"""shape: of the whole; axes: [name, size, coordinate] of each dimension of the mesh that shards; placements:
a list for each dimension of the mesh, of which those that replicate need not be of the size they were."""


def local_state(parts: Mapping[str, Any]) -> dict[str, Any]:
    """`state_dict()` of each part, with local tensors in place of DTensors; `torch.save` it.

    Raises JitError for a DTensor that is a sum which was not taken (Partial), and for what FSDP1 has wrapped,
    whose state_dict calls collectives.
    """
    for name, part in parts.items():
        _refuse_fsdp1(name, part)
    with torch.no_grad():
        return {name: _localized(part.state_dict(), name) for name, part in parts.items()}


def load_local_state(state: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """What `local_state` has answered, into parts of the same names that are sharded as those were.

    Calls no collective. Raises JitError for another mesh, another sharding, and parts that lack; nothing is
    changed then.
    """
    if lacks := sorted(set(parts) - set(state)):
        raise JitError(f"The state has no part {shown(lacks[0])!r}, only {', '.join(map(shown, state))}.")
    with torch.no_grad():
        rebuilt = {name: _rebuilt(state[name], name, _References(part)) for name, part in parts.items()}
    for name, part in parts.items():
        part.load_state_dict(rebuilt[name])


class _References:
    """What a value of a part's state is to be like: a DTensor, a plain tensor, or nothing that is known."""

    def __init__(self, part: Any) -> None:
        self._parameters: list[Any] | None = None
        self._tree: Any = None
        if isinstance(part, torch.optim.Optimizer):
            self._parameters = [one for group in part.param_groups for one in group["params"]]
        elif isinstance(part, torch.nn.Module):
            self._tree = part.state_dict()

    def at(self, path: tuple[Any, ...]) -> Any:
        """`path`: of keys. Of an optimizer's state the parameter that it belongs to."""
        if self._parameters is not None:
            at = path[1] if len(path) > 2 and path[0] == "state" else None
            known = isinstance(at, int) and at < len(self._parameters)
            return self._parameters[at] if known else None  # type: ignore[index]
        return self._tree.get(path[0]) if self._tree is not None and len(path) == 1 else None

    @property
    def of_optimizer(self) -> bool:
        return self._parameters is not None


def _localized(value: Any, name: str) -> Any:
    if _is_dtensor(value):
        return {_LOCAL: _alone(value.to_local()), _RECORD: _record(value, name)}
    if isinstance(value, dict):
        return _like(value, {key: _localized(one, f"{name}.{key}") for key, one in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_localized(one, f"{name}.{at}") for at, one in enumerate(value))
    return value


def _rebuilt(value: Any, name: str, references: _References, path: tuple[Any, ...] = ()) -> Any:
    here = ".".join(map(str, (name, *path)))
    if isinstance(value, dict) and set(value) == {_LOCAL, _RECORD}:
        return _dtensor(value[_LOCAL], value[_RECORD], references, path, here)
    if isinstance(value, dict):
        rebuilt = {key: _rebuilt(one, name, references, (*path, key)) for key, one in value.items()}
        return _like(value, rebuilt)
    if type(value) in (list, tuple):
        return type(value)(_rebuilt(one, name, references, (*path, at)) for at, one in enumerate(value))
    if isinstance(value, torch.Tensor) and not references.of_optimizer and _is_dtensor(references.at(path)):
        raise JitError(f"{here} was saved whole, and is sharded now; load it before it is sharded.")
    return value


def _like(value: Any, made: dict[Any, Any]) -> Any:
    """A module's state_dict has the versions of its modules as an attribute."""
    if not isinstance(value, OrderedDict):
        return made
    ordered = OrderedDict(made)
    if (metadata := getattr(value, "_metadata", None)) is not None:
        ordered._metadata = metadata  # type: ignore[attr-defined]
    return ordered


def _dtensor(
    local: torch.Tensor, record: Record, references: _References, path: tuple[Any, ...], name: str
) -> Any:
    """Raises JitError where what takes it is not spread as the record says."""
    from torch.distributed.tensor import DTensor

    like = references.at(path)
    if not _is_dtensor(like):
        raise JitError(f"{name} was saved as {_told(record)}, and is not sharded now; shard it as it was.")
    mesh = like.device_mesh
    placements = [_placement(one) for one in record["placements"]]
    shape = torch.Size(record["shape"])
    if len(placements) != mesh.ndim or _axes(mesh, placements) != record["axes"]:
        raise JitError(
            f"{name} was saved as {_told(record)}, and is {_told(_record(like, name))} now; go on with the "
            "mesh and the sharding that it was saved with."
        )
    if not references.of_optimizer and (shape, local.shape) != (like.shape, like.to_local().shape):
        raise JitError(f"{name} was saved as {_told(record)}, and has another size now: {tuple(like.shape)}.")
    stride = like.stride() if shape == like.shape else torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local.to(like.device), mesh, placements, run_check=False, shape=shape, stride=stride
    )


def _record(tensor: Any, name: str) -> Record:
    mesh = tensor.device_mesh
    return {
        "shape": list(tensor.shape),
        "axes": _axes(mesh, tensor.placements),
        "placements": [_described(one, name) for one in tensor.placements],
    }


def _axes(mesh: Any, placements: Any) -> list[list[Any]]:
    names = mesh.mesh_dim_names or tuple(str(at) for at in range(mesh.ndim))
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise JitError("This rank is none of the mesh that its parameters are on.")
    return [
        [names[at], mesh.size(at), coordinate[at]]
        for at, one in enumerate(placements)
        if not one.is_replicate()
    ]


def _described(placement: Any, name: str) -> list[Any]:
    from torch.distributed.tensor import Shard

    if placement.is_replicate():
        return ["replicate"]
    if (factor := getattr(placement, "split_factor", None)) is not None:
        return ["strided shard", placement.dim, factor]
    if isinstance(placement, Shard):
        return ["shard", placement.dim]
    raise JitError(
        f"{name} is {placement}, which is no part of a tensor; redistribute it before it is saved."
    )


def _placement(described: Any) -> Any:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    match described:
        case ["replicate"]:
            return Replicate()
        case ["shard", int(dim)]:
            return Shard(dim)
        case ["strided shard", int(dim), int(factor)]:
            return _StridedShard(dim, split_factor=factor)
    raise JitError(f"The state has a placement that this version does not know: {described!r:.60}.")


def _told(record: Record) -> str:
    """For people."""
    places = [f"{size} along {name}, number {at}" for name, size, at in record["axes"]]
    shape = "×".join(map(str, record["shape"]))
    return f"one of {' and of '.join(places)} of {shape}" if places else f"a whole of {shape}"


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Without the rest of a larger buffer, which torch.save would write with it."""
    wait = getattr(tensor, "wait", None)  # a collective of the past that nobody has asked for yet
    tensor = (wait() if callable(wait) else tensor).detach()
    has_more = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return tensor.clone() if has_more else tensor


def _is_dtensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh") and hasattr(value, "to_local")


def _refuse_fsdp1(name: str, part: Any) -> None:
    modules = part.modules() if isinstance(part, torch.nn.Module) else ()
    if any(type(one).__name__ == "FullyShardedDataParallel" for one in modules):
        raise JitError(
            f"{name} is wrapped by FullyShardedDataParallel (FSDP1), whose state_dict calls collectives; use "
            "fully_shard (FSDP2)."
        )
