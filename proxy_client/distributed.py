"""Supplies ProcessGroupNCCL, so that the backend "nccl" exists and its collectives become records."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

_DEFAULT_TIMEOUT = datetime.timedelta(minutes=10)  # NCCL's


class Options:
    """`ProcessGroupNCCL.Options`: scripts set these; only the timeout means something to us."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = _DEFAULT_TIMEOUT
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self.group_desc = ""
        self.split_from: Any = None
        self.split_color = 0
        self.config = SimpleNamespace()
        self.backend = "nccl"


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
    from proxy_client import _client

    _client.register_process_group(c10d)
    c10d.ProcessGroupNCCL = _process_group_class(c10d._UnderstudyProcessGroup)  # type: ignore[attr-defined]
    c10d._DEFAULT_PG_NCCL_TIMEOUT = _DEFAULT_TIMEOUT  # type: ignore[attr-defined]


def _process_group_class(base: Any) -> type:
    class ProcessGroupNCCL(base):  # type: ignore[misc]
        """The c10d backend "nccl" of the virtual device."""

        NCCL_CTA_POLICY_DEFAULT = 0
        NCCL_CTA_POLICY_EFFICIENCY = 1
        NCCL_CTA_POLICY_ZERO = 2

        def __init__(
            self, store: Any, rank: int, size: int, options: Options | datetime.timedelta | None = None
        ) -> None:
            if isinstance(options, datetime.timedelta):
                timeout, options = options, Options()
                options._timeout = timeout
            self._options = options if options is not None else Options()
            super().__init__(store, rank, size, self._options._timeout)

        @property
        def options(self) -> Options:
            return self._options

        @property
        def uid(self) -> int:
            return id(self)

        def perform_nocolor_split(self, device: Any) -> None:
            """NCCL needs the ranks outside a new group when it splits; our communicators do not."""

        def comm_split_count(self) -> int:
            return 0

        def _group_start(self) -> None:
            """Nothing is executed here that could be grouped."""

        def _group_end(self) -> None:
            """See `_group_start`."""

        def _add_ephemeral_timeout(self, timeout: datetime.timedelta) -> None:
            """Deadlines of single collectives are the coordinator's business."""

        def _is_initialized(self) -> bool:
            return True

    ProcessGroupNCCL.Options = Options  # type: ignore[attr-defined]
    return ProcessGroupNCCL
