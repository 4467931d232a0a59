"""What NVML knows of GPUs, asked by a process of its own: a sick GPU may hold a call, or end who asks.

    python -m understudy.recovery.machine.nvml PARENT read UUID     says one line, a reading of that GPU
    python -m understudy.recovery.machine.nvml PARENT watch UUID…   says {"watching": [UUID…]}, then
                                                                    {"uuid": UUID, "xid": NUMBER} as they come

Lines are JSON; where there is no NVML it says {"absent": "sentence"} and ends.  It makes no CUDA context, and
ends with its parent.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from understudy import replay

WAIT_MS = 10_000
"""Of one wait for an event; nothing happens between two."""


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def read(nvml: Any, uuid: str) -> dict[str, Any]:
    """A GPU as it is now; what it does not tell is None.  `trouble`: why nothing can be asked of it."""
    troubles = {
        nvml.NVML_ERROR_GPU_IS_LOST: "lost",
        nvml.NVML_ERROR_RESET_REQUIRED: "reset",
        nvml.NVML_ERROR_NOT_FOUND: "unknown",
    }

    def told(ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except nvml.NVMLError as problem:
            if problem.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                raise
            return None  # this GPU, or this driver, has no such thing

    try:
        gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
        if told(lambda: _divided(nvml, gpu)):
            return {"mig": True}
        volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        rows = told(lambda: nvml.nvmlDeviceGetRemappedRows(gpu))
        return {
            "uncorrected": told(lambda: nvml.nvmlDeviceGetTotalEccErrors(gpu, *volatile)),
            "remap_pending": None if rows is None else bool(rows[2]),
            "remap_failed": None if rows is None else bool(rows[3]),
            "retirement_pending": told(lambda: bool(nvml.nvmlDeviceGetRetiredPagesPendingStatus(gpu))),
            "action": told(lambda: _action(nvml, gpu)),
        }
    except nvml.NVMLError as problem:
        if problem.value in troubles:
            return {"trouble": troubles[problem.value]}
        raise


def _divided(nvml: Any, gpu: Any) -> bool:
    """Into parts (MIG), each of which may be another one's."""
    try:
        return bool(nvml.nvmlDeviceGetMigMode(gpu)[0])
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return False


def _action(nvml: Any, gpu: Any) -> int | None:
    """What its driver wants done about it; drivers tell since 570 or so."""
    (field,) = nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    return int(field.value.uiVal) if field.nvmlReturn == nvml.NVML_SUCCESS else None


def watch(nvml: Any, uuids: Sequence[str]) -> None:
    """Tell of the Xids of all those that tell of any."""
    events = nvml.nvmlEventSetCreate()
    known: dict[int | None, str] = {}

    def uuid_of(gpu: Any) -> str | None:
        try:
            return str(nvml.nvmlDeviceGetUUID(gpu))
        except nvml.NVMLError:  # it may be lost, which is what the Xid is about
            return known.get(_address(gpu))

    for uuid in uuids:
        try:
            gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
            if _divided(nvml, gpu):
                continue
            nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError:
            continue
        known[_address(gpu)] = uuid
    say({"watching": sorted(known.values())})
    while known:
        try:
            event = nvml.nvmlEventSetWait_v2(events, WAIT_MS)
        except nvml.NVMLError as problem:
            if problem.value != nvml.NVML_ERROR_TIMEOUT:
                raise
            continue
        if event.eventType == nvml.nvmlEventTypeXidCriticalError:
            say({"uuid": uuid_of(event.device), "xid": int(event.eventData)})


def _address(gpu: Any) -> int | None:
    """All handles of one GPU are the same pointer."""
    return ctypes.cast(gpu, ctypes.c_void_p).value


def main(parent: str, what: str, *uuids: str) -> None:
    replay.die_with_parent(int(parent))
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except ImportError as problem:
        return say({"absent": f"nvidia-ml-py is not installed ({problem})"})
    except nvml.NVMLError as problem:
        none = nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED
        other = nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, nvml.NVML_ERROR_NO_PERMISSION
        if problem.value in (*none, *other):
            return say({"absent": f"this machine has no NVML for us ({problem})"})
        raise
    if what == "watch":
        return watch(nvml, uuids)
    say(read(nvml, *uuids))


if __name__ == "__main__":
    main(*sys.argv[1:])
