"""What a loader is, as far as it says which of its samples may come twice, and which belong to which rank."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

DEEPEST = 8
"""Samplers that wrap one another."""


@dataclass(frozen=True)
class Share:
    """Which positions of all ranks' order are one rank's: `chunk` at a time, in turns, from `skipped` on."""

    replicas: int
    replica: int
    chunk: int
    skipped: int = 0


def facts_of(loader: Any) -> dict[str, Any]:
    """As plain numbers and texts."""
    samplers = list(samplers_of(loader))
    dataset = getattr(loader, "dataset", None)
    share = _share(samplers)
    resumable = resumable_sampler(samplers)
    return {
        "class": name_of(type(loader)),
        "samplers": [name_of(type(one)) for one in samplers],
        "dataset_size": None if _is_iterable(dataset) else _size(dataset),
        "batch_size": _number(getattr(loader, "batch_size", None)),
        "share": None if share is None else asdict(share),
        "may_repeat": any(_may_repeat(one) for one in samplers),
        "plan": None if resumable is None else resumable.plan.as_fields(),
    }


def samplers_of(loader: Any) -> Iterator[Any]:
    """From the one that the loader asks to the innermost."""
    one = getattr(loader, "batch_sampler", None)
    one = getattr(loader, "sampler", None) if one is None else one
    for _ in range(DEEPEST):
        if one is None:
            return
        yield one
        inner = getattr(one, "batch_sampler", None)
        one = getattr(one, "sampler", None) if inner is None else inner


def resumable_sampler(samplers: list[Any]) -> Any:
    """Ours (understudy.data), which says where it is; None: there is none."""
    for one in samplers:
        if name_of(type(one)) == "understudy.data.sampler.ResumableSampler":
            return one
    return None


def name_of(kind: type) -> str:
    """With its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _share(samplers: list[Any]) -> Share | None:
    data = sys.modules.get("torch.utils.data")
    for place, one in enumerate(samplers):
        name = name_of(type(one))
        if name == "accelerate.data_loader.BatchSamplerShard":
            batch = _number(one.batch_size) or 1
            chunk = batch // one.num_processes if one.split_batches else batch
            return Share(one.num_processes, one.process_index, chunk, _skipped(samplers[:place]) * chunk)
        if data is not None and isinstance(one, data.DistributedSampler):
            size = next((_number(getattr(outer, "batch_size", None)) for outer in samplers[:place]), None)
            return Share(one.num_replicas, one.rank, 1, _skipped(samplers[:place]) * (size or 1))
    return None


def _skipped(samplers: list[Any]) -> int:
    """Batches that a resumed loop leaves out (accelerate's `skip_first_batches`)."""
    return sum(_number(getattr(one, "skip_batches", None)) or 0 for one in samplers)


def _may_repeat(sampler: Any) -> bool:
    """Whether it is made to draw a sample again within an epoch."""
    data = sys.modules.get("torch.utils.data")
    if data is None:
        return False
    if isinstance(sampler, (data.RandomSampler, data.WeightedRandomSampler)) and sampler.replacement:
        return True
    if not isinstance(sampler, data.RandomSampler):
        return False
    size = _size(sampler.data_source)
    return size is not None and sampler.num_samples > size


def _is_iterable(dataset: Any) -> bool:
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(dataset, data.IterableDataset)


def _size(of: Any) -> int | None:
    with contextlib.suppress(Exception):  # anybody's code
        return len(of)
    return None


def _number(value: Any) -> int | None:
    return value if type(value) is int else None
