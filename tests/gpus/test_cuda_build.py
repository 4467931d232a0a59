"""A CUDA build of PyTorch in worker and device server: on `cpu` devices none of ours touches a driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import proxied
import pytest
import torch
from compiled_programs import program

from understudy.proxy_client import one_device

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None, reason="this PyTorch is a CPU build, which has no way to a driver"
)


@pytest.fixture
def watched() -> Path:
    """A folder with a libcuda.so.1 that notes every call."""
    return program("driver_watch/libcuda.so.1").parent


NOT_BEFORE_2_13 = {"_FastCudaLauncher"}  # rows of the tables that an older PyTorch has no name for


def watch(monkeypatch: pytest.MonkeyPatch, library: Path, calls: Path) -> None:
    paths = os.environ.get("LD_LIBRARY_PATH", "")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{library}:{paths}" if paths else str(library))
    monkeypatch.setenv("DRIVER_WATCH_FILE", str(calls))


def test_the_watch_sees_a_native_process_call_the_driver(
    watched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch(monkeypatch, watched, tmp_path / "calls")
    asks = "import torch; torch.cuda.is_available()"
    subprocess.run([sys.executable, "-W", "ignore", "-c", asks], check=True)
    assert (tmp_path / "calls").read_text().count("called") > 0


def test_no_process_calls_the_driver_and_every_way_to_it_is_closed(
    watched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch(monkeypatch, watched, tmp_path / "calls")
    monkeypatch.setenv("UNDERSTUDY_TEST_DRIVER", "cpu")  # the other one does call it
    ended = proxied.run(proxied.python(proxied.WORKLOADS / "closed_driver.py"), folder=tmp_path)
    found: dict[str, Any] = ended.result()
    assert not (tmp_path / "calls").exists()
    assert found["kernels"] == []
    assert sorted(found["own"]) == found["harmless"]
    assert found["one_device"] == dict.fromkeys(one_device.FUNCTIONS, True)
    newer = NOT_BEFORE_2_13 if torch.torch_version.TorchVersion(torch.__version__) < "2.13" else set()
    assert set(found["unknown"]) == newer  # no row of the tables is dead
    refusals = found["refusals"]
    assert set(refusals) == {
        "_cuda_getAllocator", "_CUDAGreenContext", "_CUDAPluggableAllocator", "_broadcast",
    }  # fmt: skip
    assert "use torch.cuda.Stream instead" in refusals["_CUDAGreenContext"]
    assert "DistributedDataParallel" in refusals["_broadcast"]
    assert found["nccl"] is True
