"""What torch.cuda asks NVML about a GPU, as far as the log says it of the device: how busy it is, its memory.

Temperature, power and clocks are of the device server's host.  Here they raise what they raise where pynvml
is not installed, which monitors expect.
"""

from __future__ import annotations

import time
from typing import Any, NoReturn

SAMPLES = 20
BETWEEN_S = 0.001


class NoNvml(ModuleNotFoundError, RuntimeError):
    """Both of what PyTorch raises: without pynvml, and without a driver."""


def install(torch: Any) -> None:
    """In `torch.cuda`."""
    torch.cuda._get_pynvml_handler = _no_handler
    torch.cuda.utilization = utilization
    torch.cuda.device_memory_used = device_memory_used


def utilization(device: Any = None) -> int:
    """Per cent of 20 looks, a millisecond apart, at which the device had something to do.

    NVML's sample period is between a sixth of a second and a second, and not known to its reader either.
    """
    from torch.cuda._utils import _get_device_index

    from understudy.proxy_client import _client

    _get_device_index(device, optional=True)  # raises where there is no such device
    busy = 0
    for _ in range(SAMPLES):
        busy += _client.device_is_busy()
        time.sleep(BETWEEN_S)
    return 100 * busy // SAMPLES


def device_memory_used(device: Any = None) -> int:
    """Bytes that are not free, of all processes."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _no_handler(*_: Any) -> NoReturn:
    raise NoNvml(
        "pynvml cannot be asked: the virtual device has no NVML, so its temperature, power, clocks and "
        "memory traffic are not known in the worker; look at the device server's host: `recoveryctl status`, "
        "nvidia-smi"
    )
