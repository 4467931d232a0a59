"""How peers are started: one command each, which starts their ranks again by itself."""

from __future__ import annotations

from pathlib import Path

from understudy.campaigns import programs
from understudy.campaigns.programs.plan import Plan

FIRST_HEARTBEAT_S = 60.0
"""For ranks of nvidia-resiliency-ext to begin: PyTorch is imported slowly on a machine that is busy."""


def command(peer: str, folder: Path, plan: Path, ranks: int, restarts: int) -> list[str]:
    """Its words. `folder`: of the peer's environment. `plan`: the run's file.

    `restarts`: so often a rank is started again.
    """
    return {"torchft": _torchft, "nvrx": _nvrx}[peer](folder, plan, ranks, restarts)


def _torchft(environment: Path, plan: Path, ranks: int, restarts: int) -> list[str]:
    """A lighthouse, and replica groups of one rank."""
    python = environment / "bin" / "python"
    return [str(python), _program("launch_torchft.py"), str(plan), str(ranks), str(restarts)]


def _nvrx(environment: Path, plan: Path, ranks: int, restarts: int) -> list[str]:
    """Its launcher's defaults, but for how long a rank may be silent: as long as a collective may take."""
    silent = Plan.read(plan).collective_timeout
    python = str(environment / "bin" / "python")
    words = [
        python,
        _program("launch_nvrx.py"),
        python,
        str(environment / "bin" / "ft_launcher"),
        "--standalone",
    ]
    words += ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    words += ["--ft-rank-heartbeat-timeout", str(silent)]
    words += ["--ft-initial-rank-heartbeat-timeout", str(max(silent, FIRST_HEARTBEAT_S))]
    words += ["--ft-enable-nic-monitor", "False"]  # as in its example: there is no InfiniBand here
    return [*words, _program("with_nvrx.py"), str(plan)]


def _program(name: str) -> str:
    return str(Path(programs.__file__).parent / name)
