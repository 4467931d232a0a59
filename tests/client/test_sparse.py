"""Sparse tensors on the virtual device: as on the CPU, bit for bit, also through the death of a server."""

from __future__ import annotations

import json
from pathlib import Path

import proxied
import pytest
from native_reference import native_reference

CASES = proxied.WORKLOADS / "sparse_cases.py"
TRAINING = proxied.WORKLOADS / "sparse_training.py"
NAMES = [
    "constructors",
    "conversions",
    "arithmetic",
    "in_place_changes_reach_the_tensor_and_its_aliases",
    "transfers_and_copies",
    "save_and_load",
    "autograd",
    "compressed",
    "products_with_reductions",
    "nested",
    "text",
    "errors",
    "embeddings_trained_with_sgd",
    "embeddings_trained_with_momentum",
    "embeddings_trained_with_sparse_adam",
    "embeddings_trained_with_adagrad",
    "accumulated_gradients",
    "jagged",
]


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """What each case did otherwise on `cuda` than on the CPU, all run by one worker."""
    folder = tmp_path_factory.mktemp("sparse")
    ended = proxied.run(proxied.python(CASES, str(folder / "differences.json")), folder=folder)
    assert ended.status == 0, ended.output[-3000:]
    found: dict[str, str | None] = json.loads((folder / "differences.json").read_text())
    return found


def test_every_case_is_named_here(differences: dict[str, str | None]) -> None:
    assert sorted(differences) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_sparse_tensors_give_the_bits_that_the_cpu_gives(
    name: str, differences: dict[str, str | None]
) -> None:
    assert differences[name] is None, differences[name]


def bytes_of(folder: Path, name: str) -> list[bytes]:
    return [(folder / f"{name}.{rank}").read_bytes() for rank in range(2)]


@pytest.mark.drawn(3)
def test_sparse_gradients_under_ddp_equal_gloos_and_survive_killed_servers(tmp_path: Path) -> None:
    steps = ["--steps", "16"]
    natively = proxied.ranks(2, TRAINING, "--device", "cpu", *steps, "--out")
    native = native_reference(lambda folder: [*natively, str(folder / "native.x")])
    drills = [f"kill-server rank={i % 2} step={3 + 2 * i} call={call}" for i, call in enumerate((20, 45, 70))]
    options = tuple(word for drill in drills for word in ("--drill", drill))
    command = proxied.ranks(2, TRAINING, "--out", str(tmp_path / "faulted.x"), *steps)
    ended = proxied.run(command, folder=tmp_path, options=options)
    assert ended.status == 0, ended.output[-3000:]
    assert len(ended.report["recoveries"]) == len(drills)
    assert ended.report["replies_different"] == 0
    assert bytes_of(tmp_path, "faulted") == bytes_of(native, "native")
