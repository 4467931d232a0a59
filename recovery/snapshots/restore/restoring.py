"""Brings a stored snapshot back into logs, or merely reads all of it; started by proxyd for that alone.

    python -m understudy.recovery.snapshots.restore.restoring RUN --serial N --parent PID [RANK=DIRECTORY …]

A process of its own: storage may hang, and what it holds may be anything.  It answers one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from understudy import replay
from understudy.recovery.snapshots.restore.checking import problems_of
from understudy.recovery.snapshots.restore.reading import Damaged, PartReader, Place, SetReader, StoreError
from understudy.recovery.snapshots.stores.catalogue import StoredSet, read_run
from understudy.recovery.snapshots.writing.mapped import in_place


class Destination:
    """A rank's log, with room for the snapshot in its `snapshot` area; no device server uses that now."""

    def __init__(self, directory: Path, row: bytes, manifest: bytes) -> None:
        """Raises OSError or LogError."""
        self.log = replay.Log(str(directory))
        self.contents = self.log.begin_restore(row, manifest)
        self.area = memoryview(replay.MappedArea(str(directory / "snapshot"), writable=True))
        self.in_place = in_place(self.log)
        self.checked: list[int] = []
        """Buffers whose digests in the manifest are those that were compared with what was read."""


@dataclass(frozen=True)
class Use:
    """Where a content is wanted."""

    rank: int
    offset: int
    """In its area."""
    handle: int
    """Of a buffer; 0: of a generator."""
    digest: int
    """That the manifest has; 0: none."""


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
        wanted: dict[Place, list[Use]] = defaultdict(list)
        for rank, into in ranks.items():
            for handle, _, digest, offset in into.contents.buffers:
                wanted[reader.place(rank, handle)].append(Use(rank, offset, handle, digest))
            for number, count, _, offset in into.contents.generators:
                place = reader.part(rank).generator(number, count)
                wanted[place].append(Use(rank, offset, 0, 0))
        for part in reader.parts.values():
            _read_part(part, wanted, ranks)
        for into in ranks.values():
            into.log.finish_restore(stored.serial, into.contents, into.checked)
        return sum(count for into in ranks.values() for _, count, _, _ in into.contents.buffers)


def _read_part(
    part: PartReader, wanted: Mapping[Place, Sequence[Use]], ranks: Mapping[int, Destination]
) -> None:
    """What is wanted of it, straight to where one rank wants it, and from there to where others do."""
    own = part.part.rank
    first: dict[int, dict[Place, int]] = defaultdict(dict)
    copies: list[tuple[Place, Use, Use]] = []
    for place, uses in wanted.items():
        if place.rank != own:
            continue
        chosen, *others = sorted(uses, key=lambda use: use.rank != own)
        first[chosen.rank][place] = chosen.offset
        copies += [(place, chosen, other) for other in others]
        if chosen.digest and part.digests[place.index] == chosen.digest:
            ranks[chosen.rank].checked.append(chosen.handle)
    for rank, offsets in first.items():
        part.read_to(ranks[rank].area, offsets, ranks[rank].in_place)
    for place, chosen, other in copies:
        content = ranks[chosen.rank].area[chosen.offset : chosen.offset + place.bytes]
        ranks[other.rank].area[other.offset : other.offset + place.bytes] = content


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
