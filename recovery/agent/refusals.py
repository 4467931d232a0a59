"""Why a session cannot be opened, in sentences."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from understudy.recovery.base.errors import Refused
from understudy.recovery.config.settings import DeviceSpec, Settings
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY
from understudy.recovery.state.jobs import Job, Session
from understudy.replay import STRICT_NCCL


def held(holder: Session, request: Any) -> str:
    """`holder` has what the request asks for."""
    who = f"rank {holder.rank} of job {holder.job.name} (pid {holder.worker.pid})"
    if holder.device_index != request.device_index:
        return (
            f"a second process says that it is rank {request.rank}, which {who} is: start ranks with "
            "torchrun, or call init_process_group before the first use of the device"
        )
    return (
        f"rank {request.rank} asked for cuda:{request.device_index}, which {who} holds: "
        "a device serves one worker process at a time, so give each its own"
    )


def more_ranks_than_devices(devices: DeviceSpec, rank: int, index: int) -> str:
    """There is no such device."""
    names = devices.names
    few = ", ".join(names) if len(names) <= 4 else f"{names[0]} to {names[-1]}"
    count = f"{len(names)} device{'s' if len(names) > 1 else ''}"
    return (
        f"more ranks than devices: rank {rank} asked for cuda:{index} but proxyd serves {count} ({few}); "
        f"start it with --devices {devices.kind}:{max(index, 0) + 1}"
    )


def check_drills(job: Job, world: int) -> None:
    """A drill for a rank that this job does not have is a mistake; said before anything runs."""
    if job.openings:
        return
    for scheduled in job.drills:
        if scheduled.drill.rank >= world:
            ranks = f"ranks 0 to {world - 1}" if world > 1 else "rank 0 only"
            raise Refused(
                f"the drill '{scheduled.drill}' names a rank that there is not: this job has {ranks}"
            )


def check_that_logs_can_move(directory: Path) -> None:
    """Checks where a job's logs are whose workers may go to other hosts; raises Refused."""
    if directory != SHARED_MEMORY:
        raise Refused(
            f"a job that is --migratable needs its logs in {SHARED_MEMORY}, where other hosts look for them; "
            f"proxyd keeps them in {directory} (--log-dir)"
        )


def check_nccl(settings: Settings, variables: Iterable[str]) -> None:
    """`variables`: "NAME=value" of those of NCCL that the script has; raises Refused.

    Names of algorithms and protocols are the same to NCCL in capitals and small letters.
    """
    if settings.exact != "strict" or settings.devices.kind != "cuda":
        return
    wanted = dict(entry.split("=", 1) for entry in STRICT_NCCL)
    for name, _, value in (entry.partition("=") for entry in variables):
        if name in wanted and value.lower() != wanted[name].lower():
            raise Refused(
                f"the script's environment says {name}={value:.200} and --exact strict "
                f"{name}={wanted[name]}: unset {name}, or start proxyd with --exact on"
            )


def check_version(ours: str, theirs: str) -> None:
    """Compares PyTorch in device servers and in the script; raises Refused."""
    if theirs.split("+")[0] != ours.split("+")[0]:
        raise Refused(
            f"the script runs PyTorch {theirs} and proxyd's device servers PyTorch {ours}: "
            "install the same version for both"
        )
