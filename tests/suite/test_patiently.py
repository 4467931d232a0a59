"""Long commands of the Makefile say how far they are, and what was wrong with them."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from pathlib import Path

import patiently
import pytest
from places import ROOT

SPEAKS = "print('[1/80] Building CXX object a.o\\n  [12/80] Building CXX object b.o\\nother', flush=True)"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_terminal_shows_seconds_and_how_far_the_compiler_is_all_the_time(tmp_path: Path) -> None:
    screen, log = Terminal(), tmp_path / "made" / "log"
    code = f"import time; {SPEAKS}; time.sleep(1.2)"
    assert patiently.run("setup: all", log, python(code), screen, tick_s=0.1) == 0
    shown = screen.getvalue().split("\r")
    assert len(shown) > 5 and shown[-1].endswith("\n")
    assert "setup: all … 1 s, compiled 12 of 80" in {line.strip() for line in shown}
    assert log.read_text().splitlines()[-1] == "other"


def test_anything_else_gets_one_line(tmp_path: Path) -> None:
    screen = io.StringIO()
    assert patiently.run("setup: all", tmp_path / "log", python(SPEAKS), screen, tick_s=0.01) == 0
    assert screen.getvalue() == "setup: all\n"


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        (
            "print('fine\\na.cpp:3: error: none\\nnote: here'); raise SystemExit(3)",
            3,
            "a.cpp:3: error",
        ),
        ("print(*range(100), sep='\\n'); raise SystemExit(1)", 1, "\n99\n"),
        (f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})", 137, "ended with status 137"),
    ],
)
def test_a_command_that_fails_passes_its_status_on_and_shows_what_matters(
    tmp_path: Path, code: str, status: int, said: str
) -> None:
    program = [sys.executable, str(ROOT / "bench" / "patiently.py"), "setup: it", str(tmp_path / "log")]
    done = subprocess.run([*program, *python(code)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status
    assert said in done.stderr and f"{tmp_path / 'log'} has all" in done.stderr
    assert len(done.stderr.splitlines()) <= patiently.SHOWN + 1


def test_the_makefile_runs_what_takes_long_in_this_way_alone() -> None:
    recipes = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("\t")]
    joined = "\n".join(recipes).replace("\\\n", " ").splitlines()
    long = [line for line in joined if "$(PIP)" in line or "pip wheel" in line]
    assert len(long) >= 5 and all("$(PATIENTLY)" in line for line in long)
