"""Puts the simulated CUDA device into the device servers of a proxyd that has this folder on PYTHONPATH.

SIMULATED_CUDA_LIBRARY is the library, beside which the module for its process groups lies;
SIMULATED_CUDA_DEVICES, how many GPUs it is to be.
"""

import contextlib
import json
import os
import sys
import time

WAITS_S = 60
"""NCCL waits for ever; this is longer than any wait that is compared with it."""
_COMMAND = " ".join(getattr(sys, "orig_argv", []))


def _wait_for_members(store, rank, size):  # type: ignore[no-untyped-def]
    """As NCCL makes a communicator: the first member tells an address, and all are waited for; nothing breaks
    that off, whoever dies or gives up the group."""
    store.set("address", "") if rank == 0 else store.get("address")
    store.set(f"come/{rank}", "")
    until = time.monotonic() + WAITS_S
    while time.monotonic() < until:
        with contextlib.suppress(RuntimeError):  # whoever has given up lets nobody ask any more
            if store.check([f"come/{one}" for one in range(size)]):
                return
        time.sleep(0.005)
    raise RuntimeError("the members of a simulated communicator did not come")


def _load(library: str) -> None:
    import ctypes
    import importlib.util

    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    ctypes.CDLL(os.path.join(os.path.dirname(found.origin), "lib", "libtorch_cpu.so"))
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    import torch.distributed as dist

    sys.path.append(os.path.dirname(library))
    import simulated_nccl  # type: ignore[import-not-found]

    class Nccl:
        """In the place of PyTorch's, which a CPU build does not have."""

        class Options:
            """As far as device servers set them."""

            _timeout = None

        def __new__(cls, store, rank, size, options):  # type: ignore[no-untyped-def]
            """A group whose bytes Gloo moves."""
            gloo = dist.ProcessGroupGloo
            chosen = gloo._Options()
            chosen._devices = [gloo.create_device(hostname="127.0.0.1")]
            chosen._timeout = options._timeout
            chosen._threads = 2

            def connect():  # type: ignore[no-untyped-def]
                _wait_for_members(store, rank, size)
                return gloo(store, rank, size, chosen)

            return simulated_nccl.around(rank, size, connect)

    dist.ProcessGroupNCCL = Nccl  # type: ignore[assignment, misc]


if os.environ.get("SIMULATED_CUDA_LIBRARY"):
    if "understudy.proxy_server.spawner" in _COMMAND:
        _load(os.environ["SIMULATED_CUDA_LIBRARY"])
    elif "torch.cuda.get_device_properties" in _COMMAND:  # proxyd's question, to which a GPU would answer
        _properties = {
            "uuids": [f"GPU-{n:08}-0000" for n in range(int(os.environ.get("SIMULATED_CUDA_DEVICES", "1")))],
            "device_name": "simulated CUDA device", "total_memory": 2 << 30, "major": 9, "minor": 0,
            "multi_processor_count": 132, "cudnn_version": 0,
        }  # fmt: skip
        sys.stdout.write(json.dumps(_properties))
        sys.stdout.flush()
        os._exit(0)
