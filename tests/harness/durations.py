"""How long each file of tests took in the last full run, and may take.

    python tests/harness/durations.py --check    a sentence for each file without a budget, or far beyond it
    python tests/harness/durations.py --write    makes what the last full run took the budgets

Budgets are in tests/durations.json.  As a plugin of pytest it puts tests of files with large budgets first,
so that no core idles at the end; and at the end of a full run it writes build/durations.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
import skipped

ROOT = Path(__file__).resolve().parent.parent.parent
BUDGETS, TAKEN = ROOT / "tests" / "durations.json", ROOT / "build" / "durations.json"
MOST, GRACE_S = 2.0, 5.0
"""Times its budget that a file may take, and seconds more, as machines are noisy."""
ORDINARY = "not long"
"""What `-m` selects if nobody says otherwise (pyproject.toml)."""
OK, TESTS_FAILED = 0, 1
RECORD = pytest.StashKey["Record"]()


@dataclass
class FullRun:
    """What build/durations.json says; times in seconds."""

    machine: dict[str, str | int | float] = field(default_factory=dict)
    """As it was before the run; and when that was, and of which commit."""
    workers: int = 1
    wall: float = 0.0
    cpu: float = 0.0
    """Of all processes that were waited for; user and system."""
    passed: int = 0
    failed: int = 0
    """With tests whose fixtures failed."""
    skips: dict[str, int] = field(default_factory=dict)
    """For want of what, or else the reason -> tests."""
    files: dict[str, float] = field(default_factory=dict)
    """Set-up, call and teardown of a file's tests."""
    skipping: list[str] = field(default_factory=list)
    """Files of which tests were skipped: elsewhere they take longer."""

    @classmethod
    def read(cls, path: Path) -> FullRun:
        """Raises OSError, ValueError and TypeError if it is none."""
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(asdict(self), indent=1) + "\n")
        new.replace(path)


# ------------------------------------------------------------------ budgets
def read_budgets(path: Path = BUDGETS) -> dict[str, int]:
    """File -> seconds; raises OSError and ValueError."""
    return json.loads(path.read_text())


def files_of_tests(root: Path = ROOT) -> list[str]:
    """As pytest names them."""
    return sorted(str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py"))


def too_long(taken: Mapping[str, float], budgets: Mapping[str, int]) -> list[str]:
    """A sentence for each file that took far more than its budget."""
    return [
        f"{file} took {taken[file]:.0f} s in the last full run, and its budget is {budget} s"
        for file, budget in sorted(budgets.items())
        if taken.get(file, 0) > MOST * budget + GRACE_S
    ]


def complaints(files: Iterable[str], budgets: Mapping[str, int], taken: Mapping[str, float]) -> list[str]:
    """Sentences; none if all is well."""
    there = set(files)
    found = [f"{file} has no budget in tests/durations.json" for file in sorted(there - budgets.keys())]
    gone = sorted(budgets.keys() - there)
    found += [f"tests/durations.json has a budget for {file}, which is gone" for file in gone]
    return found + too_long(taken, {file: budget for file, budget in budgets.items() if file in there})


def files_drawn_from(root: Path = ROOT) -> set[str]:
    """Of which a run has only some of the tests (drawing.py)."""
    return {file for file in files_of_tests(root) if "mark.drawn(" in (root / file).read_text()}


def new_budgets(
    files: Iterable[str], budgets: Mapping[str, int], run: FullRun, drawn: Collection[str] = ()
) -> dict[str, int]:
    """Of whole seconds, at least 1.  A file that was skipped, not run, or `drawn` from, keeps what it had."""
    found = {}
    for file in sorted(files):
        partly = file in run.skipping or file in drawn or file not in run.files
        least = budgets.get(file, 1) if partly else 1
        found[file] = max(least, math.ceil(run.files.get(file, 0)))
    return found


# ------------------------------------------------------------------ the plugin
def in_order(items: Iterable[pytest.Item], budgets: Mapping[str, int]) -> list[pytest.Item]:
    """Heavy files first; a file's tests stay together, and as they were."""
    by_file: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_file[file_of(item.nodeid)].append(item)
    heavy_first = sorted(by_file, key=lambda file: -budgets.get(file, 0))
    return [item for file in heavy_first for item in by_file[file]]


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = in_order(items, known_budgets())


def known_budgets() -> dict[str, int]:
    """Raises UsageError if what is there makes no sense."""
    try:
        return read_budgets() if BUDGETS.exists() else {}
    except ValueError as problem:
        raise pytest.UsageError(f"{BUDGETS} cannot be read: {problem}") from problem


class Record:
    """Of a run as it goes on."""

    def __init__(self) -> None:
        from machine import describe_machine  # of bench/, which the command line has not on its path

        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.run = FullRun(describe_machine() | {"memory_bytes": memory})
        self.ended = False
        self._began = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = file_of(report.nodeid)
        self.run.files[file] = self.run.files.get(file, 0.0) + report.duration

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        stats = reporter.stats
        skips = stats.get("skipped", [])
        self.run.passed = len(stats.get("passed", []))
        self.run.failed = len(stats.get("failed", [])) + len(stats.get("error", []))
        self.run.skips = dict(skipped.by_want(map(skipped.reason_of, skips)))
        self.run.skipping = sorted({file_of(report.nodeid) for report in skips})
        self.run.wall = round(time.monotonic() - self._began, 1)
        stopped = session.shouldstop or session.shouldfail
        self.ended = exitstatus in (OK, TESTS_FAILED) and not stopped

    @pytest.hookimpl(wrapper=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None]:
        for sentence in too_long(self.run.files, known_budgets()):
            terminalreporter.write_line(f"{sentence}: `make lint` will refuse that")
        yield

    def write(self, workers: int) -> None:
        """Once all others have ended: their time is counted when they have been waited for."""
        self.run.workers = workers
        self.run.cpu = round(sum(os.times()[:4]), 1)
        self.run.files = {file: round(seconds, 2) for file, seconds in sorted(self.run.files.items())}
        self.run.write(TAKEN)


def is_full(config: pytest.Config) -> bool:
    """Whether all tests of `make test` are run, and as it runs them."""
    return is_of_the_whole(config) and config.getoption("quick", None) is None


def is_of_the_whole(config: pytest.Config) -> bool:
    """Whether nobody has said which tests: `make test`, or `make test-quick`."""
    option = config.option
    narrowed = option.keyword or option.deselect or option.ignore or option.ignore_glob or option.collectonly
    everywhere = config.args_source is pytest.Config.ArgsSource.TESTPATHS and option.markexpr == ORDINARY
    slower = os.environ.get("UNDERSTUDY_TEST_COLD")  # `make test-long`
    return bool(everywhere and not narrowed and not slower)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and is_full(config):  # the process that hands tests out sees all
        config.stash[RECORD] = Record()
        config.pluginmanager.register(config.stash[RECORD])


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    record = config.stash.get(RECORD, None)
    if record is not None and record.ended:
        record.write(config.getoption("numprocesses", None) or 1)


# ------------------------------------------------------------------ the command line
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="a sentence for each file that is not in order")
    what.add_argument("--write", action="store_true", help="make what the last full run took the budgets")
    chosen = parser.parse_args(arguments)
    try:
        budgets = read_budgets() if BUDGETS.exists() else {}
        run = FullRun.read(TAKEN) if chosen.write or TAKEN.exists() else FullRun()
    except (OSError, ValueError, TypeError) as problem:
        print(f"durations: there is no full run that can be read, or no budgets: {problem}", file=sys.stderr)
        return 1
    if chosen.write:
        found = new_budgets(files_of_tests(), budgets, run, files_drawn_from())
        BUDGETS.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    wrong = complaints(files_of_tests(), budgets, run.files)
    if wrong:
        wrong.append("`make test`, then `python tests/harness/durations.py --write` accepts it")
    for sentence in wrong:
        print(f"durations: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
