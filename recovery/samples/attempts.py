"""Each start of a job on a directory of samples is an attempt: a number, and a file that tells of it."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from understudy.recovery.base.errors import BadInput

_NAME = re.compile(r"attempt-(\d{5})(?:\.(.+))?\.json")
MOST = 99_999


@dataclass(frozen=True)
class Attempt:
    """Where workers write, and under which number, from 1."""

    directory: Path
    number: int


def begin_attempt(directory: Path, job: str, command: Sequence[str], hosts: int) -> Attempt:
    """One more than any that there was; raises BadInput where it cannot be written.

    Ranks of one attempt must have one number. So where a job spans hosts, which begin it at different times,
    each of them counts its own.
    """
    directory = directory.absolute()
    host = socket.gethostname().replace("/", "_")
    mark = f".{host}" if hosts > 1 else ""
    told = {"job": job, "command": list(command), "hosts": hosts, "host": host, "began": time.time()}
    try:
        directory.mkdir(0o700, parents=True, exist_ok=True)
        number = max(_numbers(directory, host if mark else ""), default=0)
        while number < MOST:
            number += 1
            if _made(directory / f"attempt-{number:05d}{mark}.json", json.dumps(told)):
                return Attempt(directory, number)
    except OSError as problem:
        raise BadInput(
            f"--samples {directory}: nothing can be written there: {problem.strerror or problem}"
        ) from None
    raise BadInput(f"--samples {directory}: it has {MOST} attempts already; name another directory")


def _numbers(directory: Path, host: str) -> list[int]:
    """The numbers of attempts so far; with `host`, of that one's alone."""
    found = [_NAME.fullmatch(path.name) for path in directory.iterdir()]
    return [int(one[1]) for one in found if one and (not host or one[2] == host)]


def _made(path: Path, content: str) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:  # of a proxyrun that begins at the same moment
        return False
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(content)
    return True
