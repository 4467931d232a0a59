"""Command lines of ours in the documentation and in deploy/, and whether their programs would take them."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import typer
from training_run import ROOT

from understudy.recovery.proxyd import settings_of
from understudy.recovery.proxyrun import parse
from understudy.recovery.recoveryctl import app

OPERATIONS = ROOT / "docs" / "operations.md"
PROGRAMS = ("proxyd", "proxyrun", "recoveryctl")
STORED = "/var/lib/understudy/snapshots"


def of_page(path: Path) -> list[str]:
    """Indented blocks, and code in sentences that has arguments."""
    text = path.read_text()
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    lines += re.findall(r"`([^`\n]+ [^`\n]+)`", text)
    return [
        line[line.index(name) :]
        for line in lines
        for name in PROGRAMS
        if re.search(rf"(^| -- ){name} ", line)
    ]


def of_script(path: Path) -> list[str]:
    """Commands that begin with one of our programs, lines that go on put together."""
    lines = path.read_text().replace("\\\n", " ").splitlines()
    found = [line.strip() for line in lines if not line.startswith("#")]
    return [
        line[line.index(name) :]
        for line in found
        for name in PROGRAMS
        if re.match(rf"(srun .*)?{name} ", line)
    ]


def check(line: str, folder: Path) -> None:
    """Parses a command line as its program does, storage being below `folder`; raises if it is refused."""
    words = shlex.split(
        os.path.expandvars(line.replace(STORED, f"{folder}/stored").replace("$HOME", str(folder)))
    )
    program, arguments = words[0], words[1:]
    if program == "proxyd":
        settings_of(arguments if "--devices" in arguments else ["--devices", "cpu:1", *arguments])
    elif program == "proxyrun":
        parse(arguments)
    else:
        _check_control(arguments)


def _check_control(arguments: list[str]) -> None:
    command = typer.main.get_command(app)
    context = command.make_context("recoveryctl", arguments)
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        assert command is not None
        context = command.make_context(name, rest, parent=context)
