"""`make test-programs`: programs that others wrote, natively, under the proxy, and with a device server killed.

    make test-programs                              # all; goes on where it stopped
    make test-programs OPTIONS="--only trainer -v"  # those whose names match, again, with what a failing one said

Writes docs/reports/programs.md.  Exit status 1 if one does not do what its row in the catalogue promises.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time

import frameworks
import hugging_face
import parallel
import vision
from catalogue import Program
from environments import BUILT, ROOT, Unavailable
from guests_report import markdown
from trial import Outcome, as_row, run

PROGRAMS: tuple[Program, ...] = (
    *hugging_face.PROGRAMS,
    *parallel.PROGRAMS,
    *vision.PROGRAMS,
    *frameworks.PROGRAMS,
)
RESULTS = BUILT / "results.json"
REPORT = ROOT / "docs" / "reports" / "programs.md"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="REGEX", help="programs whose names match")
    parser.add_argument("--seed", type=int, help="of the place of the fault")
    parser.add_argument("-v", action="store_true", help="print what a program that fails has said")
    options = parser.parse_args()
    known, commit = load(), checked_out()
    for program in PROGRAMS:
        done = known.get(program.name)
        wanted = re.search(options.only, program.name) if options.only else not done or done.commit != commit
        if not wanted:
            continue
        begun = time.monotonic()
        try:
            outcome = run(program, options.seed)
        except Unavailable as problem:
            print(f"{program.name}: not run: {problem}", flush=True)
            continue
        outcome.commit = commit
        known[program.name] = outcome
        save(known)
        print(line(outcome, time.monotonic() - begun), flush=True)
        if options.v and outcome.problem:
            print(outcome.problem, flush=True)
    found = [known[program.name] for program in PROGRAMS if program.name in known]
    REPORT.write_text(markdown(PROGRAMS, known))
    return 1 if len(found) < len(PROGRAMS) or any(one.problem for one in found) else 0


def line(outcome: Outcome, seconds: float) -> str:
    said = {None: "not compared", True: "same", False: "OTHER"}
    problem = f": {outcome.problem.strip().splitlines()[-1][:200]}" if outcome.problem else ""
    return (
        f"{outcome.name} ({outcome.version}): works {outcome.works}, native bits {said[outcome.bits]}, "
        f"fault {said[outcome.fault]}, seed {outcome.seed}, {seconds:.0f} s{problem}"
    )


def load() -> dict[str, Outcome]:
    """What former runs found."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return {row["name"]: Outcome(**row) for row in rows}


def save(known: dict[str, Outcome]) -> None:
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps([as_row(one) for one in known.values()], indent=1) + "\n")


def checked_out() -> str:
    """Says so if files differ from the commit."""
    command = ["git", "describe", "--always", "--dirty=, changed"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
