"""An export says where the script was in its data, so that it goes on with exactly the next sample."""

from __future__ import annotations

import gc
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import proxied
import pytest
import torch
from stored_training import leave_a_snapshot
from torch.utils.data import DataLoader
from training_run import execute_natively

from understudy.data import ResumableSampler
from understudy.proxy_client import data_positions
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.snapshots.writing.description import Undescribed, read_description

pytestmark = pytest.mark.drawn(3)

SCRIPT = proxied.WORKLOADS / "resumable_loader.py"
STEPS_OF_EPOCH = 20
MORE = 25
"""Steps behind the snapshot: into the next epoch."""


def lines(out: Path, rank: int) -> list[str]:
    return out.with_name(f"{out.name}-{rank}").read_text().splitlines()


@pytest.mark.drawn(4)
def test_a_script_that_resumes_from_an_export_has_the_samples_and_losses_of_one_that_never_stopped(
    tmp_path: Path,
) -> None:
    command = proxied.ranks(2, SCRIPT, "--steps", "1000000", "--out", str(tmp_path / "begun"))
    store = leave_a_snapshot(tmp_path, 2, command, least_step=3)
    out = tmp_path / "restored"
    subprocess.run(
        [*module_command("recovery.recoveryctl"), "snapshots", "export", str(store), str(out)],
        check=True, timeout=120,
    )  # fmt: skip
    told = json.loads((out / "data.json").read_text())
    step = told["step"]
    for ((loader,),) in ([rank] for rank in told["ranks"]):
        assert loader["class"] == "torch.utils.data.dataloader.DataLoader"
        assert not loader["may_read_ahead"]
        epoch, batches = divmod(step, STEPS_OF_EPOCH)
        assert (loader["sampler"]["epoch"], loader["sampler"]["cursor_step"]) == (epoch, batches)
        assert loader["batches"] == (batches or STEPS_OF_EPOCH)
        assert loader["iterations"] == epoch + (batches > 0)
    ends = str(step + MORE)
    for name, resume in (("whole", ()), ("resumed", ("--resume", str(out)))):
        arguments = ("--steps", ends, "--out", str(tmp_path / name), *resume)
        execute_natively(proxied.ranks(2, SCRIPT, *arguments), timeout_s=120)
    for rank in range(2):
        whole, begun = lines(tmp_path / "whole", rank), lines(tmp_path / "begun", rank)
        assert whole[: len(begun)] == begun[: len(whole)]
        assert lines(tmp_path / "resumed", rank) == whole[step:] and len(whole) == step + MORE


# ------------------------------------------------------------------ what is noted
@pytest.fixture
def loaders() -> Any:
    """A class of loaders that is watched, where PyTorch's own is left alone."""

    class Watched(DataLoader[Any]):
        def __iter__(self) -> Any:
            return DataLoader.__iter__(self)

    data_positions.install(SimpleNamespace(DataLoader=Watched))  # type: ignore[arg-type]
    return Watched


def test_each_loader_says_how_often_it_was_begun_and_how_many_batches_were_handed_out(loaders: Any) -> None:
    training, evaluation = loaders(range(10), batch_size=2), loaders(range(6), batch_size=None)
    list(training)
    reading = iter(training)
    next(reading), next(reading)
    list(evaluation)
    told = {one["batch_size"]: one for one in data_positions.positions() if "Watched" in one["class"]}
    assert (told[2]["iterations"], told[2]["batches"]) == (2, 2)
    assert (told[None]["iterations"], told[None]["batches"]) == (1, None)  # its iterator is gone
    assert told[2]["loader"] + 1 == told[None]["loader"] and told[2]["sampler"] is None
    del training, evaluation, reading
    gc.collect()
    assert not [one for one in data_positions.positions() if "Watched" in one["class"]]


def test_a_class_that_iterates_in_a_way_of_its_own_is_marked(loaders: Any) -> None:
    class AheadByOne(loaders):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            iterator = super().__iter__()
            ahead = next(iterator)
            for following in iterator:
                yield ahead
                ahead = following
            yield ahead

    loader = AheadByOne(range(4))
    reading = iter(loader)
    assert next(reading) == torch.tensor([0])
    told = [one for one in data_positions.positions() if "AheadByOne" in one["class"]]
    assert [(one["batches"], one["may_read_ahead"]) for one in told] == [(2, True)]


def test_a_loader_that_cannot_be_hashed_is_left_out(loaders: Any) -> None:
    class Unhashable(loaders):  # type: ignore[misc]
        __hash__ = None  # type: ignore[assignment]

    loader = Unhashable(range(4))
    assert len(list(loader)) == 4
    assert not [one for one in data_positions.positions() if "Unhashable" in one["class"]]


@pytest.mark.parametrize("as_batches", [True, False])
def test_the_state_of_our_sampler_is_told_and_of_no_other(loaders: Any, as_batches: bool) -> None:
    sampler = ResumableSampler(40, global_batch=4, seed=2, rank=0, world_size=1)
    loader = (
        loaders(range(40), batch_sampler=sampler.batches)
        if as_batches
        else loaders(range(40), sampler=sampler, batch_size=4)
    )
    steps = sampler.steps(loader)
    next(steps), next(steps), next(steps)
    told = [one for one in data_positions.positions() if one["sampler"] is not None]
    assert [one["sampler"] for one in told] == [sampler.state_dict()]
    assert sampler.cursor_step == 3 and told[0]["batches"] == 3


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "position",
    [
        {},
        {"loader": "x"},
        {"sampler": {"epoch": [1]}},
        {"sampler": 3},
        {"batches": "many"},
        {"iterations": None},
    ],
)
def test_a_position_that_makes_no_sense_is_refused(position: dict[str, Any]) -> None:
    good = {
        "loader": 0, "class": "L", "iterations": 1, "batches": 2, "batch_size": 3, "may_read_ahead": False,
        "sampler": None,
    }  # fmt: skip
    document = {"modules": [], "optimizers": [], "data": [good]}
    assert read_description(json.dumps(document).encode()).data[0].batches == 2
    document["data"] = [good | position if position else {}]
    with pytest.raises(Undescribed, match="makes no sense"):
        read_description(json.dumps(document).encode())
