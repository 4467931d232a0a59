"""What is told of a worker before it is sent to another host, and whether it can live there."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.job_names import JOB_NAME
from understudy.recovery.machine.criu import Criu, find
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY
from understudy.recovery.membership.this_host import Machine, this_machine
from understudy.recovery.migration.preflight.survey import trouble_of_machine

VERSION = 1
OUTPUTS = ("stdout", "stderr")
MOST_PROCESSES = 4096
MOST_BYTES = 1 << 44
LONGEST_TEXT = 4096
MOST_RANKS = 1 << 20
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_MOVE = re.compile(r"[0-9a-f]{32}")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}")
_LOG = re.compile(r"(understudy-(\d+)-\d+-\d+-\w+)/([A-Za-z0-9_-]{1,64})/rank-(\d+)(?:-\d+)?")
_RELAY = re.compile(r"(understudy-(\d+)-\d+-\d+-\w+)/r\.[0-9a-f]{8}/r\w{1,32}")


class Refusal(Exception):
    """This host does not take the worker; its text is a sentence."""


@dataclass(frozen=True)
class Here:
    """What this host offers."""

    host: str
    machine: Machine
    torch_version: str
    criu: Criu | None

    @classmethod
    def look(cls, host: str, torch_version: str) -> Here:
        """At this machine; takes a moment."""
        return cls(host, this_machine(), torch_version, find())


@dataclass(frozen=True)
class Places:
    """Where its files go."""

    runtime: Path
    log: Path
    relay: Path


def places(header: pb.WorkerHeader) -> Places:
    """Below shared memory, in directories as ours are named, and nowhere else; raises Refusal."""
    log, relay = (_below(path, form) for path, form in ((header.directory, _LOG), (header.relay, _RELAY)))
    if log[1] != relay[1] or int(log[2]) != os.getuid():
        raise Refusal("its directories are not of one runtime directory of ours")
    if log[3] != header.job or int(log[4]) != header.rank:
        raise Refusal("its log is not that of its rank")
    return Places(SHARED_MEMORY / log[1], SHARED_MEMORY / log[0], SHARED_MEMORY / relay[0])


def _below(text: str, form: re.Pattern[str]) -> re.Match[str]:
    prefix = f"{SHARED_MEMORY}/"
    found = form.fullmatch(text.removeprefix(prefix)) if text.startswith(prefix) else None
    if found is None:
        raise Refusal(f"{text[:200]!r} is no directory of ours below {SHARED_MEMORY}")
    return found


def check_form(header: pb.WorkerHeader) -> Places:
    """Raises Refusal."""
    if header.version != VERSION:
        raise Refusal(f"it is sent in version {header.version}, and {VERSION} is spoken here")
    forms = ((_MOVE, header.move), (JOB_NAME, header.job), (_HOST, header.home))
    numbers = (
        0 < header.world <= MOST_RANKS, 0 <= header.rank < header.world, header.threads >= 0,
        header.image_bytes <= MOST_BYTES, header.log_bytes <= MOST_BYTES, len(header.more) <= 1 << 20,
    )  # fmt: skip
    if not all(form.fullmatch(text) for form, text in forms) or not all(numbers):
        raise Refusal("what is told of it makes no sense")
    pids = set(header.pids)
    wanted = {header.worker, *header.stopped}
    if not wanted <= pids or len(pids) > MOST_PROCESSES or not all(1 < pid < 1 << 22 for pid in pids):
        raise Refusal("its processes are not named as they should be")
    return places(header)


def is_home(header: pb.WorkerHeader, host: str) -> bool:
    """Whether its relay lives on that host."""
    return bool(header.home == host and not header.orphaned)


def check_fit(header: pb.WorkerHeader, here: Here) -> None:
    """Whether it can go on here, bit for bit; raises Refusal."""
    texts = (header.working_directory, header.program, header.kernel, header.torch_version,
             header.criu_version, *header.processor_features)  # fmt: skip
    if not all(len(text) <= LONGEST_TEXT for text in texts):
        raise Refusal("what is told of it makes no sense")
    if reason := trouble_of_machine(here.criu):
        raise Refusal(reason)
    assert here.criu is not None
    theirs, ours = _version(header.criu_version), here.criu.version
    if theirs[:2] > ours[:2]:
        raise Refusal(f"it was dumped by CRIU {header.criu_version}, and here is {here.criu.version_text}")
    if header.torch_version.split("+")[0] != here.torch_version.split("+")[0]:
        raise Refusal(f"it runs PyTorch {header.torch_version}, and here is {here.torch_version}")
    _check_kernel(header.kernel, here.machine.kernel)
    if missing := sorted(set(header.processor_features) - set(here.machine.features)):
        raise Refusal(f"this host's processor ({here.machine.processor}) lacks {', '.join(missing[:5])}")
    if not os.path.isdir(header.working_directory):
        raise Refusal(f"its working directory {header.working_directory} is not here")
    if not os.access(header.program, os.X_OK):
        raise Refusal(f"its program {header.program} is not here")


def _check_kernel(theirs: str, ours: str) -> None:
    there, here = theirs.split(), ours.split()
    if len(there) != 3 or there[0] != here[0] or there[2] != here[2]:
        raise Refusal(f"it ran on {theirs[:100] or 'an unknown kernel'}, and here is {ours}")
    if _version(there[1])[:2] > _version(here[1])[:2]:
        raise Refusal(f"it ran on kernel {there[1]}, and here is an older one, {here[1]}")


def _version(text: str) -> tuple[int, ...]:
    found = re.match(r"\d{1,9}(\.\d{1,9})*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def is_signal(number: int) -> bool:
    """Whether the kernel knows it."""
    return number in signal.valid_signals()
