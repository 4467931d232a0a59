"""What a service manager that wants to know is told: that proxyd serves, and that it stops (sd_notify(3))."""

from __future__ import annotations

import os
import socket

import structlog

log = structlog.get_logger()


class ServiceManager:
    """Whoever $NOTIFY_SOCKET names; the variable is ours alone, and no child of ours gets it."""

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "")

    def tell(self, state: str) -> None:
        """`READY=1`, `STOPPING=1`; nobody waits for an answer, and a failure harms nothing."""
        if not self._address:
            return
        path = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
                channel.setblocking(False)
                channel.sendto(state.encode(), path)
        except OSError as problem:
            log.warning("the service manager could not be told", state=state, problem=str(problem))
