"""Puts the simulated CUDA device into the device servers of a proxyd that has this folder on PYTHONPATH.

SIMULATED_CUDA_LIBRARY is the library; SIMULATED_CUDA_DEVICES, how many GPUs it is to be.
"""

import json
import os
import sys

_COMMAND = " ".join(getattr(sys, "orig_argv", []))

if os.environ.get("SIMULATED_CUDA_LIBRARY"):
    if "understudy.proxy_server.spawner" in _COMMAND:
        import ctypes
        import importlib.util

        _torch = importlib.util.find_spec("torch")
        assert _torch is not None and _torch.origin is not None
        ctypes.CDLL(os.path.join(os.path.dirname(_torch.origin), "lib", "libtorch_cpu.so"))
        ctypes.CDLL(os.environ["SIMULATED_CUDA_LIBRARY"], mode=ctypes.RTLD_GLOBAL)
    elif "torch.cuda.get_device_properties" in _COMMAND:  # proxyd's question, to which a GPU would answer
        _properties = {
            "count": int(os.environ.get("SIMULATED_CUDA_DEVICES", "1")),
            "device_name": "simulated CUDA device", "total_memory": 2 << 30, "major": 9, "minor": 0,
            "multi_processor_count": 132, "cudnn_version": 0,
        }  # fmt: skip
        sys.stdout.write(json.dumps(_properties))
        sys.stdout.flush()
        os._exit(0)
