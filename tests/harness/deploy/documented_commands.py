"""Command lines of ours in the documentation and in deploy/: whether their programs would take them, and
whether they say what a page shows.

In a block of `console` a line that begins with `$ ` is a command, and what follows is what it says. There `…`
stands for anything within a line, and alone on a line for any number of lines.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import typer
from terminal import Background, Terminal
from training_run import ROOT

from understudy.recovery.config.proxyd_settings import settings_of
from understudy.recovery.config.proxyrun_options import parse
from understudy.recovery.recoveryctl import app

OPERATE = tuple(
    ROOT / "docs" / "operate" / f"{page}.md"
    for page in (
        "install", "status", "alerts", "drills", "storage", "maintenance", "migration", "hosts",
        "lost-hosts", "security",
    )
)  # fmt: skip
"""For whoever operates it, in an order in which their commands can be typed one after another."""
TUTORIAL = ROOT / "docs" / "tutorial.md"
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


def _filled_in(line: str, folder: Path) -> str:
    """As the shell, Slurm or the kubelet would."""
    values = {"$HOME": str(folder), "$(JOB)": "night-7", "$SLURM_JOB_ID": "271"}
    for name, value in values.items():
        line = line.replace(name, value)
    return line


def check(line: str, folder: Path) -> None:
    """Parses a command line as its program does, storage being below `folder`; raises if it is refused."""
    words = shlex.split(os.path.expandvars(_filled_in(line.replace(STORED, f"{folder}/stored"), folder)))
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


ANYTHING = "…"
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CHAPTER = re.compile(r"^## (\d+) (.+)$", re.MULTILINE)
LOOKS = re.compile(
    r"recoveryctl (status|history|hosts|preflight|snapshots list|snapshots verify)\b|curl |grep "
)
"""Commands that a person types again until they show what is awaited; nothing changes by them."""
AWAITED_S = 60.0
AGAIN_S = 0.1


@dataclass(frozen=True)
class Step:
    """A command of a page, and what it shows."""

    command: str
    shown: str

    @property
    def in_background(self) -> bool:
        return self.command.endswith("&")

    def is_what(self, said: str) -> bool:
        return bool(self._pattern().fullmatch(_trimmed(said)))

    def begins(self, said: str) -> int:
        """So many lines of it are what the page shows; -1: that is not its beginning."""
        found = self._pattern().match(_trimmed(said))
        return found.group().count("\n") if found else -1

    def _pattern(self) -> re.Pattern[str]:
        """Of lines without spaces at their ends."""
        lines = (
            "(?:.*\n)*?"
            if line.strip() == ANYTHING
            else ".*?".join(re.escape(part) for part in line.rstrip().split(ANYTHING)) + "\n"
            for line in self.shown.splitlines()
        )
        return re.compile("".join(lines))


@dataclass(frozen=True)
class Chapter:
    number: int
    title: str
    lines: int
    steps: list[Step]


def chapters(page: str) -> list[Chapter]:
    """Of headings with numbers; `lines` are those of its text, without empty ones."""
    _, *parts = CHAPTER.split(page)
    return [
        Chapter(int(number), title, _lines(text), steps_of(text))
        for number, title, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    ]


def _lines(text: str) -> int:
    return sum(1 for line in text.splitlines() if line.strip())


def steps_of(text: str) -> list[Step]:
    """All commands of its blocks of `console`."""
    found = []
    for block in CONSOLE.findall(text):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            found.append(Step(command.strip(), shown))
    return found


class Differs(AssertionError):
    """A command did not say what the page shows."""


def follow(steps: list[Step], terminal: Terminal, awaited_s: float = AWAITED_S) -> None:
    """Type what a page has, and compare; `awaited_s`: for what other processes do.  Raises Differs.

    A command that fails is followed by `echo $?` on the page, or it was not meant to.
    """
    for step, then in zip(steps, [*steps[1:], None], strict=True):
        may_fail = then is not None and then.command == "echo $?"
        if step.in_background:
            terminal.run(step.command)
            _await(step, terminal.background[-1], awaited_s)
        else:
            _type(step, terminal, may_fail, awaited_s)


def _await(step: Step, job: Background, awaited_s: float) -> None:
    """What it shows is the beginning of what it says."""

    def begins() -> bool:
        if (lines := step.begins(job.new_output())) >= 0:
            job.take_lines(lines)
        return lines >= 0

    if not _until(begins, awaited_s):
        raise Differs(_difference(step, job.new_output()))


def _type(step: Step, terminal: Terminal, may_fail: bool, awaited_s: float) -> None:
    said, status = "", 0

    def says() -> bool:
        nonlocal said, status
        ran = terminal.run(step.command)
        said, status = ran.output, ran.status
        if step.command in ("wait", "fg"):  # shows what jobs have said since
            said += "".join(job.take() for job in terminal.background)
        return step.is_what(said) and (may_fail or status == 0)

    if not (_until(says, awaited_s) if LOOKS.match(step.command) else says()):
        raise Differs(_difference(step, said) + f"(exit status {status})")


def _until(holds: Callable[[], bool], awaited_s: float) -> bool:
    deadline = time.monotonic() + awaited_s
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(AGAIN_S)  # what other processes do has no event here
    return held


def _trimmed(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def _difference(step: Step, said: str) -> str:
    return f"$ {step.command}\nshows on the page:\n{step.shown}\nbut said:\n{said}"
