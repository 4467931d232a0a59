"""Settings that change what the driver computes: PyTorch has them in the worker, the server hears of them.

What they are, and how each is read and set: replay/csrc/settings/torch_settings.h.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

# Setters in torch._C: what they changed is read from PyTorch itself.
OF_THE_PROCESS = (
    "_set_blas_preferred_backend",
    "_set_check_sparse_tensor_invariants",
    "_set_cpu_allow_fp16_reduced_precision_reduction",
    "_set_cublas_allow_bf16_reduced_precision_reduction",
    "_set_cublas_allow_fp16_accumulation",
    "_set_cublas_allow_fp16_reduced_precision_reduction",
    "_set_cublas_allow_tf32",
    "_set_cudnn_allow_tf32",
    "_set_cudnn_benchmark",
    "_set_cudnn_depthwise_kernel",
    "_set_cudnn_deterministic",
    "_set_cudnn_enabled",
    "_set_default_dtype",
    "_set_default_tensor_type",
    "_set_deterministic_algorithms",
    "_set_deterministic_fill_uninitialized_memory",
    "_set_float32_matmul_precision",
    "_set_fp32_precision_setter",
    "_set_linalg_preferred_backend",
    "_set_math_sdp_allow_fp16_bf16_reduction",
    "_set_miopen_immediate",
    "_set_mkldnn_deterministic",
    "_set_mkldnn_enabled",
    "_set_nnpack_enabled",
    "_set_onednn_allow_tf32",
    "_set_qengine",
    "_set_rocm_fa_preferred_backend",
    "_set_sdp_priority_order",
    "_set_sdp_use_cudnn",
    "_set_sdp_use_fa3",
    "_set_sdp_use_flash",
    "_set_sdp_use_math",
    "_set_sdp_use_mem_efficient",
    "_set_sdp_use_overrideable",
    "_set_sm_carveout_experimental",
)


def install(torch_c: ModuleType) -> None:
    """Wraps the setters before anything else of PyTorch takes hold of them (torch.backends does)."""
    from understudy.proxy_client import _client

    for name in OF_THE_PROCESS:
        if (setter := getattr(torch_c, name, None)) is not None:  # some are new, some are of CUDA builds
            setattr(torch_c, name, _then(setter, lambda *_: _client.settings_changed()))


def install_late(torch: ModuleType) -> None:
    """Those of a thread, once torch is whole: it documents the originals while it is imported."""
    from understudy.proxy_client import _client

    for name, tell in (
        ("set_num_threads", _client.set_threads),
        ("set_flush_denormal", lambda mode: _client.set_flush_denormal(bool(mode))),
    ):
        wrapped = _then(getattr(torch._C, name), tell)
        setattr(torch._C, name, wrapped)
        setattr(torch, name, wrapped)


def _then(setter: Callable[..., Any], tell: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(setter)
    def forward(*args: Any, **kwargs: Any) -> Any:
        result = setter(*args, **kwargs)  # raises if the arguments are wrong
        tell(*args, *kwargs.values())
        return result

    return forward
