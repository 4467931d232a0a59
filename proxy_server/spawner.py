"""The spawner: imports PyTorch once, then forks a device server whenever proxyd asks for one.

A fork of a process that has PyTorch imported, and never ran a kernel or opened a channel, is ready in
milliseconds and shares its memory. Speaks JSON lines: requests on stdin, answers on stdout.

    → {"spawn": {"socket": PATH, "device": "cuda:0", "gpu": UUID or ""}}
                                                         ← {"spawned": {"pid": 123, "socket": PATH}}
    → {"ended": 123}     ← {"status": 1, or -11 if SIGSEGV ended it, or null if that is not known}
    first line ← {"ready": {...}} or {"error": "sentence"}
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from understudy import replay

NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
}
"""PyTorch's watchdog would end a device server whose peer is gone, or write dumps and sleep for minutes while
a rewind waits for it; here the coordinator decides what happens."""


def nccl_environment(interface: str) -> dict[str, str]:
    """For NCCL, which reads it when it is loaded: its sockets are to be on the data network only."""
    return NCCL_ENVIRONMENT | ({"NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {})


def answer(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def visible_gpu(index: int, count: int) -> str:
    """What CUDA_VISIBLE_DEVICES is to say in the server of device `index`, of a host with `count` GPUs, where
    no UUID is known: numbers may be those of other GPUs once one is lost.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return (names if names != [""] else [str(number) for number in range(count)])[index % count]


MOST_STATUSES = 64
"""That are kept, of the servers that ended last."""
_statuses: dict[int, int] = {}


def reap(*_: object) -> None:
    """Collect dead device servers; proxyd learns of them by pidfd, and may ask how they ended."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            pid, status = ended
            _statuses.pop(pid, None)  # of an older process of that number
            _statuses[pid] = os.waitstatus_to_exitcode(status)
            while len(_statuses) > MOST_STATUSES:
                _statuses.pop(next(iter(_statuses)), None)  # reap() may come amid reap()
    except ChildProcessError:
        return


def _identity(arguments: argparse.Namespace) -> Any:
    from understudy.proxy_server.host_identity import HostIdentity

    if not arguments.certificates:
        return None
    return HostIdentity(Path(arguments.certificates), arguments.host_name)


def enter_gpu(visible: str) -> str:
    """This process sees that one alone: no thread of it can make a context on another rank's; its name there.

    It leaves no core file, as PyTorch and NCCL abort at some errors: a job's log is mapped, which may be most
    of a host's memory.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    return "cuda:0"


def spawn(
    request: dict[str, Any], arguments: argparse.Namespace, capability: Any, gpus: int, proxyd: Any
) -> int:
    """Fork one device server; returns its pid."""
    from understudy.proxy_server import device_server

    pid = os.fork()
    if pid != 0:
        return pid
    try:
        device = str(request["device"])
        if gpus:
            device = enter_gpu(request.get("gpu") or visible_gpu(int(device.partition(":")[2]), gpus))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(2, 1)  # stdout belongs to the spawner's conversation
        os.close(null)
        device_server.serve(
            Path(request["socket"]), device, arguments.daemon_socket, capability, proxyd,
            arguments.grace, arguments.data_address, _identity(arguments),
            Path(arguments.shared_directory) if arguments.shared_directory else None,
            exact=arguments.exact if gpus else "off",
            own_collectives=arguments.own_collectives,
        )  # fmt: skip
    except BaseException as error:  # noqa: BLE001 - a fork must never return into the spawner's loop
        sys.stderr.write(f"understudy: a device server could not start: {error}\n")
    finally:
        os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--daemon-socket", required=True)
    parser.add_argument("--runtime", required=True)
    parser.add_argument("--driver", required=True)
    parser.add_argument("--parent", type=int, required=True, help="proxyd's pid; we die with it")
    parser.add_argument(
        "--grace",
        type=float,
        required=True,
        help="seconds that a server whose proxyd and worker have ended lives",
    )
    parser.add_argument("--data-address", required=True, help="where communicators meet: an IP address")
    parser.add_argument("--data-interface", required=True, help="which has it; empty: none at present")
    parser.add_argument("--certificates", default="", help="directory of this host's; empty: by itself")
    parser.add_argument("--host-name", default="", help="whose they are")
    parser.add_argument("--shared-directory", default="", help="on storage of all hosts; empty: none")
    parser.add_argument("--exact", required=True, help="which kernels GPUs may run, as proxyd's")
    parser.add_argument("--own-collectives", action="store_true", help="on GPUs: our calls of NCCL")
    arguments = parser.parse_args()
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    if arguments.driver == "cuda":
        os.environ.update(nccl_environment(arguments.data_interface))
    from understudy.proxy_server.capability import DriverUnavailable, check_nccl, find_capability

    replay.die_with_parent(arguments.parent)  # the device servers it forked live on
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import torch
        import torch.distributed

        from understudy.proxy_server import _server
        from understudy.proxy_server.guardian import Identity
        from understudy.proxy_server.shared_files import clear_leftovers
        from understudy.replay import process_start_ticks

        installed = torch.__version__.split("+")[0]
        if installed != _server.TORCH_VERSION:
            answer(
                {
                    "error": f"the extension was built for PyTorch {_server.TORCH_VERSION} and PyTorch "
                    f"{installed} is installed; run `make setup` again"
                }
            )
            sys.exit(2)
        capability, uuids = find_capability(arguments.driver)
        if uuids and arguments.own_collectives:
            check_nccl()
    except (DriverUnavailable, ImportError) as error:
        answer({"error": str(error)})
        sys.exit(2)
    if arguments.shared_directory:
        clear_leftovers(Path(arguments.shared_directory), arguments.host_name)
    proxyd = Identity(arguments.parent, process_start_ticks(arguments.parent))
    signal.signal(signal.SIGCHLD, reap)
    answer({"ready": {"torch_version": installed, "capability": capability.__dict__, "gpu_uuids": uuids}})
    for line in sys.stdin:
        request = json.loads(line)
        if "ended" in request:
            reap()
            answer({"status": _statuses.get(request["ended"])})
            continue
        pid = spawn(request["spawn"], arguments, capability, len(uuids), proxyd)
        answer({"spawned": {"pid": pid, "socket": request["spawn"]["socket"]}})


if __name__ == "__main__":
    main()
