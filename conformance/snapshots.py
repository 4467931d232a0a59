"""Arguments of a call, kept apart from the tensors they were made of, and built again on any device.

What is built has the storages, strides, offsets, sharing and bits of the original. Both sides of a comparison
are built this way, the one on the CPU too, so that neither has an advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_COMPRESSED = {
    torch.sparse_csr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_bsr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_csc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
    torch.sparse_bsc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}
_DEVICE_NAMES = ("cpu", "cpu:0")


class CannotCopy(Exception):
    """A tensor of a kind that has no copy on another device here; the text names the kind."""


@dataclass(frozen=True, eq=False)
class _Strided:
    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool
    requires_grad: bool
    parameter: bool
    stays: bool


@dataclass(frozen=True, eq=False)
class _Sparse:
    layout: torch.layout
    parts: tuple[_Strided, ...]
    size: tuple[int, ...]
    coalesced: bool
    requires_grad: bool


@dataclass(frozen=True, eq=False)
class _Generator:
    state: torch.Tensor


@dataclass(frozen=True)
class _Device:
    as_string: bool


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value` with `function` applied to everything in it that is no container."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(item, function) for item in value))
    if type(value) in (tuple, list):
        return type(value)(map_leaves(item, function) for item in value)
    if type(value) is dict:
        return {key: map_leaves(item, function) for key, item in value.items()}
    if type(value) is slice:
        return slice(*(map_leaves(part, function) for part in (value.start, value.stop, value.step)))
    return function(value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a structure, each once, in order."""
    found: dict[int, torch.Tensor] = {}

    def take(leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor):
            found.setdefault(id(leaf), leaf)

    map_leaves(value, take)
    return list(found.values())


class Snapshot:
    """Raises CannotCopy for what it cannot hold. Tensors in `stays` are built on the CPU in any case."""

    def __init__(self, value: Any, stays: Any = ()) -> None:
        self._stays = {id(tensor) for tensor in tensors_in(stays)}
        self._contents: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        self._recipes: dict[int, Any] = {}
        self._alive = value  # addresses below identify its tensors
        self._value = map_leaves(value, self._recipe)
        self.has_sparse = any(isinstance(recipe, _Sparse) for recipe in self._recipes.values())
        del self._alive

    def build(self, device: str, *, requires_grad: bool = True) -> Any:
        """The value again, on `device`; without `requires_grad` none of its tensors asks for a gradient."""
        storages: dict[tuple[int, str], torch.UntypedStorage] = {}
        made: dict[int, torch.Tensor] = {}

        def storage(number: int, where: str) -> torch.UntypedStorage:
            if (number, where) not in storages:
                content = self._contents[number]
                fresh = torch.empty(content.numel(), dtype=torch.uint8, device=where)
                storages[number, where] = fresh.copy_(content).untyped_storage()
            return storages[number, where]

        def strided(recipe: _Strided) -> torch.Tensor:
            where = "cpu" if recipe.stays else device
            tensor = torch.empty(0, dtype=recipe.dtype, device=where)
            tensor.set_(storage(recipe.storage, where), recipe.offset, recipe.size, recipe.stride)
            if recipe.conjugated:
                tensor = tensor.conj()
            if recipe.negated:
                tensor = torch._neg_view(tensor)
            return torch.nn.Parameter(tensor, requires_grad=False) if recipe.parameter else tensor

        def sparse(recipe: _Sparse) -> torch.Tensor:
            parts = [strided(part) for part in recipe.parts]
            if recipe.layout is torch.sparse_coo:
                return torch.sparse_coo_tensor(
                    *parts, recipe.size, is_coalesced=recipe.coalesced, check_invariants=False
                )
            return torch.sparse_compressed_tensor(
                *parts, recipe.size, layout=recipe.layout, check_invariants=False
            )

        def leaf(recipe: Any) -> Any:
            if isinstance(recipe, _Strided | _Sparse):
                if id(recipe) not in made:
                    tensor = strided(recipe) if isinstance(recipe, _Strided) else sparse(recipe)
                    made[id(recipe)] = tensor.requires_grad_(recipe.requires_grad and requires_grad)
                return made[id(recipe)]
            if isinstance(recipe, _Generator):
                generator = torch.Generator(device)
                generator.set_state(recipe.state)
                return generator
            if isinstance(recipe, _Device):
                return device if recipe.as_string else torch.device(device)
            return recipe

        with torch.no_grad():
            return map_leaves(self._value, leaf)

    def _recipe(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in self._recipes:
                self._recipes[id(leaf)] = self._tensor(leaf)
            return self._recipes[id(leaf)]
        if isinstance(leaf, torch.Generator):
            return _Generator(leaf.get_state())
        if isinstance(leaf, torch.device) and leaf.type == "cpu":
            return _Device(as_string=False)
        if isinstance(leaf, str) and leaf in _DEVICE_NAMES:
            return _Device(as_string=True)
        return leaf

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise CannotCopy(f"tensors of class {type(tensor).__name__}")
        if tensor.is_quantized or tensor.is_nested or tensor.is_mkldnn:
            raise CannotCopy("quantized, nested and MKL-DNN tensors")
        if not tensor.is_cpu:
            return tensor
        if tensor.layout is torch.strided:
            return self._strided(tensor)
        detached = tensor.detach()
        parts: tuple[torch.Tensor, ...]
        if tensor.layout is torch.sparse_coo:
            parts = (detached._indices(), detached._values())
        else:
            first, second = _COMPRESSED[tensor.layout]
            parts = (first(detached), second(detached), detached.values())
        recipes = tuple(self._strided(part) for part in parts)
        coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
        return _Sparse(tensor.layout, recipes, tuple(tensor.shape), coalesced, tensor.requires_grad)

    def _strided(self, tensor: torch.Tensor) -> _Strided:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._contents)
            whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
            self._contents.append(whole.clone())
        return _Strided(
            storage=self._numbers[storage._cdata],
            dtype=tensor.dtype,
            size=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
            conjugated=tensor.is_conj(),
            negated=tensor.is_neg(),
            requires_grad=tensor.requires_grad,
            parameter=isinstance(tensor, torch.nn.Parameter),
            stays=id(tensor) in self._stays,
        )
