"""One conversation with proxyd: a JSON request on stdin, a JSON reply on stdout.

Runs in Understudy's own interpreter, never in a worker.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

_DEADLINE_SECONDS = 240.0
_RETURN_SECONDS = 60.0
"""How long a proxyd that died may take to come back."""
_STOPPED_SECONDS = 2.0
"""The same, of one that was stopped in order."""
_SOON_SECONDS = 1.0
"""By when a call has failed that reached nobody."""
_PAUSE_SECONDS = 0.02


def _open_session(request: dict[str, object]) -> dict[str, object]:
    sys.path.insert(0, os.environ["UNDERSTUDY_HOME"])
    import grpc

    from understudy.protos.daemon_pb2 import OpenSessionRequest
    from understudy.protos.daemon_pb2_grpc import DaemonStub
    from understudy.recovery.machine.private_socket import NotOurs, is_answering

    socket = str(request.pop("socket"))
    wanted = OpenSessionRequest(**request)
    options = [("grpc.max_reconnect_backoff_ms", 500)]
    with grpc.insecure_channel(f"unix:{socket}", options=options) as channel:
        stub = DaemonStub(channel)
        began = time.monotonic()
        reached = there = began
        while True:
            asked = time.monotonic()
            try:
                is_answering(Path(socket))
            except NotOurs as problem:
                return {"error": str(problem)}
            try:  # `channel_ready_future` would keep the channel from being closed for 0.2 s
                session = stub.OpenSession(wanted, timeout=_DEADLINE_SECONDS)
                break
            except grpc.RpcError as error:
                now = time.monotonic()
                if error.code() is not grpc.StatusCode.UNAVAILABLE or now > began + _DEADLINE_SECONDS:
                    return {
                        "error": f"proxyd does not answer at {socket}: {error.code().name}: {error.details()}"
                    }
            reached = now if now - asked > _SOON_SECONDS else reached  # it died while it answered
            # One that was stopped has removed its socket; one that starts makes it anew in no time.
            there = now if os.path.exists(socket) else there
            if now > min(reached + _RETURN_SECONDS, there + _STOPPED_SECONDS):
                return {"error": f"proxyd does not answer at {socket}: nobody listens there"}
            time.sleep(_PAUSE_SECONDS)
    if session.error:
        return {"error": session.error}
    device = session.capability
    return {
        "log_directory": session.log_directory,
        "capability": {field.name: getattr(device, field.name) for field in device.DESCRIPTOR.fields},
    }


if __name__ == "__main__":
    json.dump(_open_session(json.load(sys.stdin)), sys.stdout)
