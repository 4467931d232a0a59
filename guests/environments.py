"""The environments of guests, below build/guests: PyTorch, this project's wheel, and what requirements name.

Each file of environments/ is one; programs whose libraries quarrel have different ones.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from catalogue import FOLDER

ROOT = FOLDER.parent
BUILT = ROOT / "build" / "guests"
REQUIREMENTS = FOLDER / "environments"


class Unavailable(RuntimeError):
    """It cannot be made here; the message says why."""


def environment(name: str) -> Path:
    """Its folder, made or brought up to date; raises Unavailable."""
    requirements = REQUIREMENTS / f"{name}.txt"
    folder = BUILT / name
    (wheel,) = (ROOT / "build" / "wheels").glob("*.whl")
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _up_to_date(folder / ".libraries", _digest(requirements), lambda: _make(folder, requirements))
        _up_to_date(folder / ".wheel", _digest(wheel), lambda: _install_wheel(folder, wheel))
    return folder


def version(folder: Path, package: str) -> str:
    """Of a distribution that is installed there; empty: it is none."""
    found = importlib.metadata.distributions(path=[str(*folder.glob("lib/python*/site-packages"))])
    return next((one.version for one in found if one.metadata["Name"].lower() == package.lower()), "")


def _up_to_date(stamp: Path, digest: str, make: Callable[[], None]) -> None:
    if not stamp.exists() or stamp.read_text() != digest:
        stamp.unlink(missing_ok=True)
        make()
        stamp.write_text(digest)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _make(folder: Path, requirements: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _do([sys.executable, "-m", "venv", str(folder)])
    torch = importlib.metadata.version("torch").split("+")[0]
    # By itself and first: nothing that comes later may bring another build of it.
    _pip(folder, f"torch=={torch}")
    _pip(folder, f"torch=={torch}", "-r", str(requirements))


def _install_wheel(folder: Path, wheel: Path) -> None:
    _pip(folder, str(wheel))
    _pip(folder, "--no-deps", "--force-reinstall", str(wheel))


def _pip(folder: Path, *arguments: str) -> None:
    _do(
        [
            str(folder / "bin" / "python"),
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "--quiet",
            *arguments,
        ]
    )


def _do(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
