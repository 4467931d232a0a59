"""Opens the worker's session with proxyd, and ends it when the process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from understudy.proxy_client import capability, placement
from understudy.proxy_client.samples import hooks

_CONVERSATION = Path(__file__).with_name("conversation.py")
_TIMEOUT_SECONDS = 300.0

log_directory = ""
"""Of the open session."""


def install() -> None:
    """Tells the C++ half how to open a session. It asks when the device is used for the first time."""
    from understudy.proxy_client import _client

    _client.set_session_opener(_open)
    tell_of_driver()


def tell_of_driver() -> None:
    """What the C++ half decides by."""
    from understudy.proxy_client import _client

    device = capability.current()
    _client.set_driver(device.driver, device.cudnn_version)


def _open(device_index: int) -> str:
    """Asks proxyd for a device; returns the directory of the log.

    A short-lived process of Understudy's own interpreter holds the conversation, so that no gRPC thread or
    socket is ever in the worker: data loaders fork, and CRIU dumps.
    """
    import torch

    _check_openmp(os.environ, torch.get_num_threads())
    place = placement.current(device_index, int(os.environ.get("UNDERSTUDY_DEVICE_COUNT") or 1))
    request = {
        "socket": os.environ.get("UNDERSTUDY_SOCKET", ""),
        "job": os.environ["UNDERSTUDY_JOB"],
        "rank": place.rank,
        "world": place.world,
        "device_index": device_index,
        "worker_pid": os.getpid(),
        "pid_namespace": os.stat("/proc/self/ns/pid").st_ino,
        "relay": os.environ.get("UNDERSTUDY_RELAY", ""),
        "torch_version": torch.__version__,
        "threads": torch.get_num_threads(),
        "nccl": _nccl(os.environ),
    }
    reply = _converse(request)
    if reply.get("error"):
        raise RuntimeError(str(reply["error"]))
    capability.update(reply["capability"])
    tell_of_driver()
    global log_directory
    log_directory = str(reply["log_directory"])
    hooks.begin_session(place)
    return log_directory


def _nccl(environment: Mapping[str, str]) -> list[str]:
    """Those of the variables that proxyd may refuse (--exact strict); as text that can be sent."""
    there = (f"{name}={environment[name]}" for name in ("NCCL_ALGO", "NCCL_PROTO") if name in environment)
    return [one.encode(errors="replace").decode() for one in there]


def _check_openmp(environment: Mapping[str, str], threads: int) -> None:
    """Of what OpenMP reads as it is loaded, device servers have the defaults; raises RuntimeError."""
    if environment.get("OMP_DYNAMIC", "").strip().lower() == "true":
        raise RuntimeError(
            "understudy: OMP_DYNAMIC=true lets the number of threads, and with it the bits of sums, depend "
            "on the machine's load: a replay would not compute the same; unset it"
        )
    limit = environment.get("OMP_THREAD_LIMIT", "").strip()
    if limit.isdecimal() and int(limit) < threads:
        raise RuntimeError(
            f"understudy: OMP_THREAD_LIMIT={limit} is less than the {threads} threads of PyTorch, and device "
            f"servers cannot have it; set OMP_NUM_THREADS={limit} instead"
        )


def _converse(request: dict[str, object]) -> dict[str, object]:
    interpreter = os.environ.get("UNDERSTUDY_PYTHON") or sys.executable
    done = subprocess.run(
        [interpreter, "-P", str(_CONVERSATION)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=_environment(),
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    try:
        reply = json.loads(done.stdout)
    except ValueError:
        reply = None
    if not isinstance(reply, dict):
        raise RuntimeError(
            f"understudy could not talk to proxyd: {interpreter} {_CONVERSATION} ended with "
            f"{done.returncode}: {done.stderr.strip() or 'no message'}"
        )
    return reply


def _environment() -> dict[str, str]:
    """Ours, but such that the conversation is an ordinary Python."""
    boot = str(Path(__file__).with_name("boot"))
    environment = {name: value for name, value in os.environ.items() if name != "UNDERSTUDY_JOB"}
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path != boot]
    environment.pop("PYTHONPATH", None)
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def end() -> None:
    """Ends the session while the interpreter is still whole. Runs at exit, also after an exception."""
    client = sys.modules.get("understudy.proxy_client._client")
    if client is None or not client.session_is_open():
        return
    try:
        try:
            client.drain_autograd_threads()
            hooks.end_session()
        finally:
            client.close_session()
    except Exception as error:  # noqa: BLE001 - whatever the device call was, it failed after the script's last look
        sys.stderr.write(f"understudy: the script ended, but its device had failed: {error}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        # An exit handler cannot change the exit status in any other way, and a training run whose last calls
        # failed must not report success.
        os._exit(1)
