"""What a driver offers, as the worker must believe it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from understudy.protos import control_pb2 as pb


class DriverUnavailable(RuntimeError):
    """The driver cannot run here; the message is one sentence for the operator."""


@dataclass(frozen=True)
class Capability:
    driver: str
    device_name: str
    total_memory: int  # bytes
    major: int
    minor: int
    multi_processor_count: int
    cudnn_version: int
    """As 91900; 0: it has none."""

    def message(self) -> pb.Capability:
        return pb.Capability(**asdict(self))


def find_capability(driver: str) -> tuple[Capability, list[str]]:
    """The capability of ``driver`` ("cpu" or "cuda") on this host, and for "cuda" the UUIDs of its GPUs.

    They are in the order in which CUDA shows them, which need not be NVML's; "" for a part of one (MIG).

    Raises DriverUnavailable.
    """
    if driver == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Capability("cpu", "Understudy virtual device (cpu driver)", memory, 9, 0, 132, 0), []
    if driver == "cuda":
        properties = _properties_of_the_gpu()
        uuids = properties.pop("uuids")
        parts = [
            name.strip().startswith("MIG-") for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        ]
        return Capability("cuda", **properties), [
            "" if index < len(parts) and parts[index] else uuid for index, uuid in enumerate(uuids)
        ]
    raise DriverUnavailable(f"unknown driver '{driver}': use cpu or cuda")


def check_nccl() -> None:
    """Raise DriverUnavailable where our own calls of NCCL cannot be made; makes no driver context."""
    from understudy.proxy_server import _server

    try:
        _server.nccl_version()
    except RuntimeError as error:
        raise DriverUnavailable(str(error)) from error


PROBE_SECONDS = 120.0

# Run by a process of its own: asking makes a driver context, which must not exist before the spawner forks.
_PROBE = """
import json, sys, torch
def asked(index):
    try:
        return torch.cuda.get_device_properties(index)
    except Exception as error:  # one that is sick keeps no other one from being used
        print(f"understudy: cuda:{index} does not say what it is: {error}", file=sys.stderr)
if torch.cuda.is_available():
    names = ("total_memory", "major", "minor", "multi_processor_count")
    gpus = [asked(index) for index in range(torch.cuda.device_count())]
    gpu = next(filter(None, gpus), None) or sys.exit(1)
    found = {"uuids": [f"GPU-{one.uuid}" if one else "" for one in gpus], "device_name": gpu.name}
    found["cudnn_version"] = torch.backends.cudnn.version() or 0
    print(json.dumps({**found, **{name: getattr(gpu, name) for name in names}}))
"""


def _properties_of_the_gpu() -> dict[str, Any]:
    try:
        probe = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        raise DriverUnavailable(
            f"the cuda driver cannot start: the GPU did not answer within {PROBE_SECONDS:.0f} s"
        ) from expired
    if probe.returncode != 0:
        last = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        raise DriverUnavailable(
            f"the cuda driver cannot start: asking for the GPU's properties failed: {last}"
        )
    if not probe.stdout.strip():
        raise DriverUnavailable(
            "the cuda driver needs a GPU and a CUDA build of PyTorch, and none was found here"
        )
    sys.stderr.write(probe.stderr)  # of GPUs that did not answer
    return dict(json.loads(probe.stdout))
