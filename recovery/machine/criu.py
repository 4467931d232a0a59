"""The CRIU of this machine: where it is, and whether it is recent enough."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LEAST = (4, 1)
"""3.17 of Debian 12 fails on kernels >= 6.13: "Unexpected rt vDSO area bounds"."""
VARIABLE = "UNDERSTUDY_CRIU"
ANSWER_S = 20.0


@dataclass(frozen=True)
class Criu:
    """One that was found."""

    path: Path
    source: str
    """How: "--criu", "UNDERSTUDY_CRIU", "PATH" or "deploy/install-criu"."""
    version: tuple[int, ...]
    """(): it does not start."""
    trouble: str = ""
    """What it said then."""

    @property
    def recent(self) -> bool:
        """Whether it can be used."""
        return self.version >= LEAST

    @property
    def version_text(self) -> str:
        """As a person writes it."""
        return ".".join(map(str, self.version))


def default_prefixes(variables: Mapping[str, str]) -> list[Path]:
    """Where deploy/install-criu puts it, as root and as another user."""
    share = variables.get("XDG_DATA_HOME") or f"{variables.get('HOME', '')}/.local/share"
    return [Path("/opt/understudy/criu"), Path(share) / "understudy" / "criu"]


def candidates(option: Path | None, variables: Mapping[str, str]) -> list[tuple[Path, str]]:
    """What is to be tried, in this order.  Who names one means that one."""
    if option is not None:
        return [(option, "--criu")]
    if named := variables.get(VARIABLE):
        return [(Path(named), VARIABLE)]
    path = variables.get("PATH") or os.defpath
    ours = [
        (file, "deploy/install-criu")
        for prefix in default_prefixes(variables)
        if os.access(file := prefix / "bin" / "criu", os.X_OK)
    ]
    system = shutil.which("criu", path=f"{path}:/usr/sbin:/sbin")
    return [*ours, (Path(system), "PATH")] if system else ours


def find(option: Path | None = None, variables: Mapping[str, str] = os.environ) -> Criu | None:
    """The first that is recent enough, else the first that there is; None: there is none."""
    found = [look_at(path, source) for path, source in candidates(option, variables)]
    return next((one for one in found if one.recent), found[0] if found else None)


def look_at(path: Path, source: str) -> Criu:
    """Ask it for its version."""
    try:
        done = _run([str(path), "--version"])
    except (OSError, subprocess.TimeoutExpired) as problem:
        return Criu(path, source, (), str(problem))
    version = parse_version(done.stdout)
    return Criu(path, source, version, "" if version else (done.stderr or done.stdout).strip()[:300])


def parse_version(text: str) -> tuple[int, ...]:
    """`Version: 4.1.1` -> (4, 1, 1); () if there is none."""
    found = re.search(r"^Version: (\d{1,9})(?!\d)((?:\.\d{1,9}(?!\d)){0,3})", text, re.MULTILINE)
    return tuple(map(int, (found[1] + found[2]).split("."))) if found else ()


def check(criu: Criu) -> str:
    """Empty if this kernel has all that it needs, or what `criu check` complains about first."""
    try:
        done = _run([str(criu.path), "check"])
    except (OSError, subprocess.TimeoutExpired) as problem:
        return str(problem)
    if done.returncode == 0:
        return ""
    said = (done.stderr + done.stdout).strip().splitlines()
    return next((line for line in said if "Error" in line), said[-1] if said else "no reason given")[:300]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=ANSWER_S, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
