"""State of sharded modules and optimizers as local tensors, and what refuses to load it (paper 001 §3.1)."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_module
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from understudy import jit
from understudy.jit.buffers import Buffers

Start = Callable[..., None]


@pytest.fixture
def world() -> Iterator[Start]:
    """Begins to be a rank of a world whose collectives do nothing."""

    def begin(rank: int = 1, ranks: int = 4) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())

    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()


def hybrid(*shape: int, width: int = 5) -> nn.Module:
    """FSDP2 over a mesh; 5 rows over 2 ranks, so that one has padding."""
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    names = ("replicate", "shard")[-len(shape) :]
    return fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))


def tensor_parallel(sharded_as_well: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 1))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"]) if sharded_as_well else model


def filled(model: nn.Module, seed: int, steps: int = 2) -> dict[str, Any]:
    """Parts of a training of this model, in which each rank has numbers of its own."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(torch.rand(local.shape, generator=generator))
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    for _ in range(steps):
        step(parts)
    return parts


def step(parts: dict[str, Any]) -> None:
    for parameter in parts["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    parts["optimizer"].step()


def read(parts: dict[str, Any]) -> tuple[Any, bytes]:
    """What is saved, as `torch.load` reads it, and its bytes."""
    file = io.BytesIO()
    with CommDebugMode() as mode:
        torch.save(jit.local_state(**parts), file)
    assert mode.get_total_counts() == 0
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True), file.getvalue()


def bits(parts: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def look(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            for one in value.values():
                look(one)

    look(jit.local_state(**parts))
    return found


MODELS: dict[str, Callable[[], nn.Module]] = {
    "hybrid-sharded": lambda: hybrid(2, 2),
    "tensor-parallel": lambda: tensor_parallel(False),
    "both": lambda: tensor_parallel(True),
    "whole": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_state_comes_back_bit_for_bit_without_a_collective(world: Start, kind: str) -> None:
    world()
    parts = filled(MODELS[kind](), 1)
    state, _ = read(parts)
    others = filled(MODELS[kind](), 2, steps=0)
    with CommDebugMode() as mode:
        jit.load_local_state(state, **others)
    assert mode.get_total_counts() == 0
    for _ in range(2):
        mine, theirs = bits(parts), bits(others)
        assert len(mine) == len(theirs) > 8
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
        step(parts)
        step(others)


def test_replicas_save_the_same_bytes_and_shards_do_not(world: Start) -> None:
    saved = {}
    for rank in range(4):
        world(rank)
        model = hybrid(2, 2, width=4)
        saved[rank] = read(filled(model, 1))[1]
    assert saved[0] == saved[2] != saved[1] == saved[3]


def test_number_of_replicas_may_be_another_one(world: Start) -> None:
    world(rank=1, ranks=4)
    state, _ = read(filled(hybrid(2, 2), 1))
    world(rank=5, ranks=6)
    jit.load_local_state(state, **filled(hybrid(3, 2), 2, steps=0))


def test_versions_of_modules_are_part_of_a_state(world: Start) -> None:
    world()
    model = hybrid(2, 2)
    state, _ = read({"model": model})
    assert state["model"]._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]


def test_statistics_on_a_mesh_are_put_back_without_a_collective(world: Start) -> None:
    world()
    model = nn.Sequential(nn.BatchNorm1d(4))
    distribute_module(model, init_device_mesh("cpu", (4,)))
    mean: Any = model.get_buffer("0.running_mean")
    assert isinstance(mean, DTensor)
    buffers = Buffers()
    buffers.look()
    with CommDebugMode() as mode, torch.no_grad():
        mean.to_local().fill_(1)
        buffers.copy()
        mean.to_local().fill_(2)
        assert buffers.moved()
        take_up = buffers.aside()
        assert buffers.put_back() is None and mean.to_local().tolist() == [1] * 4
        assert not buffers.moved()
        take_up()
        assert mean.to_local().tolist() == [2] * 4
    assert mode.get_total_counts() == 0


@pytest.mark.parametrize(
    ("now", "sentence"),
    [
        (lambda: hybrid(1, 4), "was saved as one of 2 along shard, number 1 of 5×3, and is one of 4 along"),
        (lambda: hybrid(4), "was saved as one of 2 along shard, number 1 of 5×3, and is one of 4 along"),
        (lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)), "is not sharded now"),
        (lambda: hybrid(2, 2, width=9), "has another size now"),
    ],
    ids=["more-shards", "another-mesh", "whole", "wider"],
)
def test_another_sharding_is_refused_in_one_sentence(
    world: Start, now: Callable[[], nn.Module], sentence: str
) -> None:
    world()
    state, _ = read(filled(hybrid(2, 2), 1))
    parts = filled(now(), 2, steps=0)
    before = bits(parts)
    with pytest.raises(jit.JitError, match=sentence) as error:
        jit.load_local_state(state, **parts)
    assert str(error.value).startswith("model.0.weight ") and "\n" not in str(error.value)
    assert all(torch.equal(one, other) for one, other in zip(before, bits(parts), strict=True))


def test_another_shard_of_the_same_mesh_is_refused(world: Start) -> None:
    world()
    state, _ = read(filled(hybrid(2, 2), 1))
    (axis,) = state["model"]["0.weight"]["understudy.part"]["axes"]
    assert axis == ["shard", 2, 1]
    axis[2] = 0
    with pytest.raises(
        jit.JitError, match="number 0 of 5×3, and is one of 2 along shard, number 1 of 5×3 now"
    ):
        jit.load_local_state(state, **filled(hybrid(2, 2), 2, steps=0))


def test_state_that_was_whole_and_is_sharded_now_and_parts_that_lack_are_refused(world: Start) -> None:
    world()
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    state, _ = read(filled(model, 1))
    with pytest.raises(jit.JitError, match=r"model\.0\.weight was saved whole, and is sharded now"):
        jit.load_local_state(state, model=hybrid(2, 2))
    with pytest.raises(jit.JitError, match="has no part 'scheduler', only model, optimizer"):
        jit.load_local_state(state, scheduler=None)


def test_sum_that_was_not_taken_and_fsdp1_are_refused_when_saving(world: Start) -> None:
    world()
    mesh = init_device_mesh("cpu", (4,))

    class Sums:
        def state_dict(self) -> dict[str, Any]:
            return {"a": [DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)]}

    with pytest.raises(jit.JitError, match=r"sums\.a\.0 is P\(sum\), which is no part"):
        jit.local_state(sums=Sums())

    class FullyShardedDataParallel(nn.Module):
        pass

    with pytest.raises(jit.JitError, match=r"\(FSDP1\), whose state_dict calls collectives"):
        jit.local_state(model=nn.Sequential(FullyShardedDataParallel()))
