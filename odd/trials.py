"""One program run natively, proxied, and proxied with a fault at a random record: what is to be the same."""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import proxied
from programs import REFUSED, Program
from training_run import OVERDUE, RunFailed, execute, execute_natively, under_proxy

from understudy.recovery.run.conclusion import DRILL_NEVER_FIRED

LIMIT_S = 90.0
FAULTS = ("kill-server", "kill-server", "kill-server", "call-error", "sticky-error", "kill-all-servers")
TOLD = 3000
"""Characters of a run's output that are kept."""


class Hung(RuntimeError):
    """It does not end natively either; the message says what it is."""


@dataclass(frozen=True)
class Seen:
    """What a run has said, rank by rank, and how it ended."""

    lines: tuple[tuple[str, ...], ...]
    failed: bool
    output: str = ""


@dataclass(frozen=True)
class Difference:
    """Between a native and another run.  `how`: "proxied", or the drill."""

    how: str
    rank: int
    place: int
    native: str
    ours: str
    output: str = ""

    def told(self) -> str:
        """In one line."""
        where = f"{self.how}: rank {self.rank}, line {self.place}"
        return f"{where}: natively {self.native!r}, here {self.ours!r}"


class Trial:
    """Of one program, in a folder of its own."""

    def __init__(self, program: Program, folder: Path) -> None:
        """Runs it natively; raises Hung."""
        self.program = program
        self.refused = 0
        """Lines in which something was refused by name, undisturbed."""
        self.struck = 0
        """Faults that came."""
        self._folder = Path(tempfile.mkdtemp(prefix=f"{program.seed}-", dir=folder))
        self._script = self._folder / "script.py"
        self._script.write_text(program.source())
        self._report: dict[str, Any] = {}
        self._native = self._seen_natively()

    def undisturbed(self) -> Difference | None:
        """Natively and under the proxy."""
        return self._compared("proxied")

    def faulted(self, number: int) -> Difference | None:
        """With a fault, the `number`th of this program's; `undisturbed` has told where there can be one."""
        chance = random.Random(f"{self.program.seed} {number}")
        calls = self._report.get("recent_calls", ())  # records of minibatch n, in n modulo their number
        if not self._report.get("steps") or not any(calls):
            return None  # it has not used the device
        step, rank = chance.randint(1, self._report["steps"]), chance.randrange(self.program.ranks)
        call = chance.randint(1, calls[step % len(calls)] or max(calls))
        return self._compared(f"{chance.choice(FAULTS)} rank={rank} step={step} call={call}")

    def _compared(self, how: str) -> Difference | None:
        place = Path(tempfile.mkdtemp(prefix="run-", dir=self._folder))
        report = place / "report.json"
        drills = () if how == "proxied" else (how,)
        command = under_proxy(self._command(place), self.program.ranks, report, drills)
        try:
            ours = self._seen(place, False, execute(command, LIMIT_S, expected=(0, DRILL_NEVER_FIRED)))
        except RunFailed as failure:
            if OVERDUE in str(failure):
                return Difference(how, 0, 0, "it ends", "it does not", str(failure)[-TOLD:])
            ours = self._seen(place, True, str(failure))
        found = json.loads(report.read_text()) if report.exists() else {}
        if not drills:
            self._report = found
            self.refused = sum(REFUSED in line for rank in ours.lines for line in rank)
        self.struck += sum(bool(fault["fired"]) for fault in found.get("faults", ()))
        if found.get("replies_different"):
            return Difference(how, 0, 0, "", "replayed values differ", ours.output)
        return _difference(how, self._native, ours)

    def _seen_natively(self) -> Seen:
        place = Path(tempfile.mkdtemp(prefix="native-", dir=self._folder))
        try:
            execute_natively(self._command(place), LIMIT_S)
        except RunFailed as failure:
            if OVERDUE in str(failure):
                raise Hung(f"seed {self.program.seed} hangs natively") from failure
            return self._seen(place, True, str(failure))
        return self._seen(place, False, "")

    def _command(self, place: Path) -> list[str]:
        if self.program.ranks == 1:
            return proxied.python(self._script, str(place))
        return proxied.ranks(self.program.ranks, self._script, str(place))

    def _seen(self, place: Path, failed: bool, output: str) -> Seen:
        files = [place / str(rank) for rank in range(self.program.ranks)]
        lines = tuple(tuple(file.read_text().splitlines()) if file.exists() else () for file in files)
        return Seen(lines, failed, output[-TOLD:])


def _difference(how: str, native: Seen, ours: Seen) -> Difference | None:
    if native.failed != ours.failed:
        ends = ["it fails" if seen.failed else "it ends well" for seen in (native, ours)]
        return Difference(how, 0, 0, ends[0], ends[1], ours.output)
    if native.failed and len(native.lines) > 1:
        return None  # how far the others come is not determined
    for rank, (theirs, told) in enumerate(zip(native.lines, ours.lines, strict=True)):
        for place in range(max(len(theirs), len(told))):
            one, other = (lines[place] if place < len(lines) else "" for lines in (theirs, told))
            if one == other:
                continue
            if REFUSED in other:
                break  # it may be missed by all that follows; counted in `refused`
            return Difference(how, rank, place + 1, one, other, ours.output)
    return None
