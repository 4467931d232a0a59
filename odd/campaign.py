"""Random programs see what they see without us: undisturbed, and with a fault at a random record.

    make odd                                    # 5,000 programs; goes on where it stopped
    make odd OPTIONS="--first 5000 --count 500" # others
    make odd OPTIONS="--seed 4711"              # one: its source, what differs, and the least that does

Exit status 1 if any differed.
"""

from __future__ import annotations

import functools
import multiprocessing.util
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "harness"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "harness" / "processes"))

from ending import WHOLE_END, WHOLE_END_EVERY
from programs import Program, generate
from shrinking import shrunk
from simulation.__main__ import fingerprint
from simulation.many_seeds import Seeds
from trials import Difference, Hung, Trial
from zygotes import Zygotes, obstacle

from understudy import proxy_client, proxy_server

FULL = 5000
CHUNK = 10
"""Programs that a process takes at once; what is done is remembered by the chunk."""
MOST_TRIES = 3
"""Faults while a program is made smaller: where one strikes, it need not show at the first place."""


def run(program: Program, folder: Path, faults: int = 1) -> tuple[Trial, list[Difference]]:
    """Undisturbed, then with faults; raises Hung."""
    trial = Trial(program, folder)
    found = [trial.undisturbed(), *(trial.faulted(number) for number in range(faults))]
    return trial, [one for one in found if one is not None]


@functools.cache
def use_zygotes() -> None:
    """The interpreters of this process's programs are forks; starting them costs more than the programs."""
    if not obstacle():
        zygotes = Zygotes()
        multiprocessing.util.Finalize(zygotes, zygotes.stop, exitpriority=1)


def run_chunk(first: int) -> dict[str, Any]:
    """One chunk of seeds, as it is written down."""
    use_zygotes()
    counts: Counter[str] = Counter()
    failing: dict[str, str] = {}
    for seed in range(first, first + CHUNK):
        program = generate(seed)
        os.environ[WHOLE_END] = "1" if seed % WHOLE_END_EVERY == 0 else ""
        counts.update(["programs", f"of {program.ranks} ranks", *(piece.kind for piece in program.pieces)])
        with tempfile.TemporaryDirectory(prefix="understudy-odd-") as folder:
            try:
                trial, found = run(program, Path(folder))
            except Hung:
                counts["hung natively"] += 1
                continue
        counts.update({"faults that struck": trial.struck, "with refusals by name": int(trial.refused > 0)})
        if found:
            failing[str(seed)] = "; ".join(one.told() for one in found)
            print(f"what --seed {seed} said last:", *(one.output for one in found), sep="\n", flush=True)
    return {"first": first, "counts": counts, "failing": failing}


def explain(seed: int) -> int:
    """One seed, and the least of it that still differs."""
    use_zygotes()
    with tempfile.TemporaryDirectory(prefix="understudy-odd-") as name:
        folder = Path(name)
        program = generate(seed)
        print(program.source())
        _, found = run(program, folder, MOST_TRIES)
        if not found:
            print("no difference")
            return 0
        print(*(f"{one.told()}\n{one.output}" for one in found), sep="\n", flush=True)
        kinds = {_kind(one) for one in found}
        faults = 0 if any(one.how == "proxied" for one in found) else MOST_TRIES

        def differs(less: Program) -> bool:
            try:
                return any(_kind(one) in kinds for one in run(less, folder, faults)[1])  # not in another way
            except Hung:
                return False

        print("the least that differs:", shrunk(program, differs).source(), sep="\n")
        return 1


def _kind(difference: Difference) -> tuple[str, ...]:
    """Natively and here: what was said behind the step, without contents: a class of errors, or a dtype."""
    said = (difference.native.split(), difference.ours.split())
    return tuple("".join(words[1:2]).partition("[")[0] for words in said)


def code() -> str:
    """What was done with other code does not count."""
    return fingerprint(
        Path(__file__).parent, *(Path(one.__path__[0]) for one in (proxy_client, proxy_server))
    )


def main() -> int:
    """The command line."""
    seeds = Seeds("odd", CHUNK, run_chunk, code, FULL)
    options = seeds.options(__doc__)
    if options.seed is not None:
        return explain(options.seed)
    chunks = seeds.run(options)
    counts: Counter[str] = Counter()
    for chunk in chunks:
        counts.update(chunk["counts"])
    print(*(f"{number:>7}  {name}" for name, number in counts.most_common()), sep="\n")
    failing = [seed for chunk in chunks for seed in chunk["failing"]]
    print(f"{len(failing)} differ: {', '.join(failing) or 'none'}")
    return bool(failing)


if __name__ == "__main__":
    sys.exit(main())
