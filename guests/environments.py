"""The environments of guests, below build/guests: PyTorch, this project's wheel, and what requirements name.

Each file of environments/ is one; programs whose libraries quarrel have different ones.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
from pathlib import Path

from catalogue import FOLDER

from understudy.campaigns.running.environments import Unavailable, build, pip, up_to_date

ROOT = FOLDER.parent
BUILT = ROOT / "build" / "guests"
REQUIREMENTS = FOLDER / "environments"


__all__ = ["Unavailable", "environment", "version"]


def environment(name: str) -> Path:
    """Its folder, made or brought up to date; raises Unavailable."""
    requirements = REQUIREMENTS / f"{name}.txt"
    folder = BUILT / name
    (wheel,) = (ROOT / "build" / "wheels").glob("*.whl")
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        up_to_date(
            folder / ".libraries", _digest(requirements), lambda: build(folder, "-r", str(requirements))
        )
        up_to_date(folder / ".wheel", _digest(wheel), lambda: _install_wheel(folder, wheel))
    return folder


def version(folder: Path, package: str) -> str:
    """Of a distribution that is installed there; empty: it is none."""
    found = importlib.metadata.distributions(path=[str(*folder.glob("lib/python*/site-packages"))])
    return next((one.version for one in found if one.metadata["Name"].lower() == package.lower()), "")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _install_wheel(folder: Path, wheel: Path) -> None:
    pip(folder, str(wheel))
    pip(folder, "--no-deps", "--force-reinstall", str(wheel))
