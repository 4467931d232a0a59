"""A job's uploader: copies complete sets from its stores to the second tier, for as long as proxyd lives.

    python -m understudy.recovery.snapshots.remote.uploader DIRECTORY --job JOB --parent PID
    (a Target on stdin, then Copy)

A process of its own: what is far away may hang, and its libraries bring threads.  One set at a time; proxyd
sends the next when this says that it is ready, and keeps the slots of the one under way.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from tenacity import Retrying, wait_random_exponential

from understudy import replay
from understudy.recovery.snapshots.remote.mirror import Mirror
from understudy.recovery.snapshots.remote.mirror_messages import (
    Answer,
    Copied,
    Copy,
    Failed,
    Moved,
    Ready,
    decode_copy,
    decode_target,
)
from understudy.recovery.snapshots.remote.second_tier import Remote
from understudy.recovery.snapshots.stores.catalogue import find_set
from understudy.recovery.snapshots.stores.retention import Retention

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
"""Between tries; they grow in between, at random, so that many jobs do not knock at once."""
SENTENCE = 300
"""Characters of an error: some libraries quote whole documents."""


class Uploader:
    """Uploads the sets of one job."""

    def __init__(self, directory: Path, job: str, mirror: Mirror, rule: Retention) -> None:
        self._directory, self._job, self._mirror, self._rule = directory, job, mirror, rule

    def serve(self) -> None:
        """Until stdin ends."""
        while True:
            for attempt in Retrying(wait=wait_random_exponential(FIRST_WAIT_S, max=LONGEST_WAIT_S)):
                with attempt:
                    self._serve_one()

    def _serve_one(self) -> None:
        """The newest set that proxyd has when this is asked; raises OSError or ValueError."""
        answer(Ready())
        line = sys.stdin.buffer.readline()
        if not line:
            os._exit(0)
        request = decode_copy(line)
        try:
            answer(self._copy(request))
        except (OSError, ValueError) as problem:
            answer(Failed(_sentence(problem)))
            raise
        try:
            self._mirror.tidy(self._job, request.run, self._rule)
        except (OSError, ValueError) as problem:  # there may be places where nothing can be removed
            answer(Failed(f"what is not to be kept there stays: {_sentence(problem)}"))

    def _copy(self, request: Copy) -> Copied:
        begun = time.monotonic()
        stored = find_set(self._directory / self._job / request.run, request.serial)
        mirrored = self._mirror.upload(stored, lambda count: answer(Moved(count)))
        return Copied(request.serial, mirrored.step, mirrored.bytes, time.monotonic() - begun)


def _sentence(problem: Exception) -> str:
    return " ".join(str(problem).split())[:SENTENCE] or repr(problem)


def answer(message: Answer) -> None:
    """To proxyd."""
    sys.stdout.buffer.write(message.encode())
    sys.stdout.buffer.flush()


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="understudy-uploader")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--job", required=True)
    parser.add_argument("--parent", type=int, required=True)
    given = parser.parse_args()
    replay.die_with_parent(given.parent)
    os.nice(10)  # training comes first
    os.umask(0o077)  # where the second tier is a directory: the owner's alone
    target = decode_target(sys.stdin.buffer.readline())
    rule = Retention(target.keep_last, target.keep_every)
    Uploader(given.directory, given.job, Mirror(Remote(target.url)), rule).serve()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
