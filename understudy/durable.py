"""What the parts of the library share: names that are durable, and records that may be hostile."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def sync_folder(path: Path) -> None:
    """Make the names in it durable. Raises OSError."""
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def make_folder(path: Path) -> None:
    """For its owner alone, with those above it, each name durable. Raises OSError."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(0o700, exist_ok=True)
        sync_folder(path.parent)


def json_object(text: bytes) -> dict[str, Any]:
    """Raises ValueError, in words behind the record's name, for what is none."""
    try:
        fields = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("it is no JSON object")
    return fields
