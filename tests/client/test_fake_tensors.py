"""Fake tensors of the virtual device: what compilation, export and DTensors' shapes are made from."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import proxied
import pytest

pytestmark = pytest.mark.drawn(8)

OTHERWISE = {
    # PyTorch's fakes of a CPU's tensors differ from a CPU's results, too
    "nn.functional.unfold": "PyTorch's own",
    "ormqr": "PyTorch's own",
    "t": "PyTorch's own",
    "to_sparse": "PyTorch's own",
    "linalg.eig": "PyTorch's own",
    # fakes have CUDA's metadata, where the driver is a CPU
    "native_batch_norm": "statistics of an evaluation are empty",
    "_native_batch_norm_legit": "statistics of an evaluation are empty",
    "svd_lowrank": "strides",
    "pca_lowrank": "strides",
    "fft.rfftn": "strides",
    "fft.irfftn": "strides",
    "nonzero_static": "strides of an empty result",
    # the sample
    "as_strided partial_views": "a part of a storage came to the device without the rest",
    "sparse.mm reduce": "the gradient of a sparse argument looks at content",
}
"""Entries of op_db whose fakes are otherwise than the device's results, and why."""


def test_fakes_of_all_pytorchs_operators_are_as_the_devices_results_and_none_ends_the_process(
    tmp_path: Path,
) -> None:
    file = tmp_path / "found"
    command = proxied.python(proxied.WORKLOADS / "fake_operators.py", str(file))
    ended = proxied.run(command, folder=tmp_path)
    lines = file.read_text().splitlines()
    assert ended.status == 0, (lines[-1], ended.output[-3000:])
    found = [json.loads(line) for line in lines if not line.startswith("begin ")]
    assert len(found) > 650
    assert sum(count for _, count, _ in found) > 2000
    assert {name for name, _, different in found if different} == OTHERWISE.keys()


def test_models_compiled_exported_traced_and_vectorised_compute_what_they_compute_eagerly(
    tmp_path: Path,
) -> None:
    ended = proxied.run(proxied.python(proxied.WORKLOADS / "traced_models.py"), folder=tmp_path)
    found = ended.result()
    assert {name: complaint for name, complaint in found.items() if complaint} == {}
    assert len(found) > 50


def test_tensor_parallel_attention_trains_as_alone_and_survives_a_fault(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    draw = random.Random(seed)
    script = proxied.WORKLOADS / "tensor_parallel_attention.py"
    alone = subprocess.run([sys.executable, str(script), "alone"], capture_output=True, text=True, check=True)
    undisturbed = proxied.run(proxied.ranks(2, script, "cuda"), folder=tmp_path)
    assert undisturbed.status == 0, undisturbed.output[-3000:]
    lines = sorted(line for line in undisturbed.output.splitlines() if line[:2] in ("0 ", "1 "))
    expected = [float.fromhex(line.split()[2]) for line in alone.stdout.splitlines()[:8]]
    losses = [float.fromhex(line.split()[2]) for line in lines if line[:4] in {f"0 {n} " for n in range(8)}]
    assert len(losses) == len(expected)
    assert all(abs(a - b) < 1e-5 for a, b in zip(losses, expected, strict=True))
    drill = f"kill-server rank={draw.randrange(2)} step={draw.randrange(2, 8)} call={draw.randrange(1, 150)}"
    killed = proxied.run(proxied.ranks(2, script, "cuda"), folder=tmp_path, options=("--drill", drill))
    assert killed.status == 0, killed.output[-3000:]
    assert killed.report["recoveries"][0]["recovered"]
    assert sorted(line for line in killed.output.splitlines() if line[:2] in ("0 ", "1 ")) == lines


def test_a_sequence_split_between_ranks_is_refused_on_the_cpu_driver_with_a_sentence(tmp_path: Path) -> None:
    """PyTorch refuses it on the CPU; what is registered for DTensors there must not answer in its place."""
    ended = proxied.run(proxied.ranks(2, proxied.WORKLOADS / "context_parallel.py"), folder=tmp_path)
    assert ended.status == 0, ended.output[-3000:]
    lines = [line for line in ended.output.splitlines() if line.startswith(("refused", "computed", "alone"))]
    sentence = "refused: context_parallel computes attention by CUDA's flash, efficient and cuDNN operators"
    assert sum(line.startswith(sentence) for line in lines) == 2, lines
    assert lines.count("alone (1, 2, 8, 8)") == 2 and len(lines) == 4, "attention itself is as ever"
