"""Whether anybody else has what a rank has, told before anything has happened (paper 001 §3.1)."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forks import fork
from jit_shards import identity
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from understudy import jit
from understudy.jit.replicas import Spread, complaint, lonely, spreads_of

FULL = Spread("parameters are sharded over 4 ranks", frozenset({0, 2, 3}), frozenset({1}))
HALF = Spread("parameters are sharded over 2 ranks", frozenset({0, 2}), frozenset({1, 3}))


def named(*shards: str) -> dict[int, str]:
    return dict(enumerate(shards))


def test_ranks_with_other_parts_of_the_same_name_are_named() -> None:
    who = identity(1, 4, "0")
    sentence = complaint(HALF, who, named("0", "0", "0", "0"))
    assert sentence is not None and "rank 0, 2 has another part of it than rank 1" in sentence
    assert sentence.startswith("parameters are sharded") and "give jit.init a shard=" in sentence
    assert (complaint(FULL, who, named("0", "0", "0", "0")) or "").startswith("Nothing to save from: ")
    assert complaint(HALF, identity(1, 4, "b"), named("a", "b", "a", "b")) is None


def test_shard_that_one_rank_alone_has_is_told_with_the_reason() -> None:
    who = identity(1, 4, "s1")
    sentence = lonely(who, named("s0", "s1", "s2", "s3"), [FULL])
    assert sentence is not None and sentence.startswith(
        "Nothing to save from: no other rank has the shard 's1'"
    )
    assert "(parameters are sharded over 4 ranks)" in sentence
    assert lonely(who, named("s0", "s1", "s0", "s1"), [FULL]) is None


@pytest.fixture
def fake() -> Iterator[None]:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def spread(model: nn.Module) -> list[tuple[list[int], list[int]]]:
    """Ranks that have other parts, and ranks that have the same."""
    found = spreads_of([torch.optim.SGD(model.parameters(), lr=0.1)])
    return [(sorted(one.elsewhere), sorted(one.alike)) for one in found]


def test_meshes_say_who_has_which_part(fake: None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert spread(fully_shard(nn.Linear(4, 4), mesh=mesh)) == [([0, 2], [1, 3])]
    assert spread(fully_shard(nn.Linear(4, 4))) == [([0, 2, 3], [1])]
    assert spread(parallelize_module(nn.Linear(4, 4), mesh["shard"], ColwiseParallel())) == [([0], [1])]
    both = fully_shard(
        parallelize_module(nn.Linear(4, 4), mesh["shard"], ColwiseParallel()), mesh=mesh["replicate"]
    )
    assert spread(both) == [([0, 2, 3], [1])]
    assert spread(nn.Linear(4, 4)) == []


def test_state_of_zero_is_spread_over_its_group(fake: None) -> None:
    class ZeroRedundancyOptimizer(SimpleNamespace):
        pass

    zero = ZeroRedundancyOptimizer(process_group=dist.group.WORLD, param_groups=[])
    (found,) = spreads_of([zero])
    assert "ZeroRedundancyOptimizer" in found.what and found.elsewhere == {0, 2, 3}


def ranks(count: int, script: Callable[[int], None], folder: Path) -> list[str]:
    """What a script raises or warns of, in as many forks of this process that talk by Gloo."""
    gc.collect()  # optimizers of other tests
    pids = []
    for rank in range(count):
        if (pid := fork()) == 0:
            said = "nothing"
            try:
                store = dist.FileStore(str(folder / "store"), count)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    script(rank)
                said = "; ".join(str(one.message) for one in caught if "shard" in str(one.message)) or said
            except Exception as error:  # noqa: BLE001 - it is what is tested
                said = f"{type(error).__name__}: {error}"
                traceback.print_exc()
            with contextlib.suppress(Exception):
                (folder / f"said-{rank}").write_text(said)
            os._exit(0)
        pids.append(pid)
    try:
        while pids:
            os.waitpid(pids[-1], 0)
            pids.pop()
    finally:  # where the time is out
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [(folder / f"said-{rank}").read_text() for rank in range(count)]


def sharded() -> torch.optim.Optimizer:
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    return torch.optim.SGD(model.parameters(), lr=0.1)


def begun(directory: Path, **settings: Any) -> None:
    jit.init(print, directory, job="test", **settings)
    jit.close()


def test_fsdp_without_replicas_is_told_at_init(tmp_path: Path) -> None:
    def same_name(_: int) -> None:
        optimizer = sharded()
        begun(tmp_path / "same")
        del optimizer

    def own_names(rank: int) -> None:
        optimizer = sharded()
        begun(tmp_path / "own", shard=f"s{rank}")
        del optimizer

    for said in ranks(2, same_name, tmp_path):
        assert said.startswith("Nothing to save from: parameters are sharded over the mesh's shard (2); rank")
    (tmp_path / "store").unlink()
    for said in ranks(2, own_names, tmp_path):
        assert said.startswith("Nothing to save from: no other rank has the shard 's")


def test_parts_of_one_name_that_are_made_behind_init_are_told_in_the_first_step(tmp_path: Path) -> None:
    def script(_: int) -> None:
        jit.init(print, tmp_path / "ckpt", job="test")
        optimizer = sharded()
        optimizer.step()

    for said in ranks(2, script, tmp_path):
        assert said.startswith("JitError: Nothing to save from: ")
