"""torch.cuda's questions about memory, answered by the device server: it owns the memory.

Each question is one round trip and counts everything the script has done before it. On the cpu driver
"allocated" are the bytes of the program's buffers (no rounding, no temporaries inside kernels), "reserved"
adds what the server keeps for recovery, and free memory is what the host could still give; on the cuda driver
all numbers are those of the server's caching allocator.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any


class Query(IntEnum):
    """`understudy::replay::MemoryQuery`."""

    READ = 0
    RESET_PEAK = 1
    RESET_ACCUMULATED = 2
    EMPTY_CACHE = 3


_NOTHING = dict.fromkeys(("current", "peak", "allocated", "freed"), 0)

# Statistic of torch.cuda.memory_stats() and the counter behind it; "" stands for what is not counted: 0.
_COUNTERS = {
    "allocation": "blocks",
    "active": "blocks",
    "segment": "",
    "inactive_split": "",
    "allocated_bytes": "bytes",
    "active_bytes": "bytes",
    "requested_bytes": "bytes",
    "reserved_bytes": "reserved",
    "inactive_split_bytes": "",
}
_SINGLE_COUNTERS = ("oversize_allocations", "oversize_segments")
_NUMBERS = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "max_split_size",
)


def attributes() -> dict[str, Any]:
    """Attributes of `torch._C`."""
    return {
        "_cuda_memoryStats": statistics,
        "_cuda_resetPeakMemoryStats": _asking(Query.RESET_PEAK),
        "_cuda_resetAccumulatedMemoryStats": _asking(Query.RESET_ACCUMULATED),
        "_cuda_emptyCache": _asking(Query.EMPTY_CACHE),
        "_cuda_memorySnapshot": lambda *_: {"segments": [], "device_traces": []},
        "_cuda_hostMemoryStats": dict,
        "_cuda_resetPeakHostMemoryStats": _nothing,
        "_cuda_resetAccumulatedHostMemoryStats": _nothing,
        "_host_emptyCache": _nothing,
        "_cuda_setMemoryFraction": _nothing,
        "_cuda_getMemoryFraction": lambda *_: 1.0,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_cudaCachingAllocator_enable": _nothing,
        "_cuda_isHistoryEnabled": lambda: False,
        "_cuda_attach_out_of_memory_observer": _nothing,
        "_cuda_setMemoryMetadata": _nothing,
        "_cuda_getMemoryMetadata": lambda: "",
        "_cuda_ipc_collect": _nothing,
    }


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _asking(query: Query) -> Callable[..., None]:
    def ask(*_: Any) -> None:
        from understudy.proxy_client import _client

        _client.query_memory(int(query))

    return ask


def statistics(_: int = 0) -> dict[str, Any]:
    """What `torch.cuda.memory_stats()` is made of; PyTorch has more pools than we tell apart."""
    from understudy.proxy_client import _client

    memory = _client.query_memory(int(Query.READ))

    def pools(counter: str) -> dict[str, dict[str, int]]:
        numbers = memory[counter] if counter else _NOTHING
        return {"all": dict(numbers), "small_pool": dict(_NOTHING), "large_pool": dict(numbers)}

    return {
        **{name: pools(counter) for name, counter in _COUNTERS.items()},
        **{name: dict(_NOTHING) for name in _SINGLE_COUNTERS},
        **dict.fromkeys(_NUMBERS, 0),
    }


def free_and_total(device: int) -> tuple[int, int]:
    """cudaMemGetInfo: bytes free on the device, and all of them. Opens the session, as it makes a context."""
    import torch

    from understudy.proxy_client import _client

    if not _client.session_is_open():
        torch.empty(0, device=torch.device("cuda", device))
    memory = _client.query_memory(int(Query.READ))
    return memory["free_bytes"], memory["total_bytes"]
