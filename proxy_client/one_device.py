"""Moving tensors between the devices of a process, as nn.DataParallel does: with one device, next to nothing.

A CPU build of PyTorch lacks these functions of `torch._C`; what they do for one device is done here.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from understudy.proxy_client.refusals import Refusal


def _device(index: int) -> Any:
    import torch

    return torch.device("cuda", index) if index >= 0 else torch.device("cpu")


def _scatter(refusal: Refusal) -> Callable[..., Any]:
    def scatter(tensor: Any, devices: Sequence[int], *_: Any) -> list[Any]:
        if len(devices) > 1:
            refusal.refuse()
        return [tensor.to(_device(index), non_blocking=True) for index in devices]

    return scatter


def _gather(refusal: Refusal) -> Callable[..., Any]:
    def gather(tensors: Sequence[Any], dim: int, destination: int | None = None) -> Any:
        import torch

        if len({tensor.device for tensor in tensors}) > 1:
            refusal.refuse()
        gathered = torch.cat(list(tensors), dim)
        return gathered if destination is None else gathered.to(_device(destination))

    return gather


def _broadcast(refusal: Refusal) -> Callable[..., Any]:
    def broadcast(tensor: Any, devices: Sequence[int]) -> list[Any]:
        if len(devices) > 1:
            refusal.refuse()
        return [tensor.to(_device(index)) for index in devices]

    return broadcast


def _broadcast_coalesced(refusal: Refusal) -> Callable[..., Any]:
    one_tensor = _broadcast(refusal)

    def broadcast_coalesced(tensors: Sequence[Any], devices: Sequence[int], buffer_size: int) -> list[Any]:
        columns = [one_tensor(tensor, devices) for tensor in tensors]
        return [[column[i] for column in columns] for i in range(len(devices))]

    return broadcast_coalesced


def _into_given(refusal: Refusal) -> Callable[..., Any]:
    def copy_parts(tensor: Any, out: Sequence[Any], *_: Any) -> Any:
        if len(out) > 1:
            refusal.refuse()
        out[0].copy_(tensor)
        return out

    return copy_parts


def _gather_out(refusal: Refusal) -> Callable[..., Any]:
    gather = _gather(refusal)

    def gather_out(tensors: Sequence[Any], out: Any, dim: int) -> Any:
        return out.copy_(gather(tensors, dim))

    return gather_out


FUNCTIONS: dict[str, Callable[[Refusal], Callable[..., Any]]] = {
    "_scatter": _scatter,
    "_scatter_out": _into_given,
    "_gather": _gather,
    "_gather_out": _gather_out,
    "_broadcast": _broadcast,
    "_broadcast_out": _into_given,
    "_broadcast_coalesced": _broadcast_coalesced,
}
"""By their name in `torch._C`; each is made for the row that refuses several devices."""


def install_late() -> None:
    """nn.DataParallel over "all devices", as Trainer and others wrap a model by themselves: over one.

    The process may see several: a script that starts its ranks itself counts them first.
    """
    module = sys.modules["torch.nn.parallel.data_parallel"]
    vars(module)["_get_all_device_indices"] = _the_one_device


def _the_one_device() -> list[int]:
    import torch

    if torch.cuda.device_count() > 1:
        _say_so()
    return [torch.cuda.current_device()]


@functools.cache  # once
def _say_so() -> None:
    warnings.warn(
        "nn.DataParallel: a worker process has one device, so the batch is not split; for more devices "
        "start one process per device (torchrun --nproc-per-node N)",
        UserWarning,
        stacklevel=4,
    )
