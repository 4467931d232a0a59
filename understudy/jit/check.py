"""`python -m understudy.jit check DIR`: lists the saves of a directory, verifies them, and says what counts.

Exit status: 0 a step can be resumed from and nothing is damaged, 1 otherwise, 2 usage (no such directory).
Whoever may read the directory may check it; nothing in it is changed. `python -m understudy.jit preload`
prints where the library for LD_PRELOAD lies.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .assembly import Save, listed
from .choosing import Judgement, judge, own_job
from .cuda_watch import preload
from .identity import JitError, shown
from .reading import Directory, NotWhole

OK, BAD, USAGE = 0, 1, 2


@dataclass(frozen=True)
class Findings:
    """What lies in a directory. `damaged`: why a save does not count, by its name."""

    job: str
    saves: tuple[Save, ...]
    damaged: dict[str, str]
    gone: frozenset[str]
    """Periodic checkpoints that the script has removed since: no damage, but they do not count."""
    unfinished: int
    judgement: Judgement

    @property
    def fine(self) -> bool:
        """Whether one can resume, and nothing is damaged."""
        return self.judgement.choice is not None and not self.damaged


def examine(path: Path) -> Findings:
    """Reads every payload. Raises JitError, in one sentence, where there is no such directory."""
    try:
        reader = Directory(path.resolve(strict=True), path.stat().st_uid)
        job = reader.job()
        saves, damaged = own_job(reader, *reader.saves())
        unfinished = len(reader.unfinished())
    except FileNotFoundError:
        raise JitError(f"There is no directory of shards at {shown(str(path))}.") from None
    except (OSError, NotWhole) as error:
        raise JitError(f"The directory {shown(str(path))} cannot be read: {shown(str(error))}.") from None
    wrong = reader.verify_all(saves)
    judgement = judge(
        reader, verify=lambda some: {one.name: wrong[one.name] for one in some if one.name in wrong}
    )
    gone = frozenset(one.name for one in saves if one.periodic and not os.path.lexists(one.path))
    damaged |= {name: why for name, why in wrong.items() if name not in gone}
    return Findings(job, tuple(saves), damaged, gone, unfinished, judgement)


def describe(found: Findings) -> str:
    """For people."""
    lines = [f"job {shown(found.job)}"]
    lines += [_line(save, found) for save in sorted(found.saves, key=_order)]
    known = {save.name for save in found.saves}
    lines += [f"{name}: damaged: {shown(why)}" for name, why in found.damaged.items() if name not in known]
    if found.unfinished:
        lines.append(f"{found.unfinished} unfinished, not counted: removed when their ranks come again")
    lines += [shown(remark) for remark in found.judgement.remarks]
    return "\n".join([*lines, _verdict(found.judgement)])


def _line(save: Save, found: Findings) -> str:
    if save.name in found.gone:
        state = "gone: the script has removed it"
    else:
        state = f"damaged: {found.damaged[save.name]}" if save.name in found.damaged else "whole"
    away = [f"rank {one['rank']} ({one['host']})" for one in save.metadata["absent"]]
    columns = [
        f"step {save.step}",
        f"shard {save.shard}",
        f"rank {save.rank} of {save.world_size}",
        f"host {save.host}",
        save.reason,
        state,
    ]
    return shown("  ".join(columns)) + (f"  without {listed(away)}" if away else "")


def _verdict(judgement: Judgement) -> str:
    if judgement.choice is None:
        return "no step can be resumed from"
    taken = (f"{shown(shard)} from rank {save.rank}" for shard, save in sorted(judgement.replicas.items()))
    return f"step {judgement.choice.step} would be taken: " + ", ".join(taken)


def _order(save: Save) -> tuple[int, str, int, str]:
    return save.step, save.shard, save.rank, save.name


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m understudy.jit", description="Just-in-time checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="list and verify saves, and say which step would be taken")
    commands.add_parser("preload", help="print the path for LD_PRELOAD of a script on CUDA")
    check.add_argument("directory", type=Path, metavar="DIR", help="what jit.init was given as directory=")
    asked = parser.parse_args(arguments)
    try:
        if asked.command == "preload":
            sys.stdout.write(f"{preload()}\n")
            return OK
        found = examine(asked.directory)
    except JitError as error:
        sys.stderr.write(f"understudy.jit {asked.command}: {error}\n")
        return USAGE
    sys.stdout.buffer.write((describe(found) + os.linesep).encode(errors="backslashreplace"))
    return OK if found.fine else BAD
