"""Puts the virtual device under torch while torch is being imported.

Two moments matter. The C++ library must be in the process before `torch._C` initialises, because torch caches
what "CUDA" is then. And torch's Python code must find the attributes of `torch._C` that a CUDA build has, so
they are filled in before that code runs.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.abc
import importlib.machinery
import mmap
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from understudy.proxy_client import variables

_LIBRARY = Path(__file__).with_name("libunderstudy_client.so")


def install() -> None:
    """Hooks the imports of `torch._C` and `torch`; nothing else happens until torch is imported."""
    from understudy.proxy_client import (
        proxyd_store,
        refusing,
        relayed,
        session,
        sharded_attention,
    )
    from understudy.proxy_client.samples import hooks

    relayed.go_below_relay()
    hooks.arrange()
    atexit.register(session.end)  # registered first, so it runs after the script's own handlers
    for name, after in (
        ("torch", _after_torch),
        ("torch.distributed.rendezvous", proxyd_store.install),
        ("torch.distributed.tensor", sharded_attention.install),
        ("torch.utils.data.dataloader", _after_dataloader),
        ("accelerate.data_loader", hooks.install_in_accelerate),
        ("torch.utils.cpp_extension", refusing.install_in_extension_builder),
        ("triton.runtime.jit", refusing.install_in_triton),
    ):
        sys.meta_path.insert(0, _ImportHook(name, after=after))
    sys.meta_path.insert(0, _ImportHook("torch._C", before=_before_torch_c, after=_after_torch_c))


class _ImportHook(importlib.abc.MetaPathFinder):
    """Runs something just before and just after a module is loaded, once."""

    def __init__(
        self,
        name: str,
        *,
        before: Callable[[Path], None] | None = None,
        after: Callable[[ModuleType], None],
    ) -> None:
        self._name, self._before, self._after = name, before, after

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _HookedLoader(spec.loader, self._before, self._after)
        return spec


class _HookedLoader(importlib.abc.Loader):
    def __init__(
        self,
        inner: importlib.abc.Loader,
        before: Callable[[Path], None] | None,
        after: Callable[[ModuleType], None],
    ) -> None:
        self._inner, self._before, self._after = inner, before, after

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        if self._before is not None:
            self._before(Path(spec.origin or "").parent)
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._after(module)

    def __getattr__(self, name: str) -> object:
        # Tools ask loaders for more than the two methods above (get_source, is_package, ...).
        return getattr(self._inner, name)


def _before_torch_c(torch_folder: Path) -> None:
    _check_versions(torch_folder)
    if sentence := variables.complaint(os.environ):
        raise ValueError(sentence)
    # Found by path first, so that our library uses this PyTorch wherever it is installed. A CUDA build brings
    # kernels, a device guard and hooks of its own; of two that are registered the later one counts: ours.
    for name in ("libtorch_cpu.so", "libtorch_cuda.so"):
        library = torch_folder / "lib" / name
        if library.exists():
            ctypes.CDLL(str(library))
    ctypes.CDLL(str(_LIBRARY), mode=ctypes.RTLD_GLOBAL)


def _after_torch_c(torch_c: ModuleType) -> None:
    from understudy.proxy_client import cuda_attributes, distributed, driver_settings, refusing, session

    session.install()
    driver_settings.install(torch_c)
    cuda_attributes.install(torch_c)
    refusing.install(torch_c)
    distributed.install(torch_c)


def _after_torch(torch: ModuleType) -> None:
    from understudy.proxy_client import (
        commit_marks,
        compilation,
        cuda_attributes,
        driver_settings,
        host_access,
        legacy_types,
        refusing,
        storage,
    )

    cuda_attributes.install_late(torch)
    legacy_types.install(torch)
    compilation.install(torch)
    storage.install(torch)
    refusing.install_late(torch)
    host_access.install()
    driver_settings.install_late(torch)
    commit_marks.install()


def _after_dataloader(dataloader: ModuleType) -> None:
    from understudy.proxy_client import data_positions
    from understudy.proxy_client.samples import hooks

    hooks.install(dataloader)
    data_positions.install(dataloader)


def _check_versions(torch_folder: Path) -> None:
    """Raises ImportError if our library does not fit the PyTorch that is being imported."""
    text = (torch_folder / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    installed = found.group(1) if found else "unknown"
    built_for = version_built_for()
    if installed.split("+")[0] != built_for:
        raise ImportError(
            f"understudy was built for PyTorch {built_for}, but this is PyTorch {installed} in "
            f"{torch_folder}; rebuild with `make setup`"
        )


def version_built_for() -> str:
    """The PyTorch that our library was compiled against; raises ImportError if it does not say."""
    with _LIBRARY.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        stamp = re.search(rb"understudy-built-for-torch=([^;\0]+);", content)
        version = stamp.group(1).decode() if stamp else None
    if version is None:
        raise ImportError(f"{_LIBRARY} does not say which PyTorch it was built for; run `make setup`")
    return version
