"""Asks for everything that a virtual device refuses; prints what each request raised, as JSON."""

import json
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.utils.cpp_extension
from torch.multiprocessing import reductions

here = torch.ones(4, device="cuda")
scratch = Path(tempfile.mkdtemp())


def graphed_callables() -> None:
    torch.cuda.make_graphed_callables(torch.nn.Linear(2, 2).cuda(), (torch.ones(1, 2, device="cuda"),))


def inside_a_graph() -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        here.add(1)


def in_a_pool() -> None:
    with torch.cuda.use_mem_pool(types.SimpleNamespace(id=(0, 1))):  # type: ignore[arg-type]
        here.clone()


def pluggable_allocator() -> None:
    torch.cuda.memory.CUDAPluggableAllocator("libc.so.6", "malloc", "free")


def storage_from_file() -> None:
    torch.cuda.gds.GdsFile(str(scratch / "file"), 0o102)


def triton_kernel() -> None:
    """Triton needs a GPU's driver to be of any use: stand-ins of its modules, where it has them."""
    folder = scratch / "triton" / "runtime"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("")
    (folder / "jit.py").write_text(
        "class JITFunction:\n    def run(self, *args, **kwargs):\n        return 1\n"
    )
    sys.path.insert(0, str(scratch))
    from triton.runtime import jit  # type: ignore[import-not-found]

    jit.JITFunction().run(here, grid=(1,), warmup=False)


def extension(**kwargs: Any) -> None:
    torch.utils.cpp_extension.load(name="kernels", build_directory=str(scratch), **kwargs)


def warned() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.cuda.memory._record_memory_history()


def all_names(refused: dict[str, list[str]]) -> dict[str, Callable[[], Any]]:
    holders = {
        "torch._C": torch._C,
        "torch.UntypedStorage": torch.UntypedStorage,
        "torch.cuda.Event": torch.cuda.Event,
        "torch.cuda": torch.cuda,
    }
    return {
        f"{where}.{name}": getattr(holders[where], name) for where, names in refused.items() for name in names
    }


REQUESTS: dict[str, Callable[[], Any]] = {
    "a CUDA graph": torch.cuda.CUDAGraph,
    "a CUDA graph, by its context": inside_a_graph,
    "a CUDA graph, by make_graphed_callables": graphed_callables,
    "a CUDA memory pool": torch.cuda.MemPool,
    "allocating from a CUDA memory pool": in_a_pool,
    "a pluggable CUDA allocator": pluggable_allocator,
    "raw allocation of device memory": lambda: torch.cuda.caching_allocator_alloc(64),
    "a raw CUDA stream": lambda: torch._C._cuda_getCurrentRawStream(0),
    "a raw CUDA stream as an argument of ctypes": lambda: torch.cuda.Stream()._as_parameter_,
    "an external CUDA stream": lambda: torch.cuda.ExternalStream(1),
    "a CUDA event shared between processes": lambda: torch.cuda.Event(interprocess=True).ipc_handle(),
    "a CUDA IPC handle": lambda: reductions.reduce_tensor(here),
    "a CUDA IPC handle, in a queue": lambda: torch.multiprocessing.SimpleQueue().put(here),
    "GPUDirect Storage": storage_from_file,
    "calling NCCL directly": lambda: torch.cuda.nccl.all_reduce([here]),
    "a kernel of torch.cuda.jiterator": lambda: torch.cuda.jiterator._create_jit_fn(
        "template <typename T> T f(T x) { return x; }"
    )(here),
    "a kernel given as CUDA source": lambda: torch.cuda._compile_kernel("__global__ void f() {}", "f"),
    "a C++ extension with CUDA kernels": lambda: extension(sources=["kernel.cu"]),
    "a C++ extension with CUDA kernels, by its flag": lambda: extension(sources=["a.cpp"], with_cuda=True),
    "a Triton kernel": triton_kernel,
    "the __cuda_array_interface__ of a tensor": lambda: here.__cuda_array_interface__,
    "the DLPack export of a cuda tensor to another library": lambda: numpy.from_dlpack(here),
    "the DLPack capsule of a cuda tensor": lambda: torch.utils.dlpack.to_dlpack(here),
    "this call of the CUDA runtime": lambda: torch.cuda.cudart().cudaStreamCreate(0),
    "nn.DataParallel": lambda: torch.nn.DataParallel(torch.nn.Linear(2, 2).cuda(), device_ids=[0, 1])(
        torch.ones(4, 2).cuda()
    ),
    "the history of device memory": warned,
}


def outcome(request: Callable[[], Any]) -> list[Any]:
    try:
        request()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test wants to see it
        return [[kind.__name__ for kind in type(error).__mro__], str(error)]
    return [[], "nothing was raised"]


def what_still_works() -> None:
    """Neighbours of the refused: what a script asks of the same places and gets."""
    shared = torch.from_dlpack(here)
    shared.add_(1)
    assert here.tolist() == [2, 2, 2, 2], "from_dlpack must share memory"
    assert torch.utils.dlpack.from_dlpack(torch.ones(2)).tolist() == [1, 1]
    assert numpy.from_dlpack(torch.ones(2)).tolist() == [1, 1]
    assert not hasattr(here, "__cuda_array_interface__")
    cudart = torch.cuda.cudart()
    pages = torch.empty(4096)
    assert int(cudart.cudaHostRegister(pages.data_ptr(), 4 * 4096, 0)) == 0
    assert int(cudart.cudaHostUnregister(pages.data_ptr())) == 0
    assert "cuda_stream" in repr(torch.cuda.Stream()) and "Event" in repr(torch.cuda.Event())
    model = torch.nn.Linear(2, 1, bias=False).cuda()
    parallel = torch.nn.DataParallel(model, device_ids=[0])
    parallel(torch.ones(4, 2)).sum().backward()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        everywhere = torch.nn.DataParallel(model)  # as libraries wrap it that count the devices
        torch.nn.DataParallel(model)
    assert [str(one.message)[:40] for one in said] == ["nn.DataParallel: a worker process has on"], said
    everywhere(torch.ones(4, 2)).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[8, 8]]
    assert not torch.cuda.is_current_stream_capturing()
    what_is_measured()


def what_is_measured() -> None:
    """As monitors ask: some of it is answered, and the rest is missing as it is without pynvml."""
    x = torch.ones(1024, 1024, device="cuda")
    for _ in range(100):
        x = (x @ x).clamp(max=1)
    assert 0 < torch.cuda.utilization() <= 100
    torch.cuda.synchronize()
    assert 0 <= torch.cuda.utilization(0) <= 100 and torch.cuda.device_memory_used() > 0
    for question in (
        torch.cuda.temperature,
        torch.cuda.power_draw,
        torch.cuda.clock_rate,
        torch.cuda.memory_usage,
    ):
        try:
            question()
        except ModuleNotFoundError as error:
            assert "pynvml" in str(error)
        else:
            raise AssertionError(f"{question.__name__} answered")


if __name__ == "__main__":
    what_still_works()
    result = {name: outcome(request) for name, request in REQUESTS.items()}
    result |= {name: outcome(request) for name, request in all_names(json.loads(sys.argv[1])).items()}
    print("RESULT " + json.dumps(result), flush=True)
