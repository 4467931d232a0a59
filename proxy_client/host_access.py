"""Keeps the explanation of a followed device pointer in front of faulthandler's report."""

from __future__ import annotations

import faulthandler
import functools
from collections.abc import Callable
from typing import Any


def install() -> None:
    """faulthandler displaces whoever handled SIGSEGV; after it did, the explanation goes first again."""
    for name in ("enable", "disable"):
        setattr(faulthandler, name, _renewing(getattr(faulthandler, name)))


def _renewing(change: Callable[..., Any]) -> Callable[..., Any]:
    from understudy.proxy_client import _client

    @functools.wraps(change)
    def changed(*args: Any, **kwargs: Any) -> Any:
        result = change(*args, **kwargs)
        _client.renew_host_access_watch(faulthandler.is_enabled())
        return result

    return changed
