"""How modules of ours are run as processes of their own, and where they lie."""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = __name__.partition(".")[0]
"""The package above all of ours, as this process has imported it."""
FOLDER = Path(__file__).absolute().parents[2]
"""Of that package."""
HOME = FOLDER.parent
"""What has to be on `sys.path` for it to be found."""


def name_of(module: str) -> str:
    """The full name of a module below `understudy`: "recovery.proxyd", for example."""
    return f"{PACKAGE}.{module}"


def module_command(module: str) -> list[str]:
    """The beginning of a command line that runs it.  -P: nothing of the working directory is imported."""
    return [sys.executable, "-P", "-m", name_of(module)]
