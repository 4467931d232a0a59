"""`proxyd`: one per node; owns logs, keeps device servers running, recovers jobs."""

from __future__ import annotations

from understudy.protos import least_tls  # before whatever else loads gRPC

# isort: split
import json
import os
from collections.abc import Callable

from understudy.recovery.base.errors import ExitStatus, ForTheUser
from understudy.recovery.config.command_line import INTERRUPTED, check_variables, ends_of, say
from understudy.recovery.config.proxyd_options import ProxydOptions, proxyd_command
from understudy.recovery.config.proxyd_settings import PROGRAM, options_of, settings_from
from understudy.recovery.config.settings import Settings
from understudy.recovery.machine.gpus import refuse_missing_driver


def main() -> int:
    """Entry point."""
    return ends_of(PROGRAM, lambda: _run(options_of()))


def _run(given: ProxydOptions) -> int:
    """Serves; what is wrong goes to proxyrun, if that has started us.  Raises ForTheUser."""
    waiting = [given.ready_fd] if given.ready_fd >= 0 else []

    def tell(message: dict[str, object]) -> None:
        while waiting:
            fd = waiting.pop()
            os.write(fd, json.dumps(message).encode() + b"\n")
            os.close(fd)

    try:
        settings = settings_from(given)
        check_variables(PROGRAM, proxyd_command(), warn=not waiting)  # proxyrun has warned already
        refuse_missing_driver(settings.devices.kind)
        return _serve(settings, given, lambda: tell({"ready": True, "pid": os.getpid()}))
    except ForTheUser as problem:
        if not waiting:
            raise
        tell({"error": str(problem), "status": int(problem.status)})
        return problem.status


def _serve(settings: Settings, given: ProxydOptions, ready: Callable[[], None]) -> int:
    """What takes long to load is loaded once the command line is known to be right."""
    import asyncio

    from understudy.recovery.base.structured_log import configure
    from understudy.recovery.daemon.daemon import serve
    from understudy.recovery.machine.allocation import keep_freed_memory

    configure(given.log_level)
    keep_freed_memory()
    if not least_tls.IN_FORCE:
        raise RuntimeError("gRPC was loaded before understudy.protos.least_tls: TLS 1.2 would be spoken, too")
    served = asyncio.run(serve(settings, ready, given.parent_pid))
    if served:
        return ExitStatus.DONE
    say(PROGRAM, "stopped before it was ready")
    return INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(main())
