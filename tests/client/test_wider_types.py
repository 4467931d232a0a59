"""Element types for which CUDA has kernels and the CPU has none."""

from __future__ import annotations

import random
import re
from pathlib import Path

import proxied
import pytest
import torch

pytestmark = pytest.mark.drawn(6)

ONLY_ON_CUDA = 90
"""Pairs of an operator and a type, at least, that PyTorch's database has."""


def test_the_device_computes_what_only_cuda_has_as_the_cpu_computes_it_of_a_wider_type(
    tmp_path: Path,
) -> None:
    ended = proxied.run(proxied.python(proxied.WORKLOADS / "wider_types.py"), folder=tmp_path)
    found = ended.result()
    assert {pair: complaint for pair, (_, complaint) in found.items() if complaint} == {}
    assert len(found) > ONLY_ON_CUDA
    assert sum(samples for samples, _ in found.values()) > 1000


def test_training_in_half_precision_with_what_autocast_takes_by_default_survives_a_fault(
    tmp_path: Path,
) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    step, call = random.Random(seed).randrange(2, 12), random.Random(seed).randrange(1, 90)
    command = proxied.python(proxied.WORKLOADS / "half_precision.py")
    undisturbed = proxied.run(command, folder=tmp_path)
    assert undisturbed.status == 0, undisturbed.output[-3000:]
    drill = ("--drill", f"kill-server rank=0 step={step} call={call}")
    killed = proxied.run(command, folder=tmp_path, options=drill)
    assert killed.status == 0, killed.output[-3000:]
    assert killed.report["recoveries"][0]["recovered"]
    theirs, ours = (
        re.findall(r"^(?:\d+ \S+ \[.*\]|parameters \d+)$", ended.output, re.MULTILINE)
        for ended in (undisturbed, killed)
    )
    assert ours == theirs and len(theirs) == 12 + 1


@pytest.mark.drawn(1)
def test_every_row_is_an_operator_of_the_cpus_and_a_type_that_it_lacks() -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    from understudy.proxy_server import _server

    kernels = {name.split(".")[0] for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU")}
    rows = _server.WIDENED_OPERATORS
    assert rows
    assert [name for name, _ in rows if name not in kernels] == []
    known = {(f"aten::{op.aten_name}", str(dtype)) for op in op_db for dtype in op.dtypes}
    spelt = {"Half": "torch.float16", "BFloat16": "torch.bfloat16", "ComplexHalf": "torch.complex32",
             "ComplexFloat": "torch.complex64", "ComplexDouble": "torch.complex128", "Bool": "torch.bool",
             "Byte": "torch.uint8", "Char": "torch.int8", "Short": "torch.int16", "Int": "torch.int32",
             "Long": "torch.int64"}  # fmt: skip
    assert [row for row in rows if (row[0], spelt[row[1]]) in known] == []
