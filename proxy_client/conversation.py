"""One conversation with proxyd: a JSON request on stdin, a JSON reply on stdout.

Runs in Understudy's own interpreter, never in a worker.
"""

from __future__ import annotations

import json
import os
import sys

_DEADLINE_SECONDS = 240.0


def _open_session(request: dict[str, object]) -> dict[str, object]:
    sys.path.insert(0, os.environ["UNDERSTUDY_HOME"])
    import grpc

    from protos import control_pb2, control_pb2_grpc

    socket = str(request.pop("socket"))
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        stub = control_pb2_grpc.DaemonStub(channel)
        try:
            session = stub.OpenSession(control_pb2.OpenSessionRequest(**request), timeout=_DEADLINE_SECONDS)
        except grpc.RpcError as error:
            return {"error": f"proxyd does not answer at {socket}: {error.code().name}: {error.details()}"}
    if session.error:
        return {"error": session.error}
    device = session.capability
    return {
        "log_directory": session.log_directory,
        "capability": {field.name: getattr(device, field.name) for field in device.DESCRIPTOR.fields},
    }


if __name__ == "__main__":
    json.dump(_open_session(json.load(sys.stdin)), sys.stdout)
