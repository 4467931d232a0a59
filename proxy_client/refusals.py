"""What a CUDA build can do and a virtual device cannot: each such call raises what, why, and what to do.

One table. A row covers names that PyTorch looks up in one place; `refusing.py` puts them there, and
`test_refusals.py` reaches every row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NoReturn

_POINTERS = "device memory is in the device server, so this process has no address of it that can be followed"
_STREAMS = "operators run in the device server, so this process has no CUDA stream"
_COPY = "pass a copy in host memory, tensor.cpu()"
_OPERATOR = "write it as an operator with torch.library, which the device server can load and run"


class Where(Enum):
    """Where PyTorch, or the script, looks the names up."""

    TORCH_C = "torch._C"
    TENSOR = "torch.Tensor"
    DLPACK = "torch.utils.dlpack"
    STORAGE = "torch.UntypedStorage"
    EVENT = "torch.cuda.Event"
    STREAM = "torch.cuda.Stream"
    CUDA = "torch.cuda"
    CUDART = "torch.cuda.cudart()"
    CPP_EXTENSION = "torch.utils.cpp_extension"
    TRITON = "triton.runtime.jit.JITFunction"


class Kind(Enum):
    """What stands at the name: a function (or method), a class, a property."""

    FUNCTION = "function"
    CLASS = "class"
    PROPERTY = "property"
    WARNING = "warning"  # a function that does nothing, and says so once
    OF_CUDA_TENSOR = "function, for cuda tensors"
    PROPERTY_OF_CUDA_TENSOR = "property, for cuda tensors"
    OF_CUDA_SOURCES = "function, for CUDA sources"
    OF_SEVERAL_DEVICES = "function, for several devices"


@dataclass(frozen=True)
class Refusal:
    """One feature that is refused; `error` is the type its callers expect."""

    what: str
    why: str
    instead: str
    where: Where
    names: tuple[str, ...]
    kind: Kind = Kind.FUNCTION
    error: type[Exception] = NotImplementedError

    @property
    def sentence(self) -> str:
        """What, why, and what to use instead."""
        return f"{self.what} cannot work on understudy's virtual device: {self.why}; {self.instead}"

    def refuse(self) -> NoReturn:
        """Raises."""
        raise self.error(self.sentence)


REFUSALS = (
    Refusal(
        "a CUDA graph", _STREAMS + " to capture",
        "run the steps eagerly: operators are sent ahead, which hides the same launch costs (torchtitan "
        "captures by itself: --training.disable_cuda_graphs)",
        Where.TORCH_C, ("_CUDAGraph",), Kind.CLASS,
    ),
    Refusal(
        "a CUDA memory pool", "the device server owns device memory",
        "leave torch.cuda.MemPool and use_mem_pool out: allocation is its business",
        Where.TORCH_C, ("_MemPool", "_cuda_MemPool", "_cuda_CUDAAllocator"), Kind.CLASS,
    ),
    Refusal(
        "allocating from a CUDA memory pool", "the device server owns device memory",
        "leave torch.cuda.MemPool and use_mem_pool out: allocation is its business",
        Where.TORCH_C,
        (
            "_cuda_getCheckpointState", "_cuda_setCheckpointPoolState", "_cuda_checkPoolLiveAllocations",
            "_cuda_beginAllocateCurrentThreadToPool", "_cuda_beginAllocateCurrentStreamToPool",
            "_cuda_beginAllocateToPool", "_cuda_endAllocateToPool", "_cuda_releasePool",
        ),
    ),
    Refusal(
        "a pluggable CUDA allocator", "the device server owns device memory",
        "leave CUDAPluggableAllocator and change_current_allocator out",
        Where.TORCH_C, ("_cuda_customAllocator", "_cuda_changeCurrentAllocator"),
    ),
    Refusal(
        "raw allocation of device memory", _POINTERS, "allocate a tensor, torch.empty(..., device='cuda')",
        Where.TORCH_C,
        ("_cuda_cudaCachingAllocator_raw_alloc", "_cuda_cudaCachingAllocator_raw_delete"),
    ),
    Refusal(
        "a raw CUDA stream", _STREAMS, "keep to torch.cuda.Stream, or " + _OPERATOR,
        Where.TORCH_C, ("_cuda_getCurrentRawStream", "_cuda_getStreamFromExternal"),
    ),
    Refusal(
        "a raw CUDA stream as an argument of ctypes", _STREAMS, "keep to torch.cuda.Stream, or " + _OPERATOR,
        Where.STREAM, ("_as_parameter_",), Kind.PROPERTY,
    ),
    Refusal(
        "an external CUDA stream", _STREAMS, "make one with torch.cuda.Stream()",
        Where.CUDA, ("ExternalStream",), Kind.CLASS,
    ),
    Refusal(
        "a CUDA event shared between processes", _STREAMS + " and no event of a driver",
        "let processes wait for each other with torch.distributed",
        Where.EVENT, ("ipc_handle", "from_ipc_handle"),
    ),
    Refusal(
        "a CUDA IPC handle (a cuda tensor in a queue, pipe or argument of torch.multiprocessing)", _POINTERS,
        "send a copy in host memory, tensor.cpu(), or use torch.distributed",
        Where.STORAGE, ("_share_cuda_", "_new_shared_cuda", "_release_ipc_counter_cuda"),
    ),
    Refusal(
        "GPUDirect Storage (torch.cuda.gds)", "it needs a CUDA driver in this process",
        "read with torch.load or torch.from_file and copy with .cuda()",
        Where.TORCH_C,
        (
            "_gds_register_buffer", "_gds_deregister_buffer", "_gds_register_handle",
            "_gds_deregister_handle", "_gds_load_storage", "_gds_save_storage",
        ),
        error=RuntimeError,
    ),
    Refusal(
        "calling NCCL directly (torch.cuda.nccl)", "communicators belong to the device servers",
        "use torch.distributed with the backend nccl",
        Where.TORCH_C,
        (
            "_nccl_unique_id", "_nccl_init_rank", "_nccl_all_reduce", "_nccl_reduce", "_nccl_broadcast",
            "_nccl_all_gather", "_nccl_reduce_scatter",
        ),
    ),
    Refusal(
        "a kernel of torch.cuda.jiterator", "this process has no CUDA driver to compile it for", _OPERATOR,
        Where.TORCH_C, ("_cuda_jiterator_compile_and_launch_kernel",),
    ),
    Refusal(
        "a kernel given as CUDA source (torch.cuda._compile_kernel)",
        "this process has no CUDA driver to compile it for", _OPERATOR,
        Where.CUDA, ("_compile_kernel",),
    ),
    Refusal(
        "a C++ extension with CUDA kernels", _POINTERS + " and no CUDA driver to launch kernels with",
        "build it for the CPU, or " + _OPERATOR,
        Where.CPP_EXTENSION, ("_jit_compile",), Kind.OF_CUDA_SOURCES,
    ),
    Refusal(
        "a Triton kernel", _POINTERS + " and no CUDA driver to launch kernels with",
        "use PyTorch's operators, or " + _OPERATOR,
        Where.TRITON, ("run",),
    ),
    Refusal(
        "the __cuda_array_interface__ of a tensor (CuPy, Numba, RAPIDS)", _POINTERS, _COPY,
        Where.TENSOR, ("__cuda_array_interface__",), Kind.PROPERTY_OF_CUDA_TENSOR, AttributeError,
    ),
    Refusal(
        "the DLPack export of a cuda tensor to another library", _POINTERS, _COPY,
        Where.TENSOR, ("__dlpack__",), Kind.OF_CUDA_TENSOR, BufferError,
    ),
    Refusal(
        "the DLPack capsule of a cuda tensor", _POINTERS,
        _COPY + ", or inside PyTorch use torch.from_dlpack(tensor)",
        Where.DLPACK, ("to_dlpack",), Kind.OF_CUDA_TENSOR, BufferError,
    ),
    Refusal(
        "this call of the CUDA runtime (torch.cuda.cudart())", "there is no CUDA driver in this process",
        "use what torch.cuda offers for it",
        Where.CUDART, ("__getattr__",), error=AttributeError,
    ),
    Refusal(
        "nn.DataParallel or torch.cuda.comm over several devices", "a worker process has one device",
        "use DistributedDataParallel with one process per device (torchrun --nproc-per-node N), or show this "
        "process one device with CUDA_VISIBLE_DEVICES",
        Where.TORCH_C,
        (
            "_scatter", "_scatter_out", "_gather", "_gather_out", "_broadcast", "_broadcast_out",
            "_broadcast_coalesced",
        ),
        Kind.OF_SEVERAL_DEVICES,
    ),
    Refusal(
        "the history of device memory (torch.cuda.memory._record_memory_history)",
        "the device server allocates, so this process has no allocations to record",
        "snapshots stay empty: see torch.cuda.memory_stats() for totals",
        Where.TORCH_C, ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy"), Kind.WARNING,
    ),
)  # fmt: skip
