"""State of which every rank holds a block becomes one checkpoint: whole tensors, bit for bit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import proxied
import pytest
import torch
import torch.distributed.checkpoint as dcp
from proxied import until
from running_proxyd import running_proxyd
from test_snapshot_export import assert_same, export
from training_run import execute_natively, installed

from understudy.recovery.base.control import blocking_channel, pb, rpc
from understudy.recovery.snapshots.export.whole import Block, NotWhole, put_together
from understudy.recovery.snapshots.writing.description import Shard, Undescribed, read_description

SCRIPT = proxied.WORKLOADS / "sharded_resumable.py"


@pytest.mark.drawn(5)
def test_exported_blocks_are_the_whole_state_of_a_native_run_at_that_step(tmp_path: Path) -> None:
    socket, store = tmp_path / "proxyd.sock", tmp_path / "store"
    with running_proxyd(socket, 2, ("--persist", str(store), "--persist-every", "1")):
        run = subprocess.Popen(
            [*installed("proxyrun"), "--socket", str(socket),
             *proxied.ranks(2, SCRIPT, "--steps", "1000000")],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            with blocking_channel(socket) as channel:
                daemon = rpc.DaemonStub(channel)

                def durable() -> bool:
                    assert run.poll() is None
                    status = daemon.GetStatus(pb.StatusRequest(), timeout=30)
                    return min((rank.persisted_step for rank in status.ranks), default=0) > 3

                until(durable, "a durable snapshot", within_s=120)
        finally:
            run.terminate()
            run.wait(60)
    step = export(store, tmp_path / "out")["step"]
    native = tmp_path / "native"
    execute_natively(proxied.ranks(2, SCRIPT, "--steps", str(step), "--save", str(native)), timeout_s=120)
    wanted = torch.load(native, weights_only=False)  # which has a Counter in it
    model = torch.load(tmp_path / "out" / "model.pt")
    assert_same(model, dict(wanted["model"]))
    assert_same(torch.load(tmp_path / "out" / "optimizer.pt"), wanted["optimizer"])
    scheduler = torch.load(tmp_path / "out" / "scheduler.pt", weights_only=False)
    assert_same(scheduler, wanted["scheduler"])
    assert scheduler["last_epoch"] == step - 1

    export(store, tmp_path / "dcp", "--format", "dcp")
    state = {"model": {name: torch.zeros_like(value) for name, value in model.items()}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp" / "checkpoint", no_dist=True)
    assert_same(state["model"], model)


def block(at: tuple[int, ...], size: tuple[int, ...], fill: float = 1.0) -> Block:
    return Block(at, torch.full(size, fill))


def test_blocks_of_two_dimensions_and_their_replicas_become_a_whole() -> None:
    whole = torch.arange(35.0).reshape(5, 7)
    blocks = [Block((a, b), whole[a : a + 3, b : b + 4]) for a in (0, 3) for b in (0, 4)]
    assert torch.equal(put_together((5, 7), [*blocks, *blocks]), whole)
    assert torch.equal(put_together((), [Block((), torch.tensor(3.0))]), torch.tensor(3.0))
    uneven = [block((0,), (2,)), block((2,), (1,)), block((3,), (0,))]
    assert torch.equal(put_together((3,), uneven), torch.ones(3))


@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        ([block((0,), (3,))], "do not cover"),
        ([], "do not cover"),
        ([block((0,), (3,)), block((2,), (2,))], "overlap"),
        ([block((0,), (2,)), block((0,), (2,), 2.0), block((2,), (2,))], "replicas differ"),
        ([block((0,), (2,)), Block((2,), torch.ones(2, dtype=torch.int32))], "do not cover"),
        ([block((0,), (2,)), block((2,), (2,)), block((0,), (4,))], "overlap"),
    ],
    ids=str,
)
def test_blocks_that_are_no_whole_are_refused(blocks: list[Block], why: str) -> None:
    with pytest.raises(NotWhole, match=why):
        put_together((4,), blocks)


def test_a_block_is_refused_that_lies_outside_or_says_so_in_a_way_that_makes_no_sense() -> None:
    tensor = '{"dtype": "float32", "size": [2], "stride": [1], "handle": 3, "offset": 0, "shard": %s}'

    def described(shard: str) -> bytes:
        state = tensor % shard
        return f'{{"modules": [{{"class": "A", "state": {{"w": {state}}}}}], "optimizers": []}}'.encode()

    good = '{"of": [4], "at": [2], "ranks": [0, 1]}'
    assert read_description(described(good)).modules[0].state["w"].shard == Shard((4,), (2,), (0, 1))
    for bad in (
        good.replace('"at": [2]', '"at": [3]'),
        good.replace('"at": [2]', '"at": [-1]'),
        good.replace('"at": [2]', '"at": [2, 0]'),
        good.replace('"of": [4]', '"of": [-4]'),
        good.replace("[0, 1]", "[]"),
        good.replace("[0, 1]", "[-1]"),
        good.replace("[0, 1]", '"all"'),
        "{}",
        "[]",
        "7",
    ):
        with pytest.raises(Undescribed):
            read_description(described(bad))
