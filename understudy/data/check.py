"""`python -m understudy.data check RUN [--against RUN]`: reads the logs of samples and says what they show.

Exit status: 0 exact, 1 found bad, 2 usage (nothing to read, or nothing to judge it by).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .accounting import Run
from .judgement import Verdict, judge
from .records import Beginning, parse
from .sample_log import logs

OK, BAD, USAGE = 0, 1, 2


class NoRecords(ValueError):
    """A log has lines that no SampleLog has written, or those of different runs: found bad."""


def read_run(directory: Path) -> Run:
    """The logs of all ranks. Raises ValueError where there are none, NoRecords where they are damaged."""
    files = logs(directory)
    if not files:
        raise ValueError(f"There is no log of samples (samples-rank….jsonl) in {directory}.")
    run = Run()
    for path in files:
        _read_rank(run, path)
    return run


def _read_rank(run: Run, path: Path) -> None:
    """Where a kill can have torn a line, at the end or before a new attempt, it need be no record."""
    current: Beginning | None = None
    torn: tuple[int, ValueError] | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = parse(line)
            except ValueError as error:
                if torn is not None:
                    raise _no_record(path, *torn) from None
                torn = (number, error)
                continue
            if isinstance(record, Beginning):
                try:
                    run.begin(record)
                except ValueError as error:
                    raise NoRecords(f"{path.name}, line {number}: {error}") from None
                current = record
                run.torn += torn is not None
                torn = None
            elif torn is not None:
                raise _no_record(path, *torn)
            elif current is None:
                raise NoRecords(f"{path.name}, line {number}, comes before any line that begins an attempt.")
            else:
                run.add(current.attempt, current.rank, record)
    run.torn += torn is not None


def _no_record(path: Path, number: int, error: ValueError) -> NoRecords:
    return NoRecords(f"{path.name}, line {number}, is no record: {str(error).rstrip('.')}.")


def describe(run: Run, verdict: Verdict) -> str:
    """For people."""
    plan = run.plan
    ranks = " → ".join(str(attempt.world_size) for _, attempt in sorted(run.attempts.items()))
    lines = [
        f"{_number(len(run.attempts), 'attempt')} on {ranks} ranks; "
        f"epochs of {_number(plan.steps, 'step')} of {_number(plan.global_batch, 'sample')}; "
        f"{_number(run.redone, 'step')} redone, {_number(run.torn, 'line')} torn"
    ]
    for epoch in verdict.epochs:
        named = (("duplicates", epoch.duplicates), ("missing", epoch.missing), ("extra", epoch.extra))
        counts = ", ".join(f"{name} {'?' if number is None else number}" for name, number in named)
        lines.append(f"epoch {epoch.epoch}: {_number(epoch.steps, 'step')}, {counts}")
    if not verdict.compared:
        lines.append(
            "missing and extra samples cannot be told from the data set's own ids; name a run with --against"
        )
    if verdict.exact:
        return "\n".join([*lines, "exact" if verdict.compared else "nothing wrong"])
    first = verdict.offences[0]
    return "\n".join([*lines, f"NOT exact, {_number(len(verdict.offences), 'time')}; first at {first}"])


def _number(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m understudy.data", description="Data of resumed runs.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser(
        "check", help="whether a run has used exactly the samples that it should have"
    )
    check.add_argument("run", type=Path, metavar="RUN", help="the directory of its SampleLog")
    check.add_argument("--against", type=Path, metavar="RUN", help="a run that never stopped")
    given = parser.parse_args(arguments)
    try:
        run = read_run(given.run)
        against = None if given.against is None else read_run(given.against)
        verdict = judge(run, against)
    except NoRecords as error:
        sys.stderr.write(f"understudy.data check: {error}\n")
        return BAD
    except (ValueError, OSError) as error:
        sys.stderr.write(f"understudy.data check: {error}\n")
        return USAGE
    sys.stdout.write(describe(run, verdict) + "\n")
    return OK if verdict.exact else BAD
