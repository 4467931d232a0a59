"""Virtual environments for packages of others that must not get into ours: PyTorch first, as it is here.

Below build/ of a checkout, else in the user's cache. `understudy` in them is the one that runs: a link to it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

NEEDED = ("numpy>=1.26", "scikit-learn>=1.5,<2")
"""By the trainings: the digits are scikit-learn's."""
PEERS: Mapping[str, Sequence[str]] = {
    # Not torchft 0.2.0: with Gloo a group whose peer dies in an all-reduce dies too, by an assertion in the
    # hook of its DistributedDataParallel; this one goes on.
    "torchft": ("torchft-nightly==2026.10.26", *NEEDED),
    "nvrx": ("nvidia-resiliency-ext==0.4.1", *NEEDED),
}
"""What is installed behind PyTorch, by the name of the variant."""
PACKAGE = "understudy"
LIMIT_S = 1200.0
"""For one call of pip, which downloads up to a few GB where PyTorch is built for CUDA."""
_refused: dict[str, str] = {}
"""Why an environment could not be made by this process: dozens of runs need not try again."""


class Unavailable(RuntimeError):
    """It cannot be made here; the message, one sentence, says why."""


def make(name: str) -> Path:
    """The folder of a peer's environment, made or brought up to date. Raises Unavailable."""
    if name in _refused:
        raise Unavailable(_refused[name])
    requirements = PEERS[name]
    folder = place() / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            wanted = hashlib.sha256(repr((torch_here(), sys.version, requirements)).encode()).hexdigest()
            up_to_date(folder / ".complete", wanted, lambda: build(folder, *requirements))
            _link_package(folder)
    except (Unavailable, OSError) as problem:
        _refused[name] = f"{requirements[0]} cannot be installed here: {problem}"
        raise Unavailable(_refused[name]) from None
    return folder


def place() -> Path:
    """Where all of them go."""
    checkout = Path(sys.prefix).parent
    if (checkout / "campaigns" / "running").is_dir():
        return checkout / "build" / "campaign-environments"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / PACKAGE / "campaign-environments"


def build(folder: Path, *requirements: str) -> None:
    """Anew, with PyTorch and what pip is told besides. Raises Unavailable."""
    shutil.rmtree(folder, ignore_errors=True)
    _do([sys.executable, "-m", "venv", str(folder)])
    torch = f"torch=={torch_here()}"
    # By itself and first: nothing that comes later may bring another build of it.
    pip(folder, torch)
    pip(folder, torch, *requirements)


def pip(folder: Path, *arguments: str) -> None:
    """Install in an environment. Raises Unavailable with pip's last line."""
    options = ("--disable-pip-version-check", "install", "--quiet", "--no-input")
    _do([str(folder / "bin" / "python"), "-m", "pip", *options, *arguments])


def up_to_date(stamp: Path, digest: str, make_it: Callable[[], None]) -> None:
    """Make it unless the stamp says that this has been made; the stamp comes last."""
    if not stamp.exists() or stamp.read_text() != digest:
        stamp.unlink(missing_ok=True)
        make_it()
        stamp.write_text(digest)


def torch_here() -> str:
    """The version of PyTorch, without the part that says what it was built for."""
    return importlib.metadata.version("torch").split("+")[0]


def _link_package(folder: Path) -> None:
    """Our own package, the one that runs: it is the same Python and the same PyTorch."""
    (packages,) = folder.glob("lib/python*/site-packages")
    link, target = packages / PACKAGE, Path(__file__).parents[2]
    if not (link.is_symlink() and link.readlink() == target):
        link.unlink(missing_ok=True)
        link.symlink_to(target)


def _do(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{Path(command[0]).name} did not end within {LIMIT_S:.0f} s") from None
    if done.returncode:
        raise Unavailable(last_line(done.stderr) or f"it ended with status {done.returncode}")


def last_line(said: str) -> str:
    """What pip's complaint comes to: its last error, else its last line that is no warning or notice."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:") and "for help visit" not in line]
    others = [line for line in lines if not line.startswith(("WARNING:", "[notice]"))]
    return [*others[-1:], *errors[-1:]][-1] if others or errors else ""
