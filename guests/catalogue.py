"""What a program of others is, as this folder runs it; the programs themselves stand in the files beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SCRIPTS = FOLDER / "scripts"


@dataclass(frozen=True)
class Program:
    """One program, with its own defaults.

    `command`: a file of scripts/, or `-m MODULE`, and its arguments; `{data}` is shared/data, `{out}` an empty
    folder of the run's own.  `launcher`: what starts it, the environment's own commands by their names.
    `package`: the distribution that it is of, whose version the report names; of a program that is on no
    registry it is what it is written after, with `written=True`.  `defaults`: what it does by itself.
    `not_natively`: why its bits are not compared with a native run's; empty: they are.
    `native_variables`: of the environment of the native run, which a library needs to do the same on the CPU.
    `fails`: the cause, if it does not run yet; then it must fail, and say so in a sentence that has `refusal`.
    """

    name: str
    package: str
    command: tuple[str, ...]
    defaults: str
    launcher: tuple[str, ...] = ("python",)
    ranks: int = 1
    environment: str = "main"
    written: bool = False
    not_natively: str = ""
    fails: str = ""
    refusal: str = ""
    native_variables: tuple[tuple[str, str], ...] = ()
    limit_s: float = 300.0


def torchrun(ranks: int) -> tuple[str, ...]:
    """As PyTorch's own documentation starts programs of several ranks."""
    return ("torchrun", "--standalone", "--nproc-per-node", str(ranks))
