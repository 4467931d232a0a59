"""The C++ programs of tests/csrc: CMake builds one when a test asks for it and a source of it has changed."""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BUILT = ROOT / "build" / "test_programs"
COMPILER = os.environ.get("CXX", "g++")
SCRIPTS = Path(sys.prefix, "bin")
TOOLS = os.pathsep.join([str(SCRIPTS), os.environ.get("PATH", os.defpath)])


class CannotBuildError(Exception):
    """Something that a program needs is not on this machine; the message is a sentence."""


def program(name: str) -> Path:
    """A program or library, by its path in the build folder; where it cannot be built the test is skipped.

    Raises RuntimeError, with the compiler's words, if a source is wrong.
    """
    try:
        build(name)
    except CannotBuildError as error:
        pytest.skip(str(error))
    return BUILT / name


@functools.cache
def build(name: str = "all") -> None:
    """Builds a program where it is missing or older than a source; only one process at a time builds any.

    No more than the one that is asked for: all of them take a busy machine as long as a test may take.
    """
    for tool in ("cmake", "ninja", COMPILER.split()[0]):
        if shutil.which(tool, path=TOOLS) is None:
            raise CannotBuildError(f"The C++ programs of the tests need {tool}, which is not here.")
    BUILT.mkdir(parents=True, exist_ok=True)
    with open(f"{BUILT}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _configure()
        left_out = BUILT / "left_out" / name
        if left_out.exists():
            raise CannotBuildError(left_out.read_text())
        _run("ninja", "-C", str(BUILT), name)


def _configure() -> None:
    """Makes the build folder: anew for another compiler or PyTorch, else where CMakeLists.txt has changed."""
    found = importlib.util.find_spec("torch")
    torch = found.submodule_search_locations[0] if found and found.submodule_search_locations else ""
    words = ["cmake", "--fresh", "-S", str(ROOT / "tests" / "csrc"), "-B", str(BUILT), "-G", "Ninja"]
    words += [f"-DTORCH_DIR={torch}", f"-DPython_EXECUTABLE={SCRIPTS / 'python'}"]
    configured = BUILT / "configured"
    wanted = f"CXX={COMPILER} {' '.join(words)}\n"
    if configured.exists() and configured.read_text() == wanted:
        _run("ninja", "-C", str(BUILT), "build.ninja")
    else:
        _run(*words)
        configured.write_text(wanted)


def _run(*words: str) -> None:
    environment = {**os.environ, "PATH": TOOLS, "CXX": COMPILER}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stdout[-8000:]}{done.stderr[-8000:]}")


if __name__ == "__main__":  # make test-binaries
    build()
