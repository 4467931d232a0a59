"""Supplies ProcessGroupNCCL, so that the backend "nccl" exists and its collectives become records."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from understudy.proxy_client import placement

_DEFAULT_TIMEOUT = datetime.timedelta(minutes=10)  # NCCL's


def install(torch_c: ModuleType) -> None:
    """Adds the class when torch initialises its distributed bindings."""
    initialise: Callable[[], Any] | None = getattr(torch_c, "_c10d_init", None)
    if initialise is None:
        return

    def initialise_with_nccl() -> Any:
        result = initialise()
        _add_process_group(sys.modules["torch._C._distributed_c10d"])
        return result

    torch_c._c10d_init = initialise_with_nccl  # type: ignore[attr-defined]


def _add_process_group(c10d: ModuleType) -> None:
    from understudy.proxy_client import _client

    _client.register_process_group(c10d)
    # The classes themselves, not subclasses: a group that C++ makes by splitting is an instance, too.
    group, options = c10d._UnderstudyProcessGroup, c10d._UnderstudyProcessGroupOptions
    _fill(options, "Options", {"config": property(_config), "split_from": None})
    _fill(group, "ProcessGroupNCCL", {"Options": options, **_GROUP})
    group.__init__ = _telling_the_placement(group.__init__)
    c10d.ProcessGroupNCCL = group  # type: ignore[attr-defined]
    c10d._DEFAULT_PG_NCCL_TIMEOUT = _DEFAULT_TIMEOUT  # type: ignore[attr-defined]


def _telling_the_placement(initialise: Callable[..., None]) -> Callable[..., None]:
    def told(group: Any, store: Any, rank: int, size: int, *options: Any, **named: Any) -> None:
        placement.learn_from_group(rank, size)
        initialise(group, store, rank, size, *options, **named)

    return told


def _fill(kind: type, name: str, attributes: dict[str, Any]) -> None:
    kind.__name__ = kind.__qualname__ = name
    for attribute, value in attributes.items():
        setattr(kind, attribute, value)


def _config(options: Any) -> SimpleNamespace:
    """NCCL's own knobs: scripts set them, nothing reads them."""
    config: SimpleNamespace = options.__dict__.setdefault("_config", SimpleNamespace())
    return config


def _nothing(*_: object, **__: object) -> None:
    """Not needed here: nothing that could be grouped is executed, and no rank outside a split takes part."""


def _set_default_timeout(group: Any, timeout: datetime.timedelta) -> None:
    group.set_timeout(timeout)


_GROUP: dict[str, Any] = {
    "NCCL_CTA_POLICY_DEFAULT": 0,
    "NCCL_CTA_POLICY_EFFICIENCY": 1,
    "NCCL_CTA_POLICY_ZERO": 2,
    "uid": property(id),
    "perform_nocolor_split": _nothing,
    "comm_split_count": lambda group: 0,
    "_group_start": _nothing,
    "_group_end": _nothing,
    "_add_ephemeral_timeout": _nothing,
    "_set_default_timeout": _set_default_timeout,
    "_is_initialized": lambda group: True,
}
"""What a script or torch itself may ask of the class, besides what every backend has."""
