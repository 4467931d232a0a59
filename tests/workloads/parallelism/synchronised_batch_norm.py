"""SyncBatchNorm. PyTorch refuses it on the CPU, for want of six kernels that only CUDA has.

The native reference is PyTorch's own autograd function, with these kernels written here as what they are
documented to compute; that this is batch normalisation over the whole batch is checked against BatchNorm.
"""

from typing import Any

import torch
import torch.distributed as dist
from scenario import Run, scenario
from torch import nn
from torch.nn.modules._functions import SyncBatchNorm as SyncBatchNormFunction
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

_kept: list[torch.library.Library] = []


def _wide(numbers: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return numbers.reshape([1, -1] + [1] * (like.dim() - 2))


def _dimensions(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _stats(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    mean = x.mean(_dimensions(x))
    variance = (x - _wide(mean, x)).square().mean(_dimensions(x))
    return mean, (variance + eps).rsqrt()


def _gather_stats(
    x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, running_mean: torch.Tensor,
    running_var: torch.Tensor, momentum: float, eps: float, counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    counts = counts.reshape(-1, 1)
    total = counts.sum()
    common = (mean * counts).sum(0) / total
    squares = ((invstd.square().reciprocal() - eps + (mean - common).square()) * counts).sum(0)
    running_mean.mul_(1 - momentum).add_(common, alpha=momentum)
    running_var.mul_(1 - momentum).add_(squares / (total - 1), alpha=momentum)
    return common, (squares / total + eps).rsqrt()


def _elementwise(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor,
    _: float,
) -> torch.Tensor:  # fmt: skip
    return (x - _wide(mean, x)) * _wide(invstd, x) * _wide(weight, x) + _wide(bias, x)


def _backward_reduce(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, weight: torch.Tensor,
    *_: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    sum_dy = dy.sum(_dimensions(x))
    sum_dy_xmu = (dy * (x - _wide(mean, x))).sum(_dimensions(x))
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy.clone()


def _backward_elementwise(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, weight: torch.Tensor,
    sum_dy: torch.Tensor, sum_dy_xmu: torch.Tensor, count: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    total = count.sum().to(x.dtype)
    scale = _wide(invstd, x)
    projection = _wide(sum_dy_xmu / total, x) * scale.square()
    return (dy - _wide(sum_dy / total, x) - (x - _wide(mean, x)) * projection) * scale * _wide(weight, x)


def _install_on_cpu() -> None:
    if _kept:
        return
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("batch_norm_stats", _stats)
    library.impl("batch_norm_gather_stats_with_counts", _gather_stats)
    library.impl("batch_norm_elemt", _elementwise)
    library.impl("batch_norm_backward_reduce", _backward_reduce)
    library.impl("batch_norm_backward_elemt", _backward_elementwise)
    _kept.append(library)


class _SyncBatchNormOnCpu(nn.modules.batchnorm._BatchNorm):
    """What nn.SyncBatchNorm does in training, without asking for the device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        group = dist.group.WORLD
        return SyncBatchNormFunction.apply(
            x, self.weight, self.bias, self.running_mean, self.running_var, self.eps, self.momentum, group,
            dist.get_world_size(group),
        )  # fmt: skip


def _synchronised(run: Run, channels: int, **options: Any) -> nn.Module:
    if run.device.type == "cuda":
        return nn.SyncBatchNorm(channels, **options)
    _install_on_cpu()
    return _SyncBatchNormOnCpu(channels, **options)


@scenario("data_parallel")
def sync_batch_norm(run: Run) -> None:
    network = nn.Sequential(
        nn.Conv2d(2, 4, 3), _synchronised(run, 4), nn.ReLU(), nn.Conv2d(4, 3, 3), _synchronised(run, 3)
    )
    model = DistributedDataParallel(run.place(network), **run.ddp)
    # Ranks have batches of different sizes.
    run.train(model, SGD(model.parameters(), lr=0.1), [b[: 3 + run.rank] for b in run.batches(4, 4, 2, 7, 7)])
    run.keep(*model.parameters(), *model.buffers())


@scenario("data_parallel")
def sync_batch_norm_is_batch_norm_of_the_whole_batch(run: Run) -> None:
    whole = torch.randn(2 * run.size, 3, 5, dtype=torch.float64)
    alone, together = nn.BatchNorm1d(3).double(), _synchronised(run, 3, dtype=torch.float64).to(run.device)
    mine = whole.chunk(run.size)[run.rank].to(run.device).requires_grad_()
    whole.requires_grad_()
    outputs = together(mine)
    run.mark("backward")
    (outputs**3).sum().backward()
    run.mark("end")
    (alone(whole) ** 3).sum().backward()
    assert whole.grad is not None and mine.grad is not None
    expected = [whole.grad.chunk(run.size)[run.rank], alone.running_mean, alone.running_var]
    for theirs, ours in zip(expected, [mine.grad, together.running_mean, together.running_var], strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-10, atol=1e-12)
    run.keep(outputs, mine.grad)
