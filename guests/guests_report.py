"""From outcomes to docs/reports/programs.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from catalogue import Program
from trial import Outcome

HEAD = """# Programs of others

Written by `make test-programs`; not to be edited. The programs stand in [guests](../../guests): the libraries' own
classes and command lines at small sizes, with random weights, and texts and images of `../shared/data`, each *with its own
defaults*. None of them is edited. "After" marks programs that are on no registry and are written after their README.

- **works**: ends with status 0 under the proxy.
- **bits**: parameters and state of all optimizers, and what the program prints of losses or results, are those of a native run on the CPU.
- **fault**: the same again with a device server killed in the middle, at a random record, against the run without a fault.
- **ratio**: seconds of the whole run, proxied over native; start-up is most of it (two cores, one run, noisy).

| program | of | its defaults | works | bits | fault (recovery) | steps | ratio |
| --- | --- | --- | --- | --- | --- | ---: | ---: |
"""


def markdown(programs: Sequence[Program], known: Mapping[str, Outcome]) -> str:
    """A row for each that was run."""
    rows = [_row(program, known[program.name]) for program in programs if program.name in known]
    notes = [
        f"- {program.name}: {program.fails or program.not_natively}."
        for program in programs
        if program.fails or program.not_natively
    ]
    commits = sorted({one.commit for one in known.values()})
    made = f"\n{len(rows)} of {len(programs)} programs were run, at {', '.join(commits)}.\n"
    why = "\n## Why not\n\n" + "\n".join(notes) + "\n" if notes else ""
    return HEAD + "".join(rows) + made + why


def _row(program: Program, outcome: Outcome) -> str:
    of = f"after {program.package}" if program.written else f"{program.package} {outcome.version}"
    works = "yes" if outcome.works else "**no**"
    fault = _said(outcome.fault) + (f" ({outcome.replayed_s:.2f} s)" if outcome.fault else "")
    ratio = f"{outcome.ratio:.2f}" if outcome.ratio else "–"
    cells = program.name, of, program.defaults, works, _said(outcome.bits), fault, str(outcome.steps), ratio
    return f"| {' | '.join(cells)} |\n"


def _said(same: bool | None) -> str:
    return {None: "–", True: "yes", False: "**no**"}[same]
