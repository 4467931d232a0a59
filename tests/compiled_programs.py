"""Programs in C++ that tests compile from our sources."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WORKLOADS = ROOT / "tests" / "workloads"
COMPILER = os.environ.get("CXX", "g++")
THREAD_SANITIZER = ("-fsanitize=thread", "-O1", "-g")
RACE = "#include <thread>\nint n; int main() { std::thread t([] { n++; }); n++; t.join(); }\n"


def compiled(program: Path, source: str, *flags: str, first: Path = ROOT, more: tuple[str, ...] = ()) -> Path:
    """A program of tests/workloads; `more`: sources from the repository.

    Headers and sources are looked for in `first`, before the repository.
    """
    places = [f"-I{first}", f"-I{ROOT}", f"-I{WORKLOADS}", "-isystem", str(ROOT / "third_party")]
    found = (first / name if (first / name).exists() else ROOT / name for name in more)
    sources = [str(WORKLOADS / source), *map(str, found)]
    command = [COMPILER, "-std=c++20", *flags, *places, *sources, "-o", str(program), "-pthread"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


def need_thread_sanitizer(folder: Path) -> None:
    """Skips the test where the compiler's does not work: it must see a race."""
    (folder / "race.cpp").write_text(RACE)
    build = [COMPILER, *THREAD_SANITIZER, "-pthread", str(folder / "race.cpp"), "-o", str(folder / "race")]
    if subprocess.run(build, capture_output=True).returncode != 0:
        pytest.skip(f"{COMPILER} has no ThreadSanitizer")
    seen = subprocess.run([folder / "race"], capture_output=True, text=True)
    if "data race" not in seen.stderr:
        pytest.skip(f"ThreadSanitizer does not work here: {seen.stderr[:200]}")
