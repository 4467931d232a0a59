"""torch.distributed as scripts call it: groups, objects, point to point, coalescing, autograd, functional."""

import datetime

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from scenario import Run, scenario
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD

STEPS = 3


def _steps(run: Run) -> list[torch.optim.Optimizer]:
    """An optimizer whose steps make commits, as often as a scenario has steps."""
    weight = nn.Parameter(torch.ones(4, device=run.device))
    weight.grad = torch.ones(4, device=run.device)
    return [SGD([weight], lr=0.1)] * STEPS


def _commit(run: Run, optimizer: torch.optim.Optimizer) -> None:
    run.mark("optimizer")
    optimizer.step()
    run.mark("end")


@scenario("collective_calls")
def new_groups_and_subgroups(run: Run) -> None:
    everybody = dist.new_group(list(range(run.size)), timeout=datetime.timedelta(seconds=60))
    alone, groups = dist.new_subgroups(1)
    reversed_order = dist.new_group(list(reversed(range(run.size))))
    for optimizer in _steps(run):
        run.mark("forward")
        for group in (everybody, alone, reversed_order):
            numbers = run.numbers(5)
            dist.all_reduce(numbers, group=group)
            run.keep(numbers)
        _commit(run, optimizer)
    run.keep_value([dist.get_rank(g) for g in (everybody, alone, reversed_order)])
    for group in (everybody, reversed_order, *groups):
        if dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)


@scenario("collective_calls")
def objects(run: Run) -> None:
    for step, optimizer in enumerate(_steps(run)):
        run.mark("forward")
        gathered: list = [None] * run.size
        dist.all_gather_object(gathered, {"rank": run.rank, "step": step, "tensor": torch.arange(step)})
        box = [("from", run.rank, step), None] if run.rank == 0 else [None, None]
        dist.broadcast_object_list(box, src=0, device=run.device)
        scattered: list = [None]
        dist.scatter_object_list(
            scattered, [f"for {r}" for r in range(run.size)] if run.rank == 1 else None, src=1
        )
        everything = [None] * run.size if run.rank == 0 else None
        dist.gather_object({"of": run.rank}, everything, dst=0)
        run.keep_value((gathered, box, scattered, everything))
        if run.rank == 0:
            dist.send_object_list([{"step": step}], dst=1)
        else:
            received = [None]
            dist.recv_object_list(received, src=0)
            run.keep_value(received)
        _commit(run, optimizer)


@scenario("collective_calls")
def point_to_point_in_batches(run: Run) -> None:
    for step, optimizer in enumerate(_steps(run)):
        run.mark("forward")
        right, left = (run.rank + 1) % run.size, (run.rank - 1) % run.size
        received = [torch.empty(7, device=run.device) for _ in range(2)]
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, run.numbers(7), right),
                dist.P2POp(dist.isend, run.numbers(7) + step, right),
                dist.P2POp(dist.irecv, received[0], left),
                dist.P2POp(dist.irecv, received[1], left),
            ]
        )
        for work in works:
            work.wait()
        run.keep(*received)
        _commit(run, optimizer)


@scenario("collective_calls")
def all_to_all_and_reduce_scatter(run: Run) -> None:
    for optimizer in _steps(run):
        run.mark("forward")
        sizes = [2, 3] if run.rank == 0 else [4, 1]
        theirs = [2, 4] if run.rank == 0 else [3, 1]
        exchanged = torch.empty(sum(theirs), 2, device=run.device)
        dist.all_to_all_single(exchanged, run.numbers(sum(sizes), 2), theirs, sizes)
        part = torch.empty(3, device=run.device)
        dist.reduce_scatter(part, list(run.numbers(run.size, 3)))
        tensor_part = torch.empty(3, 2, device=run.device)
        dist.reduce_scatter_tensor(tensor_part, run.numbers(3 * run.size, 2), op=dist.ReduceOp.SUM)
        flags = (run.numbers(6) > 0).to(torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.BOR)
        run.keep(exchanged, part, tensor_part, flags)
        _commit(run, optimizer)


@scenario("collective_calls")
def average_and_product(run: Run) -> None:
    for optimizer in _steps(run):
        run.mark("forward")
        average = run.numbers(6)
        if run.device.type == "cuda":
            dist.all_reduce(average, op=dist.ReduceOp.AVG)
        else:  # which Gloo does not have
            dist.all_reduce(average)
            average /= run.size
        product = run.numbers(6).double()
        dist.all_reduce(product, op=dist.ReduceOp.PRODUCT)
        run.keep(average, product)
        _commit(run, optimizer)


@scenario("collective_calls")
def coalescing_manager(run: Run) -> None:
    for optimizer in _steps(run):
        run.mark("forward")
        tensors = [run.numbers(n) for n in (3, 5, 2)]
        with dist._coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
        late = [run.numbers(4), run.numbers(4)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in late:
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        manager.wait()
        wholes = [torch.empty(3 * run.size, device=run.device) for _ in range(2)]
        parts = [torch.empty(3, device=run.device) for _ in range(2)]
        if run.device.type == "cuda":
            with dist._coalescing_manager(device=run.device):
                for whole in wholes:
                    dist.all_gather_into_tensor(whole, run.numbers(3))
            with dist._coalescing_manager():
                for part in parts:
                    dist.reduce_scatter_tensor(part, run.numbers(3 * run.size))
        else:
            for whole in wholes:
                dist.all_gather_into_tensor(whole, run.numbers(3))
            for part in parts:
                dist.reduce_scatter_tensor(part, run.numbers(3 * run.size))
        run.keep(*tensors, *late, *wholes, *parts)
        _commit(run, optimizer)


@scenario("collective_calls")
def functional_collectives(run: Run) -> None:
    group = dist.group.WORLD
    for optimizer in _steps(run):
        run.mark("forward")
        x = run.numbers(4, 2)
        run.keep(
            functional.all_reduce(x, "sum", group) * 2,
            functional.all_gather_tensor(x, 0, group),
            functional.reduce_scatter_tensor(x, "sum", 0, group),
            functional.all_to_all_single(x, None, None, group),
            functional.broadcast(x, 1, group),
            *functional.all_reduce_coalesced([x, x + 1], "max", group),
        )
        _commit(run, optimizer)


@scenario("collective_calls")
def collectives_with_gradients(run: Run) -> None:
    weight = nn.Parameter(run.common_numbers(6))
    optimizer = SGD([weight], lr=0.01)
    for inputs in run.batches(STEPS, 6):
        run.mark("forward")
        x = weight * inputs
        gathered = torch.cat(differentiable.all_gather(x))
        reduced = differentiable.all_reduce(x.square())
        broadcast = differentiable.broadcast(x, src=0)
        exchanged = differentiable.all_to_all_single(torch.empty_like(x), x.sin())
        loss = gathered.square().sum() + (reduced * broadcast).sum() + (exchanged * inputs).sum()
        run.mark("backward")
        loss.backward()
        run.keep(loss, weight.grad)
        _commit(run, optimizer)
        optimizer.zero_grad()
    run.keep(weight)


@scenario("collective_calls")
def functional_collectives_with_gradients(run: Run) -> None:
    group = dist.group.WORLD
    weight = nn.Parameter(run.common_numbers(6))
    optimizer = SGD([weight], lr=0.01)
    for inputs in run.batches(STEPS, 6):
        run.mark("forward")
        x = weight * inputs
        gathered = functional.all_gather_tensor_autograd(x, 0, group)
        scattered = functional.reduce_scatter_tensor_autograd(x, "sum", 0, group)
        exchanged = functional.all_to_all_single_autograd(x, None, None, group)
        loss = gathered.square().sum() + scattered.sin().sum() + (exchanged * inputs).sum()
        run.mark("backward")
        loss.backward()
        run.keep(loss, weight.grad)
        _commit(run, optimizer)
        optimizer.zero_grad()
    run.keep(weight)


@scenario("collective_calls")
def barriers_of_every_kind(run: Run) -> None:
    host = dist.new_group(list(range(run.size)), backend="gloo")
    for optimizer in _steps(run):
        run.mark("forward")
        x = run.numbers(3)
        dist.barrier()
        dist.all_reduce(x)
        dist.monitored_barrier(host, timeout=datetime.timedelta(seconds=60))
        work = dist.barrier(async_op=True)
        work.wait()
        run.keep(x)
        _commit(run, optimizer)
    dist.destroy_process_group(host)


@scenario("collective_calls")
def tensors_on_the_host_beside_the_device(run: Run) -> None:
    for optimizer in _steps(run):
        run.mark("forward")
        on_host, on_device = torch.randn(run.size, 4)[run.rank], run.numbers(4)
        dist.all_reduce(on_host)
        dist.all_reduce(on_device)
        run.keep(on_host, on_device)
        _commit(run, optimizer)


@scenario("collective_calls")
def device_mesh(run: Run) -> None:
    mesh = init_device_mesh(run.device.type, (run.size, 1), mesh_dim_names=("replicate", "shard"))
    for optimizer in _steps(run):
        run.mark("forward")
        x, y = run.numbers(4), run.numbers(4)
        dist.all_reduce(x, group=mesh.get_group("replicate"))
        dist.all_reduce(y, group=mesh["shard"].get_group())
        run.keep(x, y)
        run.keep_value((mesh.get_local_rank("replicate"), mesh.get_coordinate(), mesh.shape))
        _commit(run, optimizer)


@scenario("collective_calls")
def split_group(run: Run) -> None:
    if run.device.type == "cuda":
        whole = dist.split_group(split_ranks=[[0, 1]])
        single = dist.split_group(split_ranks=[[0], [1]])
    else:  # which Gloo refuses
        whole, single = dist.new_group([0, 1]), dist.new_subgroups(1)[0]
    for optimizer in _steps(run):
        run.mark("forward")
        for group in (whole, single):
            numbers = run.numbers(5)
            dist.all_reduce(numbers, group=group)
            run.keep(numbers)
        _commit(run, optimizer)
