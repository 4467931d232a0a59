"""What NVML tells of a GPU, judged: whether a rank whose server failed there may have another one there.

Only what came while the rank was there tells: an error of last month has no part in this server's end.
NVIDIA's own sentences are in "GPU Memory Error Management" (error recovery and response flags) and in the Xid
catalog, from which NVSentinel takes an action for each Xid (`xiderrorsmapping.csv`): RESET_GPU and RESTART_BM
are UNUSABLE here, workflows that look further and contained errors are LEAVE, and RESTART_APP and IGNORE are
no verdict.  Those of the program itself are among these (13, 31, 43, 45), as is 92, many errors that were
corrected.  109, a context switch that takes too long, is RESET_GPU there and "application error: the GPU
should still be healthy" in NVIDIA's device plugin for Kubernetes; it is left to the trial on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any


class Severity(Enum):
    """What a finding means for the next server there."""

    LEAVE = "a server may go on there, but another GPU is better"
    UNUSABLE = "no server can be trusted there before it is reset or replaced"


@dataclass(frozen=True)
class Reading:
    """A GPU as NVML tells of it at one time; None: it does not tell."""

    trouble: str = ""
    """Why nothing can be asked of it: a key of TROUBLES."""
    mig: bool = False
    """It is divided, and what is told of it may be of another one's part."""
    uncorrected: int | None = None
    """ECC errors in memory since its driver was loaded that could not be corrected."""
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retirement_pending: bool | None = None
    action: int | None = None
    """What its driver wants done about it (nvmlDeviceGpuRecoveryAction_t)."""


@dataclass(frozen=True)
class Finding:
    """Why a GPU is better left."""

    severity: Severity
    sentence: str


UNUSABLE, LEAVE = Severity.UNUSABLE, Severity.LEAVE

TROUBLES = {"lost": "it is lost", "reset": "it has to be reset", "unknown": "it is not there"}
ACTIONS: Mapping[int, tuple[Severity, str]] = {
    1: (UNUSABLE, "its driver wants it reset"),
    2: (UNUSABLE, "its driver wants the host rebooted"),
    3: (LEAVE, "its driver wants traffic between GPUs ended"),
    4: (LEAVE, "its driver wants it drained and reset"),
    6: (UNUSABLE, "its driver wants its bus reset"),
    7: (UNUSABLE, "its driver wants the machine rebooted"),
}
"""5, of the memory between hosts (IMEX), is not about this GPU."""
XIDS: Mapping[int, tuple[Severity, str]] = {
    46: (UNUSABLE, "it stopped processing"),
    48: (LEAVE, "an uncorrectable ECC error"),
    62: (UNUSABLE, "its power management stopped"),
    63: (LEAVE, "memory to be taken out of use at its next reset"),
    64: (UNUSABLE, "memory that could not be taken out of use"),
    74: (LEAVE, "an error of NVLink"),
    79: (UNUSABLE, "it fell off the bus"),
    94: (LEAVE, "a contained ECC error"),
    95: (UNUSABLE, "an ECC error that was not contained"),
    110: (UNUSABLE, "a security fault"),
    119: (UNUSABLE, "its system processor did not answer"),
    120: (UNUSABLE, "an error of its system processor"),
    136: (UNUSABLE, "NVLink did not come up"),
    140: (UNUSABLE, "an ECC error that was not recovered from"),
    143: (UNUSABLE, "it was not initialised"),
    155: (UNUSABLE, "an error that NVLink's software found"),
    156: (UNUSABLE, "a part that is out of use from its next reset on"),
    158: (UNUSABLE, "a fatal timeout"),
    **dict.fromkeys(range(144, 151), (LEAVE, "an error of NVLink")),
}


def reading_of(message: Any) -> Reading | None:
    """As the process that asks NVML has said it; None if it makes no sense."""
    if not isinstance(message, dict) or not message.keys() <= {field.name for field in fields(Reading)}:
        return None
    trouble, mig, numbers = message.get("trouble", ""), message.get("mig", False), dict(message)
    numbers.pop("trouble", None), numbers.pop("mig", None)
    if trouble not in ("", *TROUBLES) or not isinstance(mig, bool):
        return None
    return (
        Reading(**message) if all(one is None or isinstance(one, int) for one in numbers.values()) else None
    )


def judge(before: Reading | None, now: Reading | None, xids: Sequence[int]) -> Finding | None:
    """What tells against a GPU where a server has failed; `before`: when the rank came there.

    `xids`: those that it told of since, and older ones that only a reset ends.
    """
    if now is not None and now.mig:
        return None
    found = [*_of_xids(xids), *(_of_reading(before, now) if now is not None else ())]
    if not found:
        return None
    worst = UNUSABLE if any(severity is UNUSABLE for severity, _ in found) else LEAVE
    return Finding(worst, f"NVML tells of it: {'; '.join(sentence for _, sentence in found)}")


def _of_xids(xids: Sequence[int]) -> Iterator[tuple[Severity, str]]:
    for xid in dict.fromkeys(xids):
        if xid in XIDS:
            severity, words = XIDS[xid]
            yield severity, f"Xid {xid}, {words}"


def _of_reading(before: Reading | None, now: Reading) -> Iterator[tuple[Severity, str]]:
    if now.trouble and (now.trouble != "unknown" or (before is not None and not before.trouble)):
        yield UNUSABLE, TROUBLES[now.trouble]
    if now.action is not None and now.action in ACTIONS:
        yield ACTIONS[now.action]
    if before is None:
        return  # whatever is counted may be old
    grown = (now.uncorrected or 0) - (before.uncorrected or 0)
    if grown > 0 and before.uncorrected is not None:
        yield LEAVE, f"{grown} uncorrectable ECC error{'s' * (grown > 1)} since the rank came there"
    if now.remap_failed and before.remap_failed is False:
        yield UNUSABLE, "a row of its memory could not be replaced"
    if now.remap_pending and before.remap_pending is False:
        yield LEAVE, "a row of its memory is to be replaced at its next reset"
    if now.retirement_pending and before.retirement_pending is False:
        yield LEAVE, "a page of its memory is out of use from its next reset on"
