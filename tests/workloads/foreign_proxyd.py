"""A proxyd of somebody else: PATH UID.  Says `ready`, then the name of each method that it is asked for.

It becomes another user once gRPC is loaded, which that user may not read, and listens only then.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc


class Curious(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers nothing, and would have learned everything."""

    def service(self, details: Any) -> None:
        print(details.method, flush=True)


def main(path: Path, uid: int) -> None:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    path.parent.mkdir(exist_ok=True)
    server = grpc.server(ThreadPoolExecutor(1), handlers=[Curious()])
    server.add_insecure_port(f"unix:{path}")
    path.chmod(0o777)
    server.start()
    print("ready", flush=True)
    sys.stdin.read()
    server.stop(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
