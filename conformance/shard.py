"""One part of a sweep, run under proxyrun: `python shard.py --output FILE [--only … --shard i/n …]`.

This process reads the databases and forks; children use the device, some units each. A child that crashes,
hangs, or whose session an error ended costs one case, not the sweep: the next child goes on behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import databases
import module_cases
import operator_cases
import optimizer_cases
from cases import NATIVE, Case, Judge, Verdict, seed_everything
from databases import Unit
from outcome import UnitResult

UNITS_PER_CHILD = 24
SYNCS_COUNTED = 4
"""Cases per variant, of an entry's first dtype, whose synchronisations are counted."""
CASE_LIMIT_S, UNIT_LIMIT_S = 60.0, 300.0
MOST_RESTARTS = 40
"""Children one unit may cost; what is left of it then is a finding."""

_SOURCES = {
    "op_db": operator_cases.cases,
    "module_db": module_cases.cases,
    "optim_db": optimizer_cases.cases,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--units", type=Path, help="names of units, one a line, instead of a choice")
    add_choice(parser)
    options = parser.parse_args()
    entries = databases.load()
    chosen = databases.units(
        entries,
        only=options.only,
        dtype=options.dtype,
        database=options.database,
        shard=shard_of(options.shard),
    )
    if options.units:
        wanted = set(options.units.read_text().split())
        chosen = [unit for unit in chosen if unit.name in wanted]
    with options.output.open("w") as output:
        Shard(chosen, output).run()


def add_choice(parser: argparse.ArgumentParser) -> None:
    """What of the databases to run."""
    parser.add_argument("--only", default="", metavar="REGEX", help="entries whose `database/name` matches")
    parser.add_argument("--dtype", default="", help="this dtype only, for example float32")
    parser.add_argument("--database", default="", choices=("", *databases.DATABASES))
    parser.add_argument("--shard", default="1/1", metavar="i/n", help="every n-th entry, from the i-th on")


def shard_of(text: str) -> tuple[int, int]:
    """`"2/3"` -> (2, 3). Raises ValueError."""
    number, count = (int(part) for part in text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(f"there is no shard {text}")
    return number, count


class Shard:
    """The parent: hands units to children and writes down what they say."""

    def __init__(self, units: list[Unit], output: TextIO) -> None:
        self._units = units
        self._output = output
        self._results: dict[int, UnitResult] = {}
        self._position = 0
        self._first_case = 0
        self._restarts = 0

    def run(self) -> None:
        while self._position < len(self._units):
            self._one_child()

    def _one_child(self) -> None:
        reading, writing = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _child(self._units, self._position, self._first_case, writing)
        os.close(writing)
        begun, case = self._position, Progress()
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            overdue = self._listen(pipe, case)
        if overdue:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if overdue or status != 0:
            self._broken(case, overdue, status)
        elif self._position == begun and not case.moved:
            raise SystemExit("conformance: a child ended without doing anything")

    def _listen(self, pipe: Any, case: Progress) -> bool:
        """True if the child has to be killed because it makes no progress."""
        buffer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while True:
                if not selector.select(timeout=case.time_left()):
                    return True
                chunk = pipe.read(1 << 16)
                if not chunk:
                    return False
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    self._heard(json.loads(line), case)

    def _heard(self, message: dict[str, Any], case: Progress) -> None:
        case.note(message)
        unit = self._units[self._position]
        result = self._results.setdefault(
            self._position, UnitResult(unit.entry.database, unit.entry.name, databases.dtype_name(unit.dtype))
        )
        match message["kind"]:
            case "verdict":
                result.add(message["verdict"])
                self._first_case = message["number"] + 1
                case.moved = True
            case "unit done":
                result.seconds += message["seconds"]
                self._next_unit()
            case "unit failed":
                result.findings.append({"kind": "no samples", "detail": message["detail"]})
                self._next_unit()

    def _broken(self, case: Progress, overdue: bool, status: int) -> None:
        unit = self._units[self._position]
        result = self._results.setdefault(
            self._position, UnitResult(unit.entry.database, unit.entry.name, databases.dtype_name(unit.dtype))
        )
        self._restarts += 1
        how = f"made no progress for {CASE_LIMIT_S:.0f} s" if overdue else _describe(status)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == POISONED:
            pass  # the verdict told why
        else:
            result.findings.append(
                {
                    "kind": "hang" if overdue else "crash",
                    "variant": case.variant,
                    "index": case.index,
                    "side": "native" if case.device == NATIVE else "device",
                    "detail": f"the process {how}",
                }
            )
            self._first_case = case.number + 1
        if self._restarts >= MOST_RESTARTS:
            result.findings.append({"kind": "given up", "detail": f"after {self._restarts} restarts"})
            self._next_unit()

    def _next_unit(self) -> None:
        result = self._results.pop(self._position)
        self._output.write(json.dumps(asdict(result)) + "\n")
        self._output.flush()
        self._position += 1
        self._first_case = 0
        self._restarts = 0


POISONED = 87
"""Exit status of a child whose device session was ended by an error."""


class Progress:
    """Where a child is."""

    def __init__(self) -> None:
        self.number, self.variant, self.index, self.device = -1, "", 0, ""
        self.moved = False
        self._heard_at = self._unit_began = time.monotonic()

    def note(self, message: dict[str, Any]) -> None:
        self._heard_at = time.monotonic()
        if message["kind"] == "begin":
            self.number, self.variant, self.index = message["number"], message["variant"], message["index"]
            self.device = message["device"]
        elif message["kind"] != "verdict":
            self._unit_began = self._heard_at

    def time_left(self) -> float:
        now = time.monotonic()
        limit = min(self._heard_at + CASE_LIMIT_S, self._unit_began + UNIT_LIMIT_S)
        return max(limit - now, 0.01)


def _describe(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with {os.WEXITSTATUS(status)}"


def _child(units: list[Unit], position: int, first_case: int, pipe: int) -> None:
    """Never returns."""
    status = 1
    try:
        status = _work(units[position : position + UNITS_PER_CHILD], first_case, pipe)
        if status == 0:
            from understudy.proxy_client import session

            session.end()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _work(units: list[Unit], first_case: int, pipe: int) -> int:
    def send(**message: Any) -> None:
        os.write(pipe, json.dumps(message).encode() + b"\n")

    for unit in units:
        begun = time.monotonic()
        counted: dict[str, int] = {}
        try:
            for number, case in enumerate(_cases(unit)):
                if number < first_case:
                    continue
                verdict = _judge(unit, case, number, counted, send)
                send(kind="verdict", number=number, verdict=asdict(verdict))
                if verdict.poisoned:
                    return POISONED
        except _NoSamples as problem:
            send(kind="unit failed", detail=str(problem))
        else:
            send(kind="unit done", seconds=time.monotonic() - begun)
        first_case = 0
    return 0


class _NoSamples(Exception):
    pass


def _cases(unit: Unit) -> Iterator[Case]:
    seed_everything(unit.entry.seed)
    try:
        yield from _SOURCES[unit.entry.database](unit)
    except Exception as error:
        raise _NoSamples(f"making the samples failed: {type(error).__name__}: {error}") from error


def _judge(unit: Unit, case: Case, number: int, counted: dict[str, int], send: Any) -> Verdict:
    def begin(device: str) -> None:
        send(kind="begin", number=number, variant=case.variant, index=case.index, device=device)

    first_dtype = unit.dtype == unit.entry.dtypes[0]
    counts = first_dtype and case.variant != "error" and counted.get(case.variant, 0) < SYNCS_COUNTED
    counted[case.variant] = counted.get(case.variant, 0) + 1
    return Judge(unit.entry.seed, begin).judge(case, count_syncs=counts)


if __name__ == "__main__":
    main()
