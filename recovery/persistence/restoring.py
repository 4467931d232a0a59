"""Brings a stored snapshot back into logs, or merely reads all of it; started by proxyd for that alone.

    python -m understudy.recovery.persistence.restoring RUN --serial N --parent PID [RANK=DIRECTORY …]

A process of its own: storage may hang, and what it holds may be anything.  It answers one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import mmap
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from understudy import replay
from understudy.recovery.persistence.catalogue import StoredSet, read_run
from understudy.recovery.persistence.checking import problems_of
from understudy.recovery.persistence.reading import Damaged, Place, SetReader, StoreError


class Destination:
    """A rank's log, with room for the snapshot in its `snapshot` area; no device server uses that now."""

    def __init__(self, directory: Path, row: bytes, manifest: bytes) -> None:
        """Raises OSError or LogError."""
        self.log = replay.Log(str(directory))
        self.contents = self.log.begin_restore(row, manifest)
        with open(directory / "snapshot", "r+b") as file:
            self._area = memoryview(mmap.mmap(file.fileno(), 0))

    def at(self, offset: int, count: int) -> memoryview:
        """Some of the area."""
        return self._area[offset : offset + count]


def find(run: Path, serial: int) -> StoredSet:
    """A set of that run with all its parts; raises OSError or Damaged."""
    catalogue = read_run(run)
    for one in catalogue.sets:
        if one.serial == serial and one.complete:
            return one
    raise Damaged("; ".join([f"{run} holds no complete snapshot {serial}", *catalogue.problems]))


def restore(stored: StoredSet, directories: Mapping[int, Path]) -> int:
    """Publish it in the logs of these ranks as device servers do; answers the bytes of their state.

    Every chunk that is read is checked, and every buffer against its digest in the manifest.  Raises OSError,
    StoreError, LogError or Damaged.
    """
    with SetReader(stored) as reader:
        ranks = {
            rank: Destination(directory, *reader.part(rank).tables())
            for rank, directory in directories.items()
        }
        wanted: dict[Place, list[memoryview]] = defaultdict(list)
        for rank, into in ranks.items():
            for handle, count, _, offset in into.contents.buffers:
                wanted[reader.place(rank, handle)].append(into.at(offset, count))
            for number, count, _, offset in into.contents.generators:
                wanted[reader.part(rank).generator(number, count)].append(into.at(offset, count))
        for part in reader.parts.values():
            part.read_into(
                {place: views[0] for place, views in wanted.items() if place.rank == part.part.rank}
            )
        for first, *others in wanted.values():
            for view in others:
                view[:] = first
        for into in ranks.values():
            into.log.finish_restore(stored.serial, into.contents)
        return sum(count for into in ranks.values() for _, count, _, _ in into.contents.buffers)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="understudy-restoring")
    parser.add_argument("run", type=Path)
    parser.add_argument("logs", nargs="*")
    parser.add_argument("--serial", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    given = parser.parse_args()
    replay.die_with_parent(given.parent)
    logs = {int(rank): Path(path) for rank, _, path in (text.partition("=") for text in given.logs)}
    try:
        stored = find(given.run, given.serial)
        if logs:
            answer: dict[str, object] = {"bytes": restore(stored, logs)}
        else:
            answer = {"error": "; ".join(problems_of(stored)), "bytes": stored.bytes}
    except (OSError, StoreError, replay.LogError, Damaged) as problem:
        answer = {"error": str(problem) or repr(problem)}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
