"""What a driver offers, as the worker must believe it."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

from protos import control_pb2 as pb


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

    def message(self) -> pb.Capability:
        return pb.Capability(**asdict(self))


def find_capability(driver: str) -> Capability:
    """The capability of ``driver`` ("cpu" or "cuda") on this host; raises DriverUnavailable."""
    if driver == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Capability("cpu", "Understudy virtual device (cpu driver)", memory, 9, 0, 132)
    if driver == "cuda":
        import torch

        # NVML answers without a driver context, which must not exist before the spawner forks.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        if not torch.cuda.is_available():
            raise DriverUnavailable(
                "the cuda driver needs a GPU and a CUDA build of PyTorch, and none was found here"
            )
        return Capability("cuda", "Understudy virtual device (cuda driver)", 80 << 30, 9, 0, 132)
    raise DriverUnavailable(f"unknown driver '{driver}': use cpu or cuda")
