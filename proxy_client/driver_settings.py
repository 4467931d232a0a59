"""Settings that change what the driver computes: the worker keeps them, the device server hears of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import IntEnum
from types import ModuleType
from typing import Any


class Setting(IntEnum):
    """`understudy::replay::Setting`."""

    THREADS = 0
    DETERMINISTIC = 1
    MATMUL_PRECISION = 2
    FLUSH_DENORMAL = 3


_PRECISIONS = {"highest": 0, "high": 1, "medium": 2}


def _deterministic(mode: bool, *, warn_only: bool = False) -> int:
    return (2 if warn_only else 1) if mode else 0


# Name in torch._C, setting, and its value for the setter's arguments.
_SETTERS: tuple[tuple[str, Setting, Callable[..., int]], ...] = (
    ("set_num_threads", Setting.THREADS, lambda threads: int(threads)),
    ("_set_deterministic_algorithms", Setting.DETERMINISTIC, _deterministic),
    ("_set_float32_matmul_precision", Setting.MATMUL_PRECISION, lambda precision: _PRECISIONS[precision]),
    ("set_flush_denormal", Setting.FLUSH_DENORMAL, lambda mode: int(bool(mode))),
)


def install(torch: ModuleType) -> None:
    """Wraps the setters once torch is whole (it documents the originals while it is imported)."""
    for name, setting, value_of in _SETTERS:
        wrapped = _forwarding(getattr(torch._C, name), setting, value_of)
        for module in (torch._C, torch):
            if hasattr(module, name):
                setattr(module, name, wrapped)


def _forwarding(
    setter: Callable[..., Any], setting: Setting, value_of: Callable[..., int]
) -> Callable[..., Any]:
    from understudy.proxy_client import _client

    @functools.wraps(setter)
    def forward(*args: Any, **kwargs: Any) -> Any:
        result = setter(*args, **kwargs)  # raises if the arguments are wrong
        _client.apply_setting(int(setting), value_of(*args, **kwargs))
        return result

    return forward
