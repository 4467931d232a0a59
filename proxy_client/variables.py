"""Every environment variable of ours, and what it may hold.

A value that is not allowed is an error, at the start of a command and at the import of torch in a worker. A
name that is not known gets a warning, because it may be meant for another version.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

PREFIX = "UNDERSTUDY_"
_OF_OTHERS = ("UNDERSTUDY_TEST_", "UNDERSTUDY_PROXYD_")
"""Of tests, and options of proxyd (recovery/config/config_file.py), which looks at those itself."""


@dataclass(frozen=True)
class Variable:
    """A name, what a value must be (completes "must be ..."), and the check of it."""

    name: str
    must_be: str
    allows: Callable[[str], bool]


def _number(least: int, most: int = 2**63 - 1) -> Callable[[str], bool]:
    return lambda text: text.isascii() and text.isdigit() and least <= int(text) <= most


def _one_of(*words: str) -> Callable[[str], bool]:
    return lambda text: text in words


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _is_executable(text: str) -> bool:
    return os.path.isfile(text) and os.access(text, os.X_OK)


VARIABLES = (
    Variable("UNDERSTUDY_SOCKET", "the path of proxyd's socket", lambda text: not text.endswith("/")),
    Variable(
        "UNDERSTUDY_SHARED_MEMORY", "the absolute path of a directory, of a tmpfs",
        lambda text: os.path.isabs(text) and os.path.isdir(text),
    ),
    Variable(
        "UNDERSTUDY_JOB", "a name of letters, digits, - and _, at most 64 of them",
        lambda text: re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text) is not None,
    ),
    Variable("UNDERSTUDY_HOME", "the directory of our packages", os.path.isdir),
    Variable("UNDERSTUDY_PYTHON", "the path of a Python interpreter", _is_executable),
    Variable("UNDERSTUDY_DEVICE_COUNT", "a number of devices, 0 to 1024", _number(0, 1024)),
    Variable("UNDERSTUDY_CAPABILITY", "a JSON object", _is_json_object),
    Variable("UNDERSTUDY_AUTO_COMMIT_BYTES", "a whole number of bytes, at least 1", _number(1)),
    Variable("UNDERSTUDY_SPIN_US", "a whole number of microseconds, 0 to 1000000", _number(0, 1_000_000)),
    Variable("UNDERSTUDY_STATISTICS", "0 or 1", _one_of("0", "1")),
    Variable(
        "UNDERSTUDY_LOG_LEVEL", "debug, info, warning or error", _one_of("debug", "info", "warning", "error")
    ),
    Variable(
        "UNDERSTUDY_HISTORY", "the absolute path of a file",
        lambda text: os.path.isabs(text) and not text.endswith("/") and not os.path.isdir(text),
    ),
    Variable("UNDERSTUDY_SAMPLES", "the absolute path of a directory", os.path.isabs),
    Variable("UNDERSTUDY_SAMPLES_ATTEMPT", "a whole number, at least 1", _number(1)),
    Variable("UNDERSTUDY_RELAYS", "the directory of this job's relays", os.path.isdir),
    Variable("UNDERSTUDY_RELAY", "the path of a relay's socket", lambda text: not text.endswith("/")),
    Variable("UNDERSTUDY_CRIU", "the path of a CRIU that can be started", _is_executable),
    Variable(
        "UNDERSTUDY_TEST_DRIVER", "cpu, cuda or simulated-cuda", _one_of("cpu", "cuda", "simulated-cuda")
    ),
    Variable("UNDERSTUDY_TEST_SHARED_GPU", "0 or 1", _one_of("0", "1")),
    Variable("UNDERSTUDY_TEST_SEED", "a whole number", _number(0)),
)  # fmt: skip


def complaint(environment: Mapping[str, str]) -> str:
    """A sentence about the first value that is not allowed, or nothing. An empty value counts as unset."""
    for variable in VARIABLES:
        value = environment.get(variable.name, "")
        if value and not variable.allows(value):
            return f"{variable.name}={value!r} is not possible: it must be {variable.must_be} (or unset)"
    return ""


def unknown(environment: Mapping[str, str]) -> list[str]:
    """A sentence for each name that looks like ours and is not."""
    names = [variable.name for variable in VARIABLES]
    sentences = []
    for name in sorted(environment):
        if name.startswith(PREFIX) and not name.startswith(_OF_OTHERS) and name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
            sentences.append(
                f"the environment variable {name} is not known and has no effect: is {near} meant?"
            )
    return sentences
