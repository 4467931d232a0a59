"""Files of YAML that people write: read with a limit, and what is wrong with one told in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from understudy.recovery.base.errors import BadInput

if TYPE_CHECKING:
    import yaml

LARGEST = 1 << 20
"""Bytes."""


def compose(path: Path, shown: str = "") -> yaml.Node | None:
    """What is in it, with the lines of all values, and nothing constructed; None: nothing is in it.

    `shown`: what the file is called in a sentence.  Raises BadInput.
    """
    import yaml  # a command that reads no file starts without it

    shown = shown or str(path)
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
    except OSError as problem:
        raise BadInput(f"{shown} cannot be read: {problem.strerror}") from problem
    if len(text) > LARGEST:
        raise BadInput(f"{shown} is larger than {LARGEST >> 20} MiB: that is no such file")
    try:
        found: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeError, RecursionError) as problem:
        mark = getattr(problem, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        what = getattr(problem, "problem", None) or type(problem).__name__
        raise BadInput(f"{shown}{where} is no YAML: {what}") from None
    return found
