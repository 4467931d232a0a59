"""What a host tells of its machine: what decides whether it can take over another's work, bit for bit."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

CHOOSE_KERNELS = re.compile(r"sse4_[12]|avx\w*|fma|f16c|bf16|amx\w*|asimd\w*|sve\w*|sme\w*|i8mm|vx\w*")
"""Processor features by which PyTorch, oneDNN and OpenBLAS choose what to run, and so the bits."""


@dataclass(frozen=True)
class Machine:
    """This one."""

    boot_id: str
    kernel: str
    processor: str
    features: tuple[str, ...]


def this_machine(proc: Path = Path("/proc")) -> Machine:
    """As the kernel tells it; what it does not tell stays empty."""
    system = os.uname()
    fields: dict[str, str] = {}
    for line in _text(proc / "cpuinfo").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return Machine(
        boot_id=_text(proc / "sys" / "kernel" / "random" / "boot_id").strip(),
        kernel=f"{system.sysname} {system.release} {system.machine}",
        processor=fields.get("model name") or system.machine,
        features=tuple(sorted(flag for flag in set(flags) if CHOOSE_KERNELS.fullmatch(flag))),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
