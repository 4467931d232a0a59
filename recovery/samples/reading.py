"""Reads the files of a directory of samples; whoever can write there may have written anything."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from understudy.recovery.base.errors import BadInput
from understudy.recovery.samples.records import Beginning, parse
from understudy.recovery.samples.run import RankRecord, Run

_NAME = re.compile(r"samples-rank(\d{5,9})\.jsonl")
LONGEST_LINE = 64 << 20
"""Bytes: a batch of some million indices."""
MOST_BYTES = 16 << 30
"""Of all files of a run."""
MOST_FILES = 1 << 16
MOST_ATTEMPTS = 1 << 16


class Damaged(ValueError):
    """A file has lines that no worker has written: found bad.  Its text is the sentence."""


def read_run(directory: Path) -> Run:
    """Raises BadInput where there is nothing to read, Damaged where it is not what a worker has written."""
    try:
        files = sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name))
        size = sum(path.stat().st_size for path in files)
    except OSError as problem:
        raise BadInput(f"{directory} cannot be read: {problem.strerror}") from None
    if not files:
        raise BadInput(
            f"there are no samples (samples-rank….jsonl) in {directory}: run it with proxyrun --samples"
        )
    if size > MOST_BYTES or len(files) > MOST_FILES:
        raise BadInput(f"{directory} has {len(files)} files of {size} bytes: more than can be judged at once")
    run = Run()
    for path in files:
        try:
            _read(run, path)
        except OSError as problem:
            raise BadInput(f"{path} cannot be read: {problem.strerror}") from None
    if not run.attempts:
        raise Damaged(f"nothing begins in the files of {directory}")
    return run


def _read(run: Run, path: Path) -> None:
    """A line that a kill has torn, at the end or before another attempt begins, need be no record."""
    found = _NAME.fullmatch(path.name)
    assert found is not None
    current: RankRecord | None = None
    torn: tuple[int, ValueError] | None = None
    for number, line in _lines(path):
        try:
            place, record = parse(line)
        except ValueError as error:
            if torn is not None:
                raise _no_record(path, *torn) from None
            torn = (number, error)
            continue
        if torn is not None and not isinstance(record, Beginning):
            raise _no_record(path, *torn)
        if isinstance(record, Beginning):
            run.torn, torn = run.torn + (torn is not None), None
            if record.rank != int(found[1]):
                raise Damaged(f"{path.name}, line {number}, is of rank {record.rank}")
            if len(run.attempts) >= MOST_ATTEMPTS:
                raise Damaged(f"{path.name}, line {number}: there are more attempts than {MOST_ATTEMPTS}")
            try:
                current = run.begin(record)
            except ValueError as error:
                raise Damaged(f"{path.name}, line {number}: {error}") from None
        elif current is None:
            raise Damaged(f"{path.name}, line {number}, comes before any that begins an attempt")
        else:
            current.add(place, record)
    if torn is not None and current is None:
        raise _no_record(path, *torn)
    run.torn += torn is not None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Damaged(f"{path.name} is no regular file")
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise Damaged(f"{path.name}, line {number}, has more than {LONGEST_LINE} bytes")
            if line != b"\n":  # it ends one that was torn in the midst
                yield number, line


def _no_record(path: Path, number: int, error: ValueError) -> Damaged:
    return Damaged(f"{path.name}, line {number}, is no record: {str(error).rstrip('.')}")
