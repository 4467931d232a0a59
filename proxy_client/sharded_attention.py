"""How attention of DTensors is sharded: PyTorch knows it of CUDA's operators, and the CPU has another one."""

from __future__ import annotations

from types import ModuleType
from typing import Any

BATCH, HEADS = 0, 1
"""Dimensions of query, key, value and mask along which attention is independent."""
NO_RING = (
    "context_parallel computes attention by CUDA's flash, efficient and cuDNN operators; device servers of "
    "the cpu driver have the CPU's operator, for which PyTorch has no ring attention: use --devices cuda:N"
)


def install(tensor: ModuleType) -> None:
    """Registers the CPU's operators with DTensor, when a script imports `torch.distributed.tensor`."""
    import torch
    from torch.distributed.tensor.experimental import register_sharding

    def along(dimension: int, like: Any) -> Any:
        """One of `like`'s dimensions is split, if it has as many entries as the others' (a mask may not)."""
        broadcast = like.ndim != 4 or like.shape[dimension] == 1
        return tensor.Replicate() if broadcast else tensor.Shard(dimension)

    def placements(results: int, tensors: int, numbers: int, mask: Any) -> list[tuple[Any, Any]]:
        """For each way to split: placements of the results, and of all arguments."""
        masks = [] if mask is None else [mask]
        whole = tensor.Replicate()
        ways = [([whole] * results, [*[whole] * tensors, *[None] * numbers, *[whole for _ in masks]])]
        for dimension in (BATCH, HEADS):
            split = tensor.Shard(dimension)
            arguments = [*[split] * tensors, *[None] * numbers, *[along(dimension, m) for m in masks]]
            ways.append(([split] * results, arguments))
        return ways

    @register_sharding(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
    def forward(
        query: Any, key: Any, value: Any, *numbers: Any, attn_mask: Any = None, scale: float | None = None
    ) -> list[tuple[Any, Any]]:
        return placements(2, 3, len(numbers), attn_mask)

    @register_sharding(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    def backward(*given: Any, attn_mask: Any = None, scale: float | None = None) -> list[tuple[Any, Any]]:
        return placements(3, 6, len(given) - 6, attn_mask)

    _refuse_context_parallel(torch.ops.aten)


def _refuse_context_parallel(aten: Any) -> None:
    """As PyTorch does on the CPU, whose operators it knows no way to shard there.

    By the ways above the sequence would be gathered: each rank would get the attention of all of it.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention

    def refuse(operator: Any, arguments: Any, keywords: Any) -> Any:
        raise NotImplementedError(NO_RING)

    for name in ("", "_backward"):
        operator = getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{name}").default
        _attention.custom_ops.setdefault(operator, refuse)
