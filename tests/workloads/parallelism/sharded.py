"""State that no other rank holds: FSDP, tensor parallelism, pipelines."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from scenario import Run, scenario
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.optim import SGD, AdamW

STEPS = 5


def _blocks(run: Run, count: int = 2, width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width)) for _ in range(count))
    ).to(run.device)


def _fully_sharded(run: Run, **options: Any) -> nn.Module:
    """Each block, then the whole, so that there is one gather per block."""
    model = _blocks(run)
    for block in model:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def _keep_local(run: Run, model: nn.Module) -> None:
    for parameter in model.parameters():
        run.keep(parameter.to_local() if isinstance(parameter, DTensor) else parameter)


def _train_sharded(run: Run, model: nn.Module) -> None:
    optimizer = AdamW(model.parameters(), lr=0.01)

    def clip() -> None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        run.keep(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    run.train(model, optimizer, run.batches(STEPS, 4, 16), before_step=clip)
    _keep_local(run, model)


@scenario("sharded")
def fully_shard_with_resharding(run: Run) -> None:
    _train_sharded(run, _fully_sharded(run, reshard_after_forward=True))


@scenario("sharded")
def fully_shard_without_resharding(run: Run) -> None:
    _train_sharded(run, _fully_sharded(run, reshard_after_forward=False))


@scenario("sharded")
def fully_shard_with_mixed_precision(run: Run) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _train_sharded(run, _fully_sharded(run, mp_policy=policy))


@scenario("sharded")
def fully_shard_with_state_on_the_host(run: Run) -> None:
    # On the CPU there is nowhere to offload to, and the sums are the same.
    options = {"offload_policy": CPUOffloadPolicy()} if run.device.type == "cuda" else {}
    model = _fully_sharded(run, **options)
    optimizer = AdamW(model.parameters(), lr=0.01)
    run.train(model, optimizer, run.batches(STEPS, 4, 16))
    _keep_local(run, model)


@scenario("sharded")
def fully_sharded_data_parallel_of_the_first_kind(run: Run) -> None:
    model = FullyShardedDataParallel(_blocks(run), device_id=run.device, use_orig_params=True)
    run.train(model, SGD(model.parameters(), lr=0.05, momentum=0.9), run.batches(STEPS, 4, 16))
    with FullyShardedDataParallel.summon_full_params(model):
        run.keep(*model.parameters())


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 32)
        self.down = nn.Linear(32, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


@scenario("sharded")
def tensor_parallel_layers(run: Run) -> None:
    mesh = init_device_mesh(run.device.type, (run.size,))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).to(run.device)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    run.train(
        model, SGD(model.parameters(), lr=0.1), [run.common_numbers(4, 16) for _ in range(STEPS)]
    )  # fmt: skip
    _keep_local(run, model)


@scenario("sharded")
def sequence_parallel_with_parallel_loss(run: Run) -> None:
    mesh = init_device_mesh(run.device.type, (run.size,))
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(12, 16),
            "block": _Residual(16),
            "norm": nn.LayerNorm(16),
            "head": nn.Linear(16, 12),
        }
    ).to(run.device)
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "block.norm": SequenceParallel(),
            "block.up": ColwiseParallel(input_layouts=Shard(1)),
            "block.down": RowwiseParallel(output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    optimizer = AdamW(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        tokens = torch.randint(0, 12, (2, 9)).to(run.device)
        run.mark("forward")
        logits = model["head"](model["norm"](model["block"](model["embed"](tokens[:, :8]))))
        with loss_parallel():
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            run.mark("backward")
            loss.backward()
        run.mark("optimizer")
        optimizer.step()
        run.mark("end")
        optimizer.zero_grad()
        run.keep(loss.full_tensor())
    _keep_local(run, model)


@scenario("sharded")
def distributed_tensors_placed_anew(run: Run) -> None:
    mesh = init_device_mesh(run.device.type, (run.size,))
    weight = nn.Parameter(distribute_tensor(run.common_numbers(6, 4), mesh, [Shard(0)]))
    optimizer = AdamW([weight], lr=0.01)
    for _ in range(STEPS):
        run.mark("forward")
        x = distribute_tensor(run.common_numbers(5, 6), mesh, [Replicate()])
        product = x @ weight
        columns = product.redistribute(placements=[Shard(1)])
        loss = (
            columns.redistribute(placements=[Replicate()]).square().mean() + weight.sin().mean()
        ).full_tensor()
        run.mark("backward")
        loss.backward()
        run.mark("optimizer")
        optimizer.step()
        run.mark("end")
        optimizer.zero_grad()
        run.keep(loss, columns.to_local())
    run.keep(weight.full_tensor())


def _pipeline(run: Run, schedule_kind: type[ScheduleGPipe] | type[Schedule1F1B]) -> None:
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(run.size)]
    stage_module = layers[run.rank].to(run.device)
    stage = PipelineStage(stage_module, run.rank, run.size, run.device)
    schedule = schedule_kind(stage, n_microbatches=4, loss_fn=lambda y, t: (y - t).square().mean())
    optimizer = SGD(stage_module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        inputs, targets = run.common_numbers(8, 16), run.common_numbers(8, 16)
        losses: list[torch.Tensor] = []
        run.mark("backward")  # and the forward passes between
        if run.rank == 0:
            schedule.step(inputs)
        else:
            run.keep(schedule.step(target=targets, losses=losses))
        run.mark("optimizer")
        optimizer.step()
        run.mark("end")
        optimizer.zero_grad()
        run.keep(*losses)
    run.keep(*stage_module.parameters())


@scenario("sharded")
def pipeline_gpipe(run: Run) -> None:
    _pipeline(run, ScheduleGPipe)


@scenario("sharded")
def pipeline_one_forward_one_backward(run: Run) -> None:
    _pipeline(run, Schedule1F1B)


@scenario("hybrid")
def hybrid_sharding(run: Run) -> None:
    mesh = init_device_mesh(run.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    _train_sharded(run, _fully_sharded(run, mesh=mesh))


@scenario("hybrid")
def sharded_data_and_tensor_parallel(run: Run) -> None:
    mesh = init_device_mesh(run.device.type, (2, 2), mesh_dim_names=("data", "tensor"))
    model = _blocks(run)
    for block in model:
        parallelize_module(block, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = AdamW(model.parameters(), lr=0.01, foreach=False)
    data = [
        numbers[mesh.get_local_rank("data")]
        for numbers in (run.common_numbers(2, 4, 16) for _ in range(STEPS))
    ]
    run.train(model, optimizer, data)
    _keep_local(run, model)


@scenario("hybrid")
def subgroups_of_half_the_ranks(run: Run) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    weight = nn.Parameter(run.common_numbers(6))
    optimizer = SGD([weight], lr=0.1)
    for inputs in run.batches(STEPS, 6):
        run.mark("forward")
        x = (weight * inputs).detach()
        dist.all_reduce(x, group=halves[run.rank // 2])
        dist.broadcast(x, src=3)
        run.keep(x)
        run.mark("backward")
        (weight * x).sum().backward()
        assert weight.grad is not None
        dist.all_reduce(weight.grad)
        run.mark("optimizer")
        optimizer.step()
        run.mark("end")
        optimizer.zero_grad()
    run.keep(weight)
