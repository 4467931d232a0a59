"""Runs a long command of the Makefile; nobody looks at a screen on which nothing happens for 5 seconds.

    python bench/patiently.py WHAT LOG COMMAND…

A terminal shows `WHAT … 12 s`, kept up to date; anything else gets a line at the start, then one a minute.
How far the compiler is (`[12/80] Building …`) is told in either. All that the command says goes to LOG; of a
command that fails, what matters of it is shown. The exit status is the command's.
"""

from __future__ import annotations

import re
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

TICK_S, LINE_S = 1.0, 60.0
"""Between two updates of a terminal, and two lines elsewhere."""
COMPILED = re.compile(r"\s*\[(\d+)/(\d+)\] ")
WRONG = re.compile(r"error|FAILED", re.IGNORECASE)
SHOWN = 25
"""Lines of a command that failed."""


class Screen:
    """One line that is rewritten, where that is possible."""

    def __init__(self, what: str, out: IO[str], now: float) -> None:
        self._what, self._out, self._begun, self._said = what, out, now, now
        self._terminal = out.isatty()
        self._progress = ""
        if not self._terminal:
            self._line(what)

    def tell(self, progress: str) -> None:
        self._progress = f", compiled {progress}"

    def look(self, now: float) -> None:
        """Once a tick."""
        if self._terminal:
            self._line(f"\r{self._text(now)}", end="")
        elif now - self._said >= LINE_S:
            self._said = now
            self._line(self._text(now))

    def end(self, now: float) -> None:
        if self._terminal:
            self._line(f"\r{self._text(now)}")

    def _text(self, now: float) -> str:
        return f"{self._what} … {now - self._begun:.0f} s{self._progress}"

    def _line(self, text: str, end: str = "\n") -> None:
        self._out.write(text + end)
        self._out.flush()


def run(what: str, log: Path, command: list[str], out: IO[str], tick_s: float = TICK_S) -> int:
    """Its exit status, or 128 + the signal that ended it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    screen = Screen(what, out, time.monotonic())
    with (
        log.open("wb") as file,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
        ) as process,
        selectors.DefaultSelector() as selector,
    ):
        assert process.stdout is not None
        selector.register(process.stdout, selectors.EVENT_READ)
        rest, ended = b"", False
        while not ended:
            if selector.select(tick_s):
                piece = process.stdout.read(1 << 16)
                file.write(piece)
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if found := COMPILED.match(line.decode(errors="replace")):
                        screen.tell(f"{found[1]} of {found[2]}")
                ended = not piece
            screen.look(time.monotonic())
    screen.end(time.monotonic())
    status = process.returncode
    return 128 - status if status < 0 else status


def what_matters(text: str) -> list[str]:
    """The lines around the first that speaks of an error; else the last ones."""
    lines = text.splitlines()
    wrong = next((number for number, line in enumerate(lines) if WRONG.search(line)), len(lines))
    first = max(0, min(wrong - 2, len(lines) - SHOWN))
    return lines[first : first + SHOWN]


def main() -> int:
    """Entry point."""
    what, log, *command = sys.argv[1:]
    try:
        status = run(what, Path(log), command, sys.stdout)
    except KeyboardInterrupt:  # the command has got it as well
        return 128 + signal.SIGINT
    if status:
        sys.stderr.write("\n".join([*what_matters(Path(log).read_text(errors="replace")), ""]))
        sys.stderr.write(f"{what}: ended with status {status}; {log} has all that was said\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
