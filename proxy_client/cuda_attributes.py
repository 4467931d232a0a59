"""The attributes of torch._C that a CUDA build has: with them, torch.cuda's Python code runs unchanged."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from understudy.proxy_client import capability, cuda_build, cuda_memory, cuda_streams, device_monitor, nvtx

_COMPILED_VERSION = 13000
_NCCL_VERSION = 2 << 32 | 27 << 16


def install(torch_c: ModuleType) -> None:
    """Fills `torch._C`, which was just loaded; torch/__init__ is still waiting for it.

    What a CUDA build has there already calls the real runtime, and is replaced.
    """
    answered: set[str] = set()
    for attributes in (
        _devices(),
        cuda_memory.attributes(),
        _libraries(),
        _absent_features(torch_c),
        cuda_streams.attributes(torch_c),
    ):
        for name, value in attributes.items():
            setattr(torch_c, name, value)
        answered.update(attributes)
    cuda_build.close(torch_c, frozenset(answered))
    cudart = _cudart()
    torch_c._cudart = cudart  # type: ignore[attr-defined]
    sys.modules["torch._C._cudart"] = cudart
    nvtx.install(torch_c)


def install_late(torch: ModuleType) -> None:
    """Once torch is whole: NVML would look at the host's own GPUs, and a CUDA build names its version."""
    torch.cuda._device_count_nvml = lambda: -1
    device_monitor.install(torch)
    # Asked before every recurrent layer, which takes PyTorch's own kernels here; its answer comes with a
    # warning about the build.
    torch.backends.cudnn.is_acceptable = lambda _: False
    torch.backends.cudnn.is_available = lambda: capability.current().cudnn_version > 0
    torch.backends.cudnn.version = lambda: capability.current().cudnn_version or None
    cuda_build.close_late(torch)
    if torch.version.cuda is None:
        torch.version.cuda = f"{_COMPILED_VERSION // 1000}.{_COMPILED_VERSION % 1000 // 10}"


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _devices() -> dict[str, Any]:
    from understudy.proxy_client import _client

    def set_device(device: int) -> None:
        _client.exchange_device(device)

    def exchange_device(device: int) -> int:
        return -1 if device < 0 else int(_client.exchange_device(device))

    # A function of its own: torch._dynamo keeps a table of these by identity.
    def maybe_exchange_device(device: int) -> int:
        return exchange_device(device)

    def initialise() -> None:
        import torch

        if _client.in_bad_fork():
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, "
                "you must use the 'spawn' start method"
            )
        torch.cuda.default_generators = tuple(
            _client.default_generator(index) for index in range(_client.device_count())
        )
        torch.cuda._get_device_properties = DeviceProperties

    return {
        "_has_cuda": True,
        "_cuda_init": initialise,
        "_cuda_isInBadFork": _client.in_bad_fork,
        "_cuda_getDeviceCount": _client.device_count,
        "_cuda_getDevice": _client.current_device,
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": exchange_device,
        "_cuda_maybeExchangeDevice": maybe_exchange_device,
        "_cuda_hasPrimaryContext": lambda device: (
            _client.session_is_open() and device == _client.bound_device()
        ),
        "_cuda_canDeviceAccessPeer": _always(True),
        "_cuda_synchronize": _client.synchronize,
        "_cuda_getArchFlags": lambda: f"sm_{capability.current().major}{capability.current().minor}",
        "_cuda_getCompiledVersion": _always(_COMPILED_VERSION),
        "_CudaDeviceProperties": DeviceProperties,
    }


class DeviceProperties:
    """`torch.cuda.get_device_properties()`; what proxyd does not tell is what an H100 would say."""

    def __init__(self, index: int) -> None:
        device = capability.current()
        self.name = device.device_name
        self.major, self.minor = device.major, device.minor
        self.total_memory = device.total_memory
        self.multi_processor_count = device.multi_processor_count
        self.is_integrated = self.is_multi_gpu_board = False
        self.warp_size = 32
        self.max_threads_per_block = 1024
        self.max_threads_per_multi_processor = 2048
        self.regs_per_multiprocessor = 65536
        self.shared_memory_per_block = 48 << 10
        self.shared_memory_per_block_optin = 227 << 10
        self.shared_memory_per_multiprocessor = 228 << 10
        self.L2_cache_size = 50 << 20
        self.clock_rate, self.memory_clock_rate, self.memory_bus_width = 1_980_000, 2_619_000, 5120
        self.gcnArchName = ""
        self.uuid = f"understudy-{index}"
        self.pci_bus_id, self.pci_device_id, self.pci_domain_id = index, 0, 0

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory >> 20}MB, multi_processor_count={self.multi_processor_count})"
        )


def _libraries() -> dict[str, Any]:
    return {
        "_cuda_getCurrentBlasHandle": _always(0),
        "_cuda_getCurrentSolverHandle": _always(0),
        "_cuda_clearCublasWorkspaces": _nothing,
        "_nccl_version": _always(_NCCL_VERSION),
        "_nccl_version_suffix": _always(b""),
        "_cuda_set_sync_debug_mode": _nothing,
        "_cuda_get_sync_debug_mode": _always(0),
        "_cuda_sleep": _nothing,
    }


# What torch._dynamo wants to be able to import.
_NAMES_NOT_USED = (
    "_cuda_CUDAAllocator_AllocatorState",
    "_set_cached_tensors_enabled",
    "_add_cached_tensor",
    "_remove_cached_tensor",
)


def _absent_features(torch_c: ModuleType) -> dict[str, Any]:
    """What is neither there nor missed; what is refused by name is in `refusals.py`."""
    unused = {
        name: _nothing for name in _NAMES_NOT_USED if name.startswith("_cuda_") or not hasattr(torch_c, name)
    }
    return {
        **unused,
        "_graph_pool_handle": _always((0, 0)),
        "_cuda_isCurrentStreamCapturing": _always(False),
    }


def _cudart() -> ModuleType:
    from understudy.proxy_client import _client

    class CudaError(int):
        success = 0

    module = ModuleType("torch._C._cudart")
    for name, value in {
        "cudaError": CudaError,
        "cudaGetErrorString": lambda code: f"CUDA error {int(code)}",
        "cudaMemGetInfo": cuda_memory.free_and_total,
        "cudaHostRegister": lambda address, size, flags: CudaError(
            _client.register_host_memory(address, size)
        ),
        "cudaHostUnregister": lambda address: CudaError(_client.unregister_host_memory(address)),
        "cudaProfilerStart": _always(0),
        "cudaProfilerStop": _always(0),
    }.items():
        setattr(module, name, value)
    return module
