"""Samples with sparse inputs. Most entries that announce a sparse layout bring none: then their dense ones,
with zeros put in, are converted."""

from __future__ import annotations

import unittest
from typing import Any

import torch

_ZERO_EVERY = 3
_BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)


def sparse_samples(op: Any, layout: torch.layout, dtype: torch.dtype) -> list[Any]:
    """The entry's own samples of this layout, or converted ones; empty if it does not support the layout."""
    if not op.supports_sparse_layout(layout):
        return []
    try:
        return list(op.sample_inputs_sparse(layout, "cpu", dtype, requires_grad=False))
    except (NotImplementedError, unittest.SkipTest):
        dense = list(op.sample_inputs("cpu", dtype, requires_grad=False))
    except Exception:  # noqa: BLE001 - a few fail while they make their samples
        return []
    return [converted for sample in dense for converted in _converted(sample, layout)]


def _converted(sample: Any, layout: torch.layout) -> list[Any]:
    """Of a sample whose one tensor is its input."""
    tensor, others = sample.input, [*sample.args, *sample.kwargs.values()]
    if not isinstance(tensor, torch.Tensor) or any(isinstance(other, torch.Tensor) for other in others):
        return []
    with_zeros = tensor.detach().clone(memory_format=torch.contiguous_format)
    with_zeros.view(-1)[::_ZERO_EVERY] = 0
    if layout is torch.sparse_coo:
        if tensor.dim() == 0:
            return []
        once = with_zeros.to_sparse()
        inputs = [once, _uncoalesced(once)]
        if tensor.dim() > 1:
            inputs.append(with_zeros.to_sparse(1))
    elif tensor.dim() == 2 and tensor.numel() != 0:
        inputs = [with_zeros.to_sparse(layout=layout, blocksize=(1, 1) if layout in _BLOCKED else None)]
    else:
        return []
    make = type(sample)  # not imported: databases.load() must be the first to import from torch.testing
    return [make(each, args=sample.args, kwargs=sample.kwargs) for each in inputs]


def _uncoalesced(tensor: torch.Tensor) -> torch.Tensor:
    """Every element twice."""
    indices, values = tensor._indices(), tensor._values()
    return torch.sparse_coo_tensor(
        torch.cat([indices, indices], 1), torch.cat([values, values], 0), tensor.shape
    )
