"""Where the seconds of checkpoints went: a JSON line for each (paper 002 §4.9, checkpoint_rank0.jsonl)."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path


class Timing:
    """The line of one checkpoint, whose halves two threads bring: the training's, and the writer's.

    Seconds: `snapshot` (state captured and copied), `write` (until this rank's part was durable), `commit`
    (from then until the pointer named it), `backpressure` (waited for room), `enqueue` (handed over), `stall`
    (all that the training waited, at the barriers too; `write` and `commit` are in it if blocking). `bytes`
    of the payload.
    """

    def __init__(self, path: Path, **fields: int | str) -> None:
        self._path = path
        self._fields: dict[str, int | float | str | None] = {**fields}
        self._halves = 0
        self._lock = threading.Lock()

    def half(self, **fields: float | str | None) -> None:
        """What one of the two knows. The second one to come appends the line, in one write."""
        with self._lock:
            self._fields |= {
                name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()
            }
            self._halves += 1
            if self._halves < 2:
                return
        number = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(number, json.dumps(self._fields).encode() + b"\n")
        finally:
            os.close(number)
