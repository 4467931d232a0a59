"""Files that anybody may have written: read to a bound, and what is wrong with them in few words."""

from __future__ import annotations

import stat
from pathlib import Path

from pydantic import ValidationError


def content(path: Path, most: int) -> bytes:
    """All of it. Raises ValueError for what is no plain file, or has more than `most` bytes; OSError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is no plain file")
    with path.open("rb") as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise ValueError(f"it has more than {most >> 20} MiB")
    return found


def short(problem: Exception) -> str:
    """Its first line: pydantic's have many."""
    if isinstance(problem, ValidationError):
        first = problem.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        return f"{where}: {first['msg']}" if where else str(first["msg"])
    if isinstance(problem, OSError):
        return str(problem.strerror)
    return str(problem).splitlines()[0] if str(problem) else type(problem).__name__
