"""Starts the ranks of a script as torchrun does, without PyTorch: importing it costs more than most scripts.

    python start_ranks.py --nproc-per-node COUNT SCRIPT [ARGUMENT ...]
"""  # fmt: skip

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys

_taken: list[socket.socket] = []


def free_port(host: str = "127.0.0.1") -> int:
    """One that nobody listens at now, nor will before this process ends.

    It is none of those that the kernel gives to connections, which may come before somebody listens; and no
    other process that asks here gets it (an abstract socket says that it is taken).
    """
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first = int(file.read().split()[0])
    ports = range(max(1024, first - 12_000), first)
    for port in random.SystemRandom().sample(ports, len(ports)):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0understudy-test-port-{port}")
            with socket.socket() as probe:
                probe.bind((host, port))
        except OSError:
            claim.close()
            continue
        _taken.append(claim)
        return port
    raise OSError("every port is taken")


def main() -> int:
    count, *command = sys.argv[2:]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    sizes = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    running: dict[int, subprocess.Popen[bytes]] = {}

    def end_all(*_: object) -> None:
        for pid in running:  # none of them has been waited for
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end_all)
    for rank in range(int(count)):
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = subprocess.Popen(
            [sys.executable, "-u", *command], env=os.environ | place | sizes | numbers
        )  # fmt: skip
        running[process.pid] = process
    failed = False
    while running:
        pid, status = os.wait()
        running.pop(pid).returncode = os.waitstatus_to_exitcode(status)
        if status and not failed:
            failed = True
            end_all()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
