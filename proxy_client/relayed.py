"""Puts a relay between whoever started a worker and the worker, where the run is to be migratable.

The process that the launcher started becomes the relay: its pid, its output, its signals and its exit status
are what the launcher watches. The worker runs below it, in a pid namespace of its own, and holds nothing of
the launcher's (recovery/migration/relay/relaying.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

RELAYS = "UNDERSTUDY_RELAYS"
"""Directory of this job's relays; set by `proxyrun --migratable`."""
RELAY = "UNDERSTUDY_RELAY"
"""Socket of the relay above; set by it."""
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "horovodrun")
LAUNCHER_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "torch.distributed.launcher",
    "accelerate",
    "accelerate.commands",
)
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from understudy.recovery.migration.relay.relaying import main; main(sys.argv[2:])"
)


def go_below_relay() -> None:
    """Does not return where this process is to be the relay."""
    if not wanted(sys.orig_argv, os.environ):
        return
    ours = os.environ.get("UNDERSTUDY_PYTHON") or sys.executable
    home = os.environ["UNDERSTUDY_HOME"]
    # -I: nothing of the user's variables may reach into our interpreter; the worker gets them unchanged.
    os.execv(ours, [ours, "-I", "-c", _START, home, sys.executable, *sys.orig_argv[1:]])


def wanted(command: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Whether this Python is a worker without a relay, rather than what launches workers or helps one."""
    if not variables.get(RELAYS) or variables.get(RELAY):
        return False
    if "--multiprocessing-fork" in command:  # a process of `multiprocessing`, which holds its parent's pipes
        return False
    if variables.get("RANK") or variables.get("LOCAL_RANK"):
        return True
    return not _launches(command)


def _launches(command: Sequence[str]) -> bool:
    for position, word in enumerate(command[1:], 1):
        if word == "-m":
            module = command[position + 1] if position + 1 < len(command) else ""
            return any(module == known or module.startswith(f"{known}.") for known in LAUNCHER_MODULES)
        if not word.startswith("-"):
            return os.path.basename(word) in LAUNCHERS
    return False
