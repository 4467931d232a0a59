"""Starts the ranks of a script as torchrun does, without PyTorch: importing it costs more than most scripts.

python start_ranks.py --nproc-per-node COUNT SCRIPT [ARGUMENT ...]
"""

import os
import signal
import socket
import subprocess
import sys
import time

LOOK_S = 0.02


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    count, *command = sys.argv[2:]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    sizes = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    processes = []
    for rank in range(int(count)):
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(
            subprocess.Popen([sys.executable, "-u", *command], env=os.environ | place | sizes | numbers)
        )

    def end_all(number: int = signal.SIGTERM, *_: object) -> None:
        for process in processes:
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end_all)
    failed = 0
    while running := [process for process in processes if process.poll() is None]:
        failed = failed or next((process.returncode for process in processes if process.returncode), 0)
        if failed:
            end_all()
            break
        time.sleep(LOOK_S)
    for process in running:
        process.wait()
    return 1 if failed or any(process.returncode for process in processes) else 0


if __name__ == "__main__":
    sys.exit(main())
