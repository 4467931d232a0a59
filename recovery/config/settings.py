"""What proxyd was asked to do, parsed from its command line; every mistake becomes one sentence."""

from __future__ import annotations

import mmap
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from understudy.recovery.base.errors import BadInput as BadInput
from understudy.recovery.base.timing import TIMING, Timing
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY
from understudy.recovery.membership.settings import MembershipSettings
from understudy.recovery.snapshots.settings import PersistenceSettings

AREA_BYTES = 8 << 30
"""The most that shadows, or snapshots, of a rank take if nobody says so and a GPU does not need more."""
SEGMENT_BYTES = 8 << 20
SMALLEST_LOG = 4
LARGEST_LOG = 4096
"""Segments per log (replay/csrc/log/log_format.h: kMaxSegments)."""

DRIVERS = ("cpu", "cuda")
SHARED_GPU = "UNDERSTUDY_TEST_SHARED_GPU"
"""Set to 1, ranks may share a GPU, which NCCL does not let them: for tests on a host that has one."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class DeviceSpec:
    """`KIND:COUNT`, such as cpu:2."""

    kind: str
    count: int

    @property
    def names(self) -> list[str]:
        """The devices by name: cpu:0, cpu:1."""
        return [f"{self.kind}:{index}" for index in range(self.count)]


def refuse_missing_gpus(devices: DeviceSpec, gpus: int) -> None:
    """Raises BadInput where `devices` are more GPUs than the `gpus` that CUDA shows."""
    if devices.kind == "cuda" and devices.count > gpus and os.environ.get(SHARED_GPU) != "1":
        raise BadInput(f"--devices cuda:{devices.count}: CUDA shows {gpus} on this host")


def missing_gpus(known: Sequence[str], shown: Sequence[str]) -> list[int]:
    """Indices of GPUs, known by UUID to a proxyd before us, that CUDA does not show any more."""
    return [index for index, uuid in enumerate(known) if uuid and uuid not in shown]


@dataclass(frozen=True)
class Settings:
    """Everything proxyd needs to know before it starts."""

    devices: DeviceSpec
    socket: Path
    spares: int = 1
    log_bytes: int = 4 << 30
    shadow_bytes: int = AREA_BYTES
    snapshot_overhead: float = 0.01
    """Share of the time that snapshots may take; 0: none are taken."""
    snapshot_bytes: int = AREA_BYTES
    optimizer_preimages: str = "on"
    exact: str = "on"
    """On GPUs: off; on, only kernels that give the same bits each time; strict, NCCL in one way, too."""
    collectives: str = "pytorch"
    """On GPUs: who calls NCCL: pytorch, its ProcessGroupNCCL; own, we do."""
    validate_every: int = 1000
    hang_timeout_s: float = 300.0
    cpu_image_every_s: float = 0.0
    """Between two images of workers on other hosts of a job that this one leads, seconds; 0: none."""
    persist: PersistenceSettings | None = None
    """Where snapshots go to outlive this node's memory; None: nowhere."""
    metrics: str = ""
    """Where Prometheus may ask, HOST:PORT; empty: nowhere."""
    membership: MembershipSettings = field(default_factory=lambda: MembershipSettings("host"))
    """Who this host is, and which others it knows."""
    log_directory: Path = SHARED_MEMORY
    """Where logs and snapshots lie, with all else of a proxyd that is not on storage."""
    adoption_grace_s: float = 600.0
    """How long waiting workers, and device servers without a worker, outlive a proxyd without successor."""
    segment_bytes: int = SEGMENT_BYTES
    dictionary_bytes: int = 256 << 20
    reply_bytes: int = 256 << 20
    timing: Timing = TIMING

    @property
    def keeps_optimizer_preimages(self) -> bool:
        """Pre-images inside the optimizer step, as long as the device has memory for them."""
        return self.optimizer_preimages == "on"

    @property
    def gpu_ways(self) -> dict[str, str]:
        """What all ranks of a job must have alike, or their results differ or they do not meet."""
        on_gpus = self.devices.kind == "cuda"
        return {
            "exact": self.exact if on_gpus else "", "collectives": self.collectives if on_gpus else "",
        }  # fmt: skip

    @property
    def keeps_snapshots(self) -> bool:
        """Whether snapshots stay in host memory."""
        return self.snapshot_overhead > 0 and (self.persist is None or self.persist.stays_in_memory)

    @property
    def segment_count(self) -> int:
        """Segments per log under the cap."""
        return max(SMALLEST_LOG, min(LARGEST_LOG, self.log_bytes // self.segment_bytes))

    def segments_in(self, directory: Path, world: int) -> int:
        """The same, but no more than half of a file system holds for all ranks of a job that may be here.

        A log that is full is made room in; a file system that is full holds up everybody.
        """
        memory = os.statvfs(directory)
        share = memory.f_blocks * memory.f_frsize // 2 // min(world, len(self.devices.names))
        return max(SMALLEST_LOG, min(self.segment_count, share // self.segment_bytes))


def parse_devices(text: str) -> DeviceSpec:
    """`cpu:2` -> two CPU devices."""
    found = re.fullmatch(r"([a-z]+):([0-9]+)", text.strip())
    if not found or found[1] not in DRIVERS:
        known = " or ".join(f"{driver}:COUNT" for driver in DRIVERS)
        raise BadInput(f"unknown device spec {text!r}: write {known}, for example cpu:2")
    if not 1 <= int(found[2]) <= 1024:
        raise BadInput(
            f"device spec {text!r} asks for {found[2]} devices: at least 1 and at most 1024 are possible"
        )
    return DeviceSpec(found[1], int(found[2]))


LONGEST_INSIDE = len(f"/understudy-{os.getuid()}-4194304-9999999999-abcdefgh/server-01234567-99999.sock")
MOST_PATH = 107 - LONGEST_INSIDE
"""Bytes of the name of a directory in which sockets of ours lie: their paths have 107 bytes at most."""


def parse_log_directory(text: str, flag: str) -> Path:
    """The directory, existing, and such that logs can be mapped there; raises BadInput."""
    directory = Path(text).absolute()
    if len(os.fsencode(directory)) > MOST_PATH:
        raise BadInput(f"{flag} {text}: its path has more than {MOST_PATH} bytes, and sockets lie in it")
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.truncate(mmap.PAGESIZE)
            mmap.mmap(file.fileno(), mmap.PAGESIZE).close()
    except (OSError, ValueError) as problem:
        why = getattr(problem, "strerror", "") or problem
        raise BadInput(f"{flag} {text}: no file can be made and mapped there: {why}") from None
    return directory


def parse_seconds(text: str, flag: str, least: float = 1, example: str = "300") -> float:
    """`300`, `2.5`, `90s` -> seconds."""
    found = re.fullmatch(r"([0-9]+(\.[0-9]+)?)\s*s?", text.strip())
    if not found or not least <= float(found[1]) <= 1e6:
        raise BadInput(f"{flag} {text!r} is no time: write seconds from {least:g} on, for example {example}")
    return float(found[1])


def parse_interval(text: str, flag: str) -> tuple[float, int]:
    """`30`, `2.5s` -> (seconds, 0); `10steps`, `1 step` -> (0, steps)."""
    found = re.fullmatch(r"([0-9]+)\s*steps?", text.strip())
    if not found:
        try:
            return parse_seconds(text, flag), 0
        except BadInput as problem:
            raise BadInput(f"{problem}, or steps, for example 10steps") from None
    if not 1 <= int(found[1]) <= 10**9:
        raise BadInput(f"{flag} {text!r} is not possible: 1 to 1000000000 steps")
    return 0.0, int(found[1])


def parse_bytes(text: str, flag: str) -> int:
    """`4GiB`, `512M`, `1073741824` -> bytes."""
    found = re.fullmatch(r"([0-9]+)\s*([KMGT]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not found or int(found[1]) == 0:
        raise BadInput(f"{flag} {text!r} is not a size: write for example 4GiB or 512MiB")
    return int(found[1]) * _UNITS[found[2].upper()]


def parse_share(text: str, flag: str) -> float:
    """`1`, `0.5%` (per cent) -> 0.01, 0.005."""
    found = re.fullmatch(r"([0-9]+(\.[0-9]+)?)\s*%?", text.strip())
    if not found or float(found[1]) > 50:
        raise BadInput(f"{flag} {text!r} is no share: write for example 1%, at most 50%; 0 switches it off")
    return float(found[1]) / 100


def parse_address(text: str) -> tuple[str, int]:
    """`9400`, `127.0.0.1:9400`, `[::1]:9400` -> (host, port); without a host, this machine only."""
    found = re.fullmatch(r"(?:(?P<host>[^:\[\]]+|\[[0-9a-fA-F:.]+\]):)?(?P<port>[0-9]{1,5})", text.strip())
    if not found or not 0 < int(found["port"]) < 1 << 16:
        raise BadInput(f"--metrics {text!r} is no address: write for example 9400 or 127.0.0.1:9400")
    return (found["host"] or "127.0.0.1").strip("[]"), int(found["port"])
