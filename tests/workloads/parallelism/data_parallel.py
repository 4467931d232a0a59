"""DistributedDataParallel with the options that scripts use, SyncBatchNorm, ZeroRedundancyOptimizer."""

import contextlib

import torch
import torch.distributed as dist
from scenario import Run, scenario
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

STEPS = 4


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def _train_with_hook(run: Run, state: object, hook: object, bucket_cap_mb: float = 0.001) -> None:
    model = DistributedDataParallel(run.network(16, 32, 8), bucket_cap_mb=bucket_cap_mb, **run.ddp)
    model.register_comm_hook(state, hook)  # type: ignore[operator]
    run.train(model, _sgd(model), run.batches(STEPS, 4, 16))
    run.keep(*model.parameters())


@scenario("data_parallel")
def gradient_as_bucket_view(run: Run) -> None:
    model = DistributedDataParallel(
        run.network(16, 32, 8), gradient_as_bucket_view=True, bucket_cap_mb=0.001, **run.ddp
    )
    run.train(model, _sgd(model), run.batches(STEPS, 4, 16))
    run.keep(*model.parameters())


@scenario("data_parallel")
def static_graph_with_checkpointed_layer_used_twice(run: Run) -> None:
    from torch.utils.checkpoint import checkpoint

    inner = run.network(16, 32, 16)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.inner, x, use_reentrant=False)
            return self.inner(x)

    model = DistributedDataParallel(Twice(), static_graph=True, **run.ddp)
    run.train(model, _sgd(model), run.batches(STEPS, 4, 16))
    run.keep(*model.parameters())


@scenario("data_parallel")
def find_unused_parameters(run: Run) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(run.network(16, 8) for _ in range(3))
            self.step = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.step += 1
            # Ranks use different branches in every second step.
            return self.branches[(self.step + run.rank * (self.step % 2)) % 3](x)

    model = DistributedDataParallel(Branches(), find_unused_parameters=True, **run.ddp)
    run.train(model, _sgd(model), run.batches(STEPS, 4, 16))
    run.keep(*model.parameters())


@scenario("data_parallel")
def hook_that_compresses_to_half(run: Run) -> None:
    _train_with_hook(run, None, default_hooks.fp16_compress_hook)


@scenario("data_parallel")
def hook_that_compresses_to_bfloat16(run: Run) -> None:
    def by_another_name(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return default_hooks.bf16_compress_hook(state, bucket)

    # PyTorch refuses this hook, by its name, where there is no CUDA.
    hook = default_hooks.bf16_compress_hook if run.device.type == "cuda" else by_another_name
    _train_with_hook(run, None, hook)


@scenario("data_parallel")
def hook_power_sgd(run: Run) -> None:
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    # One bucket: with several, Gloo's threads start collectives in an order that differs between ranks.
    _train_with_hook(run, state, powerSGD_hook.powerSGD_hook, bucket_cap_mb=25)


@scenario("data_parallel")
def hook_of_the_users_own_with_futures(run: Run) -> None:
    norms: dict[int, list[torch.Tensor]] = {}

    def hook(
        state: dict[int, list[torch.Tensor]], bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer().div_(run.size), async_op=True)

        def scaled(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            gradient = future.value()[0]
            state.setdefault(bucket.index(), []).append(gradient.norm())
            return gradient.mul_(0.5)

        def doubled(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            return future.value().mul_(2.0)

        return work.get_future().then(scaled).then(doubled)

    _train_with_hook(run, norms, hook)
    run.keep(*(norm for index in sorted(norms) for norm in norms[index]))


@scenario("data_parallel")
def no_sync(run: Run) -> None:
    model = DistributedDataParallel(run.network(16, 32, 8), **run.ddp)
    optimizer = _sgd(model)
    for step, inputs in enumerate(run.batches(2 * STEPS, 4, 16)):
        accumulate = step % 2 == 0
        run.mark("forward")
        with model.no_sync() if accumulate else contextlib.nullcontext():
            loss = model(inputs).square().mean()
            run.mark("backward")
            loss.backward()
        run.keep(loss)
        if not accumulate:
            run.mark("optimizer")
            optimizer.step()
            run.mark("end")
            optimizer.zero_grad()
    run.keep(*model.parameters())


@scenario("data_parallel")
def join_with_uneven_inputs(run: Run) -> None:
    model = DistributedDataParallel(run.network(16, 32, 8), **run.ddp)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01)
    with Join([model, optimizer]):
        run.train(model, optimizer, run.batches(STEPS + 2 * run.rank, 4, 16))
    run.keep(*model.parameters())


@scenario("data_parallel")
def broadcast_buffers(run: Run) -> None:
    network = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model = DistributedDataParallel(run.place(network), broadcast_buffers=True, **run.ddp)
    run.train(model, _sgd(model), run.batches(STEPS, 4, 16))
    run.keep(*model.parameters(), *model.buffers())


@scenario("data_parallel")
def buffers_of_each_rank_its_own(run: Run) -> None:
    network = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model = DistributedDataParallel(run.place(network), broadcast_buffers=False, **run.ddp)
    run.train(model, _sgd(model), run.batches(STEPS, 4, 16))
    run.keep(*model.parameters(), *model.buffers())


@scenario("data_parallel")
def zero_redundancy_optimizer(run: Run) -> None:
    model = DistributedDataParallel(run.network(16, 32, 32, 8), **run.ddp)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01)
    run.train(model, optimizer, run.batches(STEPS, 4, 16))
    run.keep(*model.parameters())
    optimizer.consolidate_state_dict(to=0)
    if run.rank == 0:
        states = optimizer.state_dict()["state"]
        run.keep(*(states[i][name] for i in sorted(states) for name in ("exp_avg", "exp_avg_sq")))
