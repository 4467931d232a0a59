"""Which bytes kernels write: what the device server says of them is what PyTorch's databases show."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import proxied
import pytest
import torch
from training_run import ROOT

TABLES = (ROOT / "proxy_server/csrc/calls/call_template.cpp").read_text()
# Rows of kernels that a CPU build of PyTorch does not have.
OF_OTHER_BUILDS = {
    "batch_norm_update_stats",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "batch_norm_gather_stats",
    "batch_norm_gather_stats_with_counts",
}


def rows(table: str) -> str:
    (body,) = re.findall(rf"{table}\[\] = \{{(.*?)\n\}};", TABLES, re.DOTALL)
    return str(body)


def undeclared_writes() -> dict[str, set[int]]:
    found = re.findall(r'\{"aten::(\w+)", \{(\d+), (\d+)\}\}', rows("kUndeclaredWrites"))
    return {name: {int(first), int(second)} for name, first, second in found}


def test_every_row_of_the_tables_is_an_operator_of_pytorch() -> None:
    names = re.findall(r'"aten::(\w+)"', rows("kUndeclaredWrites") + rows("kLeaveUnwritten"))
    assert len(names) > 10
    assert [name for name in names if not hasattr(torch.ops.aten, name)] == []


def without_overload(name: str) -> str:
    return name.removeprefix("aten::").split(".")[0]


def calls(folder: Path, every: int) -> list[list[list[list[Any]]]]:
    """Of two processes whose fresh memory holds other bytes: samples of calls [name, digests, changed]."""
    script = proxied.WORKLOADS / "bytes_of_operators.py"
    files = [folder / "first", folder / "second"]
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(file), str(every)],
            env=os.environ | {"MALLOC_PERTURB_": perturb, "OMP_NUM_THREADS": "1"},
        )
        for file, perturb in zip(files, ("1", "200"), strict=True)
    ]
    assert [process.wait(timeout=900) for process in started] == [0, 0]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.drawn(8)
@pytest.mark.parametrize("every", [24, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.cold  # what fresh memory holds is up to the process's own beginning
def test_every_kernel_that_leaves_bytes_or_changes_what_it_does_not_say_is_in_the_tables(
    every: int, tmp_path: Path
) -> None:
    first, second = calls(tmp_path, every)
    assert len(first) == len(second) > 20_000 / every
    changed: dict[str, set[int]] = defaultdict(set)
    unwritten: set[str] = set()
    for one, other in zip(first, second, strict=True):
        for name, _, arguments in one:
            changed[without_overload(name)].update(arguments)
        for (name, digests, _), (same, others, _) in zip(one, other, strict=False):
            assert name == same
            if digests != others:
                unwritten.add(without_overload(name))
                break  # what comes behind it in this sample may have read them
    writers = {name: arguments for name, arguments in changed.items() if arguments}
    assert writers == {k: v for k, v in undeclared_writes().items() if k not in OF_OTHER_BUILDS}
    leave = {name for name in unwritten if "empty" not in name and name != "_efficientzerotensor"}
    listed = set(re.findall(r'"aten::(\w+)"', rows("kLeaveUnwritten")))
    assert leave <= listed
    if every == 1:
        assert leave == listed


@pytest.mark.drawn(8)
@pytest.mark.parametrize("every", [48, pytest.param(1, marks=pytest.mark.long)])
def test_no_operator_of_pytorchs_databases_is_taken_for_one_that_does_not_replay(
    every: int, tmp_path: Path
) -> None:
    """A validation is ordered while the one before is collected: now and then a minibatch is missed."""
    ended = proxied.run(
        proxied.ranks(2, proxied.WORKLOADS / "validated_operators.py", str(every)),
        folder=tmp_path,
        options=("--devices", "cpu:2", "--validate-every", "1"),
        timeout_s=900,
    )
    assert ended.status == 0, ended.output[-3000:]
    told = re.findall(r"rank 0 minibatches (\d+), (\d+) of (\d+) samples", ended.output)[0]
    minibatches, computed, samples = map(int, told)
    validated = ended.report["validations"]
    print(f"{minibatches} minibatches, {validated} validated; {computed} of {samples} samples computed")
    assert computed > 0.95 * samples  # else it is about calls that were refused
    assert minibatches > 200 / every
    assert ended.report["validations"] >= 0.9 * minibatches
    assert "differs" not in ended.output
    assert ended.report["not_replayable"] == ""
