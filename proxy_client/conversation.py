"""One conversation with proxyd: a JSON request on stdin, a JSON reply on stdout.

Runs in Understudy's own interpreter, never in a worker.
"""

from __future__ import annotations

import json
import os
import sys
import time

_DEADLINE_SECONDS = 240.0
_RETURN_SECONDS = 60.0
"""How long a proxyd that died may take to come back."""
_STOPPED_SECONDS = 2.0
"""The same, of one that was stopped in order."""


def _open_session(request: dict[str, object]) -> dict[str, object]:
    sys.path.insert(0, os.environ["UNDERSTUDY_HOME"])
    import grpc

    from understudy.protos import control_pb2, control_pb2_grpc

    socket = str(request.pop("socket"))
    wanted = control_pb2.OpenSessionRequest(**request)
    options = [("grpc.max_reconnect_backoff_ms", 500)]
    with grpc.insecure_channel(f"unix:{socket}", options=options) as channel:
        stub = control_pb2_grpc.DaemonStub(channel)
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while True:
            try:
                # One that was stopped has removed its socket; one that starts makes it anew in no time.
                patience = _RETURN_SECONDS if os.path.exists(socket) else _STOPPED_SECONDS
                grpc.channel_ready_future(channel).result(patience)
                session = stub.OpenSession(wanted, timeout=_DEADLINE_SECONDS)
                break
            except grpc.FutureTimeoutError:
                return {"error": f"proxyd does not answer at {socket}: nobody listens there"}
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                    return {
                        "error": f"proxyd does not answer at {socket}: {error.code().name}: {error.details()}"
                    }
    if session.error:
        return {"error": session.error}
    device = session.capability
    return {
        "log_directory": session.log_directory,
        "capability": {field.name: getattr(device, field.name) for field in device.DESCRIPTOR.fields},
    }


if __name__ == "__main__":
    json.dump(_open_session(json.load(sys.stdin)), sys.stdout)
