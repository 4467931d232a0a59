"""Puts the rows of `refusals.py` where PyTorch and scripts look for what they refuse."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from understudy.proxy_client import one_device
from understudy.proxy_client.refusals import REFUSALS, Kind, Refusal, Where

_DLPACK_CPU = 1
_inside_torch = threading.local()


def install(torch_c: ModuleType) -> None:
    """The rows of `torch._C`, before torch's Python code looks there, and of its CUDA runtime."""
    _put(Where.TORCH_C, torch_c)
    _put(Where.CUDART, torch_c._cudart)


def install_late(torch: Any) -> None:
    """The rows about classes and functions of torch's Python code, once torch is whole."""
    _put(Where.TENSOR, torch.Tensor)
    _put(Where.STORAGE, torch.UntypedStorage)
    _put(Where.EVENT, torch.cuda.Event)
    _put(Where.STREAM, torch.cuda.Stream)
    _put(Where.CUDA, torch.cuda)
    dlpack = torch.utils.dlpack
    _put(Where.DLPACK, dlpack)
    torch.to_dlpack = dlpack.to_dlpack
    torch.from_dlpack = dlpack.from_dlpack = _within_torch(dlpack.from_dlpack)
    one_device.install_late()


def install_in_extension_builder(cpp_extension: ModuleType) -> None:
    """The rows about `torch.utils.cpp_extension`, when a script imports it."""
    _put(Where.CPP_EXTENSION, cpp_extension)


def install_in_triton(jit: ModuleType) -> None:
    """The rows about `triton.runtime.jit`, when something imports it."""
    _put(Where.TRITON, jit.JITFunction)


def _put(where: Where, holder: Any) -> None:
    for refusal in REFUSALS:
        if refusal.where is where:
            for name in refusal.names:
                setattr(holder, name, _replacement(refusal, name, getattr(holder, name, None)))


def _replacement(refusal: Refusal, name: str, original: Any) -> Any:
    match refusal.kind:
        case Kind.FUNCTION:
            return lambda *_, **__: refusal.refuse()
        case Kind.CLASS:
            return type(name, (), {"__new__": lambda *_, **__: refusal.refuse()})
        case Kind.PROPERTY:
            return property(lambda _: refusal.refuse())
        case Kind.WARNING:
            return _warning(refusal)
        case Kind.OF_CUDA_TENSOR:
            return _for_host_tensors(original, refusal)
        case Kind.PROPERTY_OF_CUDA_TENSOR:
            return property(_for_host_tensors(original.fget, refusal))
        case Kind.OF_CUDA_SOURCES:
            return _for_host_sources(original, refusal)
        case Kind.OF_SEVERAL_DEVICES:
            return one_device.FUNCTIONS[name](refusal)


def _warning(refusal: Refusal) -> Callable[..., None]:
    @functools.cache  # once
    def warn() -> None:
        warnings.warn(refusal.sentence, UserWarning, stacklevel=4)

    return lambda *_, **__: warn()


def _for_host_tensors(original: Callable[..., Any], refusal: Refusal) -> Callable[..., Any]:
    @functools.wraps(original)
    def checked(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        copies_to_host = (kwargs.get("dl_device") or (0,))[0] == _DLPACK_CPU
        if tensor.is_cuda and not copies_to_host and not getattr(_inside_torch, "deep", 0):
            refusal.refuse()
        return original(tensor, *args, **kwargs)

    return checked


def _within_torch(original: Callable[..., Any]) -> Callable[..., Any]:
    """From one tensor of ours to another, DLPack is as good as ever."""

    @functools.wraps(original)
    def importing(*args: Any, **kwargs: Any) -> Any:
        _inside_torch.deep = getattr(_inside_torch, "deep", 0) + 1
        try:
            return original(*args, **kwargs)
        finally:
            _inside_torch.deep -= 1

    return importing


def _for_host_sources(build: Callable[..., Any], refusal: Refusal) -> Callable[..., Any]:
    signature = inspect.signature(build)

    @functools.wraps(build)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if given["with_cuda"] or any(str(source).endswith((".cu", ".cuh")) for source in given["sources"]):
            refusal.refuse()
        return build(*args, **kwargs)

    return checked
