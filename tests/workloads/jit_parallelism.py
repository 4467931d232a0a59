"""One small network, trained by two or four ranks: replicated, sharded, split, in stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from jit_step_places import LAYERS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

BATCH, WIDTH = 8, 12


class Net(nn.Module):
    """Linear layers; dropout behind the first and the third, which tensor parallelism splits by columns."""

    def __init__(self, first: int = 0, last: int = LAYERS) -> None:
        super().__init__()
        sizes = [6, WIDTH, WIDTH, WIDTH, WIDTH, 1]
        self.first = first
        self.layers = nn.ModuleList(nn.Linear(*sizes[at : at + 2]) for at in range(LAYERS))
        del self.layers[last:], self.layers[:first]
        self.dropout = nn.Dropout(0.1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers, self.first):
            values = layer(values)
            if number < LAYERS - 1:
                values = torch.relu(values)
            if number in (0, 2):
                values = self.dropout(values)
        return values


class Grouped(torch.optim.AdamW):
    """A group of parameters for each layer: those before it are new when one is begun."""

    def __init__(self, groups: list[dict[str, Any]], on_group: Callable[[int], None]) -> None:
        super().__init__(groups, lr=1e-2)
        self._on_group = on_group

    def _init_group(self, group: Any, *rest: Any) -> Any:
        self._on_group(next(at for at, one in enumerate(self.param_groups) if one is group))
        return super()._init_group(group, *rest)


class Job:
    """Replicated: DistributedDataParallel, a bucket for each layer or so.

    It would make other buckets behind the first step of each process, and with more than two ranks Gloo sums
    in another order then: a step that is done behind a restart would differ in its last bits. With
    `find_unused_parameters` buckets stay as they are.
    """

    shard = "0"
    replicas: Any = None

    def __init__(self) -> None:
        self.on_group: Callable[[int], None] = lambda _: None
        self.on_reduction: Callable[[], None] = lambda: None
        self.replica = dist.get_rank()
        torch.manual_seed(1)
        self.model: nn.Module = self.made()
        torch.manual_seed(2 + dist.get_rank())
        self.callable = self.wrapped()
        groups: list[dict[str, Any]] = [{"params": list(one.parameters())} for _, one in self.layers]
        self.optimizer = Grouped(groups, lambda number: self.on_group(number))
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)

    def made(self) -> nn.Module:
        return Net()

    @property
    def layers(self) -> list[tuple[int, nn.Module]]:
        """With their numbers in the whole network."""
        layers: Any = self.model.layers
        return list(enumerate(layers, self.model.first))  # type: ignore[arg-type]

    def wrapped(self) -> Callable[[torch.Tensor], torch.Tensor]:
        wrapped = nn.parallel.DistributedDataParallel(
            self.model, bucket_cap_mb=1e-5, find_unused_parameters=True  # type: ignore[arg-type]
        )  # fmt: skip

        def reduce(_, bucket):  # type: ignore[no-untyped-def]  # its annotations would have to be classes
            self.on_reduction()
            bucket.buffer().div_(dist.get_world_size())
            future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
            return future.then(lambda done: done.value()[0])

        wrapped.register_comm_hook(None, reduce)
        return wrapped

    def forward_and_backward(
        self, points: torch.Tensor, inside: torch.Tensor, reach: Callable[[str], None]
    ) -> float:
        loss = nn.functional.binary_cross_entropy_with_logits(self.callable(points), inside)
        reach("loss")
        reach("before-backward")
        loss.backward()
        self.reduce()
        return loss.item()

    def reduce(self) -> None:
        """What the backward pass has not done."""

    def reduce_by_hand(self, group: Any) -> None:
        """Each gradient for itself: one rank may be dead between two of them."""
        for parameter in self.model.parameters():
            gradient: Any = parameter.grad
            self.on_reduction()
            dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=group)


class HybridSharded(Job):
    """FSDP2: two replicas of two shards."""

    def wrapped(self) -> Callable[[torch.Tensor], torch.Tensor]:
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        for _, layer in self.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.shard, self.replicas = f"shard{mesh.get_local_rank('shard')}", mesh.get_group("replicate")
        for name in ("all_reduce", "reduce_scatter_single"):
            self._watch(name)
        return self.model

    def _watch(self, name: str) -> None:
        original = getattr(dist, name)

        def watched(*given: Any, **named: Any) -> Any:
            self.on_reduction()
            return original(*given, **named)

        setattr(dist, name, watched)


class TensorParallel(Job):
    """Two replicas of two halves of each layer."""

    def wrapped(self) -> Callable[[torch.Tensor], torch.Tensor]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
        plan = {
            f"layers.{at}": (RowwiseParallel if at % 2 else ColwiseParallel)() for at in range(LAYERS - 1)
        }
        parallelize_module(self.model, mesh["tp"], plan)
        self.shard, self.replicas = f"tp{mesh.get_local_rank('tp')}", mesh.get_group("dp")
        self.replica = mesh.get_local_rank("dp")
        return self.model

    def reduce(self) -> None:
        self.reduce_by_hand(self.replicas)


class Pipelined(Job):
    """Two replicas of two stages; one forward, one backward."""

    def made(self) -> nn.Module:
        self.mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "pp"))
        stage = self.mesh.get_local_rank("pp")
        return Net(0, 2) if stage == 0 else Net(2, LAYERS)

    def wrapped(self) -> Callable[[torch.Tensor], torch.Tensor]:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        stage = self.mesh.get_local_rank("pp")
        self.shard, self.replicas = f"pp{stage}", self.mesh.get_group("dp")
        self.replica = self.mesh.get_local_rank("dp")
        made = PipelineStage(self.model, stage, 2, torch.device("cpu"), group=self.mesh.get_group("pp"))
        self._last = stage == 1
        self._schedule = Schedule1F1B(
            made, n_microbatches=2, loss_fn=nn.functional.binary_cross_entropy_with_logits
        )
        return self.model

    def forward_and_backward(
        self, points: torch.Tensor, inside: torch.Tensor, reach: Callable[[str], None]
    ) -> float:
        losses: list[torch.Tensor] = []
        if self._last:
            self._schedule.step(target=inside, losses=losses)
        else:
            self._schedule.step(points)
        self.reduce_by_hand(self.replicas)
        return sum(loss.item() for loss in losses)


PARALLELISMS: dict[str, type[Job]] = {
    "ddp": Job,
    "hsdp": HybridSharded,
    "tp": TensorParallel,
    "pp": Pipelined,
}
