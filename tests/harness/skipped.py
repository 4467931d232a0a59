"""The last line of a run before pytest's own: what was skipped, and for want of what.

`skipped for want of: CRIU (12), a GPU (9); skipped as well: root may write everywhere (1)`
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import pytest

WANTED = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"needs root|only root|needs privileges", "root"),
        (r"\bCRIU\b", "CRIU"),
        (r"needs two GPUs", "two GPUs"),
        (r"finds no GPU|PyTorch is a CPU build", "a GPU"),
        (r"this PyTorch has no", "a newer PyTorch"),
        (r"\betcd\b", "etcd"),
        (r"device-mapper|dm-flakey", "the kernel's device-mapper"),
        (r"ThreadSanitizer", "ThreadSanitizer"),
        (r"no g\+\+", "g++"),
        (r"cannot be slowed down", "a limit to a disk's speed"),
        (r"loop device", "loop devices"),
        (r"file system can(?:not)? be mounted", "rights to mount"),
        (r"pid namespace", "namespaces of pids"),
        (r"network namespaces", "namespaces of networks"),
        (r"no `ip` command", "ip"),
        (r"may not be traced", "rights to trace"),
        (r"no trace of preemptions", "the trace of preemptions"),
        (r"mirror of Debian's packages|no apt or no keyring", "Debian's packages"),
        (r"^this processor has no (\w+)", r"\1"),
        (r"^no (\w+) here: ", r"the storage engine \1"),
        (r"(?:^|: )([^:]+?)(?: is| are)? not installed", r"\1"),
    )
)
"""What a test says -> what is wanted.  The first that fits counts."""


def want(reason: str) -> str:
    """The name of what a test was skipped for want of; empty if nothing is missing."""
    for pattern, name in WANTED:
        if found := pattern.search(reason):
            return found.expand(name)
    return ""


def by_want(reasons: Iterable[str]) -> Counter[str]:
    """How many tests were skipped for each want, or else for each reason as it is."""
    return Counter(want(reason) or reason for reason in reasons)


def line(reasons: Iterable[str]) -> str:
    """One for all of them, the most frequent first; empty if there are none."""
    wants, others = Counter[str](), Counter[str]()
    for reason in reasons:
        if name := want(reason):
            wants[name] += 1
        else:
            others[" ".join(reason.split())] += 1
    parts = []
    if wants:
        parts.append(f"skipped for want of: {_listed(wants)}")
    if others:
        parts.append(f"skipped{' as well' if wants else ''}: {_listed(others)}")
    return "; ".join(parts)


def _listed(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} ({count})" for name, count in ordered)


def reason_of(report: Any) -> str:
    """Of a test's report, or of a file that was skipped as a whole."""
    longrepr = report.longrepr
    text = longrepr[2] if isinstance(longrepr, tuple | list) else str(longrepr)
    return str(text).removeprefix("Skipped: ")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # so that all others have written when this does
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    yield
    if text := line(map(reason_of, terminalreporter.stats.get("skipped", []))):
        terminalreporter.write_line(text)
