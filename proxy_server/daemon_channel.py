"""The device server's channel to proxyd, and its reports of faults."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import grpc

from understudy.protos import control_pb2 as pb
from understudy.protos import services as rpc

MESSAGE_LIMIT = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]

_SENT_AGAIN = {
    "maxAttempts": 5,
    "initialBackoff": "0.05s",
    "maxBackoff": "1s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
_PATIENCE = {
    "methodConfig": [
        {
            "name": [{"service": "understudy.Rendezvous"}, {"service": "understudy.Daemon"}],
            "waitForReady": True,
            "retryPolicy": _SENT_AGAIN,
        },
    ]
}
"""A proxyd that died may get a successor at the same socket: requests wait for it, and are sent again.

An addition has an id, so one that was done before its answer was lost counts once.
"""


def daemon_channel(socket: str | Path) -> grpc.Channel:
    """To whichever proxyd listens there."""
    options = [
        *MESSAGE_LIMIT,
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 20_000),  # the least time that a connection gets to be made
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.service_config", json.dumps(_PATIENCE)),
    ]
    return grpc.insecure_channel(f"unix:{socket}", options=options)


class FaultReporter:
    """Tells proxyd at which fault the executor stands; a successor that asks first takes the report."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._daemon = rpc.DaemonStub(channel)
        self._lock = threading.Lock()
        self._standing: pb.FaultReport | None = None
        self._under_way: grpc.Future | None = None

    def tell(self, report: pb.FaultReport) -> None:
        """Until a proxyd has heard it, or taken it, or the executor goes on."""
        with self._lock:
            self._standing = report
        while True:
            with self._lock:
                if self._standing is not report:
                    return
                call = self._under_way = self._daemon.ReportFault.future(report)
            try:
                call.result()
                return
            except grpc.FutureCancelledError:
                return
            except grpc.RpcError as problem:
                if call.code() is not grpc.StatusCode.UNAVAILABLE:
                    sys.stderr.write(f"understudy: proxyd did not take the report of a fault: {problem}\n")
                    return

    def take(self) -> pb.FaultReport | None:
        """For a successor: what the executor stands at.  Nobody else needs to be told."""
        with self._lock:
            if self._under_way is not None:
                self._under_way.cancel()
            return self._standing

    def forget(self) -> None:
        """The executor goes on."""
        with self._lock:
            self._standing = None
