"""Data loaders with workers of every kind, pinned memory, copies that do not block."""

from __future__ import annotations

import torch
from script_scenario import Run, scenario, small_model, step
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

GROUP = "loading"


class Squares(Dataset[tuple[torch.Tensor, int]]):
    """Of a module that workers can import: spawn needs that."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.arange(8, dtype=torch.float32).mul(index / 24).sin(), index % 4


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        worker = torch.utils.data.get_worker_info()
        for index in range(worker.id if worker else 0, 12, worker.num_workers if worker else 1):
            yield torch.full((8,), float(index))


def train(run: Run, loader: DataLoader, epochs: int = 2) -> None:
    model = small_model(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for inputs, labels in loader:
            if loader.pin_memory and not (inputs.is_pinned() and labels.is_pinned()):
                raise AssertionError("a batch is not in pinned memory")
            inputs = inputs.to(run.device, non_blocking=True)
            labels = labels.to(run.device, non_blocking=True)
            step(run, F.cross_entropy(model(inputs), labels), optimizer)
    run.keep_model(model)


@scenario(GROUP)
def loader_whose_workers_are_forked(run: Run) -> None:
    torch.ones(1, device=run.device)  # the device was used before the fork
    generator = torch.Generator().manual_seed(1)
    train(
        run,
        DataLoader(
            Squares(), batch_size=6, shuffle=True, num_workers=2, pin_memory=run.on_cuda,
            persistent_workers=True, prefetch_factor=2, generator=generator, multiprocessing_context="fork",
        ),
    )  # fmt: skip


@scenario(GROUP)
def loader_whose_workers_are_spawned(run: Run) -> None:
    generator = torch.Generator().manual_seed(2)
    train(
        run,
        DataLoader(
            Squares(), batch_size=8, shuffle=True, num_workers=1, pin_memory=run.on_cuda,
            persistent_workers=True, generator=generator, multiprocessing_context="spawn",
        ),
    )  # fmt: skip


@scenario(GROUP)
def loader_whose_workers_come_from_a_fork_server(run: Run) -> None:
    train(run, DataLoader(Squares(), batch_size=8, num_workers=1, multiprocessing_context="forkserver"), 1)


@scenario(GROUP)
def loader_of_a_stream(run: Run) -> None:
    loader = DataLoader(Stream(), batch_size=3, num_workers=2, pin_memory=run.on_cuda)
    model = small_model(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs in loader:
        step(run, model(inputs.to(run.device)).square().mean(), optimizer)
    run.keep_model(model)


@scenario(GROUP)
def pinned_memory_and_copies_that_do_not_block(run: Run) -> None:
    model = small_model(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    staging = torch.empty(6, 8, pin_memory=run.on_cuda)
    on_device = torch.empty(6, 8, device=run.device)
    results = torch.empty(6, 4, pin_memory=run.on_cuda)
    for turn in range(4):
        staging.copy_(torch.full((6, 8), float(turn)))
        on_device.copy_(staging, non_blocking=True)
        out = model(on_device)
        results.copy_(out.detach(), non_blocking=True)
        if run.on_cuda:
            torch.cuda.synchronize()
        run.keep("results", results)
        step(run, out.square().mean(), optimizer)
    transposed = torch.arange(12.0).reshape(3, 4).t()
    run.keep("transposed", transposed.to(run.device, non_blocking=True))
    run.keep("sliced", torch.arange(20.0).to(run.device)[2:14:3].cpu())
    run.keep("halves", torch.arange(6.0).pin_memory().half().to(run.device) if run.on_cuda
             else torch.arange(6.0).half())  # fmt: skip
    run.keep("memory format", run.data(2, 3, 4, 4).to(memory_format=torch.channels_last).cpu())
    run.keep_model(model)


@scenario(GROUP)
def tensors_made_from_lists_and_arrays(run: Run) -> None:
    model = small_model(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(3):
        rows = [[float(turn + i * j) for j in range(8)] for i in range(6)]
        x = torch.tensor(rows, device=run.device)
        y = torch.as_tensor(torch.tensor(rows).numpy(), device=run.device)
        step(run, (model(x) - model(y * 0.5)).square().mean(), optimizer)
        run.keep("list", x.sum(0).tolist())
        run.keep("array", float(x.cpu().numpy().sum()))
    if run.on_cuda:
        run.keep("legacy", torch.cuda.FloatTensor([1.0, 2.0]))
        run.keep("legacy long", torch.cuda.LongTensor([1, 2]))
        run.keep("legacy size", tuple(torch.cuda.FloatTensor(2, 3).shape))
        run.keep("legacy type", torch.cuda.HalfTensor(3).fill_(2).type())
        run.keep("type", isinstance(torch.ones(2, device="cuda"), torch.cuda.FloatTensor))
        run.keep("converted", torch.ones(2).type(torch.cuda.DoubleTensor).type("torch.cuda.HalfTensor"))
        run.keep("new", torch.ones(2, device="cuda").new([3.0, 4.0]) + torch.ones(1).cuda().new_zeros(2))
    else:
        run.keep("legacy", torch.FloatTensor([1.0, 2.0]))
        run.keep("legacy long", torch.LongTensor([1, 2]))
        run.keep("legacy size", tuple(torch.FloatTensor(2, 3).shape))
        run.keep("legacy type", torch.HalfTensor(3).fill_(2).type().replace("torch.", "torch.cuda."))
        run.keep("type", isinstance(torch.ones(2), torch.FloatTensor))
        run.keep("converted", torch.ones(2).type(torch.DoubleTensor).type("torch.HalfTensor"))
        run.keep("new", torch.ones(2).new([3.0, 4.0]))
    run.keep("of a tensor set", TensorDataset(run.data(3, 2), run.data(3, 1))[1])
