"""A snapshot on storage becomes a checkpoint: the bits of the state at its step, under the script's names."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import proxied
import pytest
import torch
import torch.distributed.checkpoint as dcp
from stored_training import leave_a_snapshot
from training_run import execute_natively

from understudy.recovery.base.own_modules import module_command

pytestmark = pytest.mark.drawn(4)

SCRIPT = proxied.WORKLOADS / "resumable.py"
MORE = 15
"""Steps behind the snapshot."""


@dataclass(frozen=True)
class Stored:
    """What a training left that ended without warning."""

    ranks: int
    store: Path
    step: int
    out: Path


def command(ranks: int, *arguments: str) -> list[str]:
    if ranks == 1:
        return proxied.python(SCRIPT, *arguments)
    return proxied.ranks(ranks, SCRIPT, *arguments)


@pytest.fixture(scope="module", params=[
    pytest.param(1, id="one rank", marks=pytest.mark.long), pytest.param(2, id="two ranks"),
])  # fmt: skip
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    folder, ranks = tmp_path_factory.mktemp("stored"), request.param
    store = leave_a_snapshot(folder, ranks, command(ranks, "--steps", "1000000"))
    step = export(store, folder / "out")["step"]
    yield Stored(ranks, store, step, folder / "out")


def export(store: Path, out: Path, *options: str) -> dict[str, Any]:
    done = ask("export", str(store), str(out), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    about = json.loads((out / "snapshot.json").read_text())
    assert about["omitted"] == [] and about["one_for_all_ranks"]
    assert isinstance(about, dict)
    return about


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*module_command("recovery.recoveryctl"), "snapshots", *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def native(stored: Stored, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training without us: its state at that step, and its losses a little longer."""
    folder = tmp_path_factory.mktemp("native")
    for steps, name in ((stored.step, "then"), (stored.step + MORE, "later")):
        arguments = (
            "--steps",
            str(steps),
            "--save",
            str(folder / name),
            "--losses",
            str(folder / f"{name}.losses"),
        )
        execute_natively(command(stored.ranks, *arguments), timeout_s=60)
    return folder


def assert_same(found: Any, wanted: Any, where: str = "") -> None:
    assert type(found) is type(wanted), where
    if isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride()), (
            where
        )
        bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (found, wanted)]
        assert torch.equal(*bits), where
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key in wanted:
            assert_same(found[key], wanted[key], f"{where}/{key}")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), where
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, f"{where}/{index}")
    else:
        assert found == wanted, where


def test_exported_state_has_the_bits_and_names_of_a_native_run_at_that_step(
    stored: Stored, native: Path
) -> None:
    wanted = torch.load(native / "then")
    assert_same(dict(torch.load(stored.out / "model.pt")), dict(wanted["model"]))
    assert_same(torch.load(stored.out / "optimizer.pt"), wanted["optimizer"])


def test_a_training_that_resumes_from_it_has_the_losses_of_one_that_never_stopped(
    stored: Stored, native: Path, tmp_path: Path
) -> None:
    losses = tmp_path / "losses"
    arguments = ("--steps", str(stored.step + MORE), "--resume", str(stored.out), "--losses", str(losses))
    execute_natively(command(stored.ranks, *arguments), timeout_s=60)
    undisturbed = (native / "later.losses").read_text().split()
    assert losses.read_text().split() == undisturbed[-MORE:]


def test_other_formats_hold_the_same(stored: Stored, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, optimizer = (torch.load(stored.out / f"{name}.pt") for name in ("model", "optimizer"))
    export(stored.store, tmp_path / "dcp", "--format", "dcp")
    state = {"model": {name: torch.zeros_like(value) for name, value in model.items()}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp" / "checkpoint", no_dist=True)
    assert_same(state["model"], dict(model))
    export(stored.store, tmp_path / "safetensors", "--format", "safetensors")
    assert_same(load_file(tmp_path / "safetensors" / "model.safetensors"), dict(model))
    assert_same(torch.load(tmp_path / "safetensors" / "optimizer.pt"), optimizer)


def test_what_cannot_be_exported_is_said_in_one_sentence_and_leaves_nothing(
    stored: Stored, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "empty").mkdir()
    for arguments, sentence in (
        ((str(stored.store), str(tmp_path / "there")), "exists"),
        ((str(stored.store), str(tmp_path / "out"), "--format", "tar"), "torch, dcp, safetensors"),
        ((str(stored.store), str(tmp_path / "out"), "--serial", "123456"), "holds no snapshot"),
        ((str(tmp_path / "empty"), str(tmp_path / "out")), "holds no snapshot"),
        ((str(tmp_path / "nowhere"), str(tmp_path / "out")), "cannot be read"),
    ):
        done = ask("export", *arguments)
        assert done.returncode == 2 and sentence in done.stderr, done
        assert len(done.stderr.strip().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "there"]
