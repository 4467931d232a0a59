"""Names of files with state on storage that hosts share, and what becomes of those whose writers are gone."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

from understudy.replay import process_start_ticks

_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,62})\.([0-9]{1,9})\.([0-9]{1,19})-[0-9a-f]{32}\.state")


def new_name(host: str) -> str:
    """Of this process on that host; nobody can guess it."""
    me = os.getpid()
    return f"{host}.{me}.{process_start_ticks(me)}-{secrets.token_hex(16)}.state"


def is_name(text: str) -> bool:
    """Whether it is one of ours, and so leads nowhere else."""
    return _NAME.fullmatch(text) is not None


def clear_leftovers(directory: Path, host: str) -> None:
    """Remove what processes of this host have left that live no more."""
    with contextlib.suppress(OSError):  # whoever writes there is told of it
        for path in list(directory.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match is None or match[1] != host or process_start_ticks(int(match[2])) == int(match[3]):
                continue
            with contextlib.suppress(OSError):
                path.unlink()
