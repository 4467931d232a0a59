"""deploy/systemd's unit as systemd reads it, as far as tests carry it out themselves."""

from __future__ import annotations

import os
import shlex
from collections import defaultdict
from pathlib import Path

from training_run import BIN, ROOT

SYSTEMD = ROOT / "deploy" / "systemd"
UNIT = SYSTEMD / "understudy-proxyd.service"
INSTALLED_BIN = "/opt/understudy/bin"


def settings(unit: Path = UNIT) -> dict[str, list[str]]:
    """Name -> values, in the order of the file; sections share no names."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in unit.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found[name].append(value)
    return found


def environment_file(path: Path) -> dict[str, str]:
    """EnvironmentFile=: NAME=VALUE lines."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def of_this_installation(text: str) -> str:
    """With the programs of this installation."""
    return text.replace(INSTALLED_BIN, os.fspath(BIN))


def exec_start(runtime: Path, environment: dict[str, str]) -> list[str]:
    """The command: `runtime` for %t, an unbraced variable as so many words as it has."""
    (line,) = settings()["ExecStart"]
    words: list[str] = []
    for word in of_this_installation(line).replace("%t", os.fspath(runtime)).split():
        words += shlex.split(environment[word[1:]]) if word.startswith("$") else [word]
    return words
