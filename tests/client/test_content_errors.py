"""Errors that depend on what tensors hold: what scripts may catch natively is raised at the call here."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import proxied
import pytest
import torch
from training_run import ROOT

TABLE = (ROOT / "proxy_client/csrc/operators/operator_info.cpp").read_text()
NOT_LISTED = {
    "bernoulli": "on a GPU an assertion of the device, which no script can catch",
    "binary_cross_entropy": "an assertion of the device",
    "multinomial": "an assertion of the device",
    "as_strided": "its arguments are wrong, which the worker finds",
}


def listed() -> set[str]:
    (body,) = re.findall(r"kRaiseByContent\[\] = \{(.*?)\};", TABLE, re.DOTALL)
    return set(re.findall(r'"aten::([\w.]+)"', body))


def registered(name: str) -> bool:
    """Whether the CPU has a kernel of this name, or of an overload."""
    kernels = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    return any(name in (kernel, kernel.split(".")[0]) for kernel in kernels)


@pytest.mark.drawn(3)
def test_every_operator_that_raises_by_content_waits_for_its_result_or_is_an_assertion() -> None:
    done = subprocess.run(
        [sys.executable, str(proxied.WORKLOADS / "content_errors.py")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = proxied.result_in(done.stdout)
    assert len(found) > 10
    of_driver = {name for name in found if registered(name)}  # others are composed of these, in the worker
    names = {name.removeprefix("aten::") for name in of_driver}
    known = listed()
    assert {n for n in names if n not in known and n.split(".")[0] not in known | NOT_LISTED.keys()} == set()


def test_every_row_is_an_operator_of_the_driver() -> None:
    assert [name for name in listed() if not registered(f"aten::{name}")] == []
