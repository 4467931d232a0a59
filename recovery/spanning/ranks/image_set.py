"""Images of workers with what is told of them, on disk: what a proxyd keeps outlives it.

Beside the image of a rank, `rank-R`, lies what is told of it, `rank-R.about`.  With the images that a leader
takes lies the set that they belong to, `set`.  Each is whole or is not there, and counts for a job's one run.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import structlog
from google.protobuf.message import DecodeError

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.whole_file import read_whole, write_whole
from understudy.recovery.migration.transfer.header import Refusal, check_form
from understudy.recovery.spanning.ranks.image_file import Taken

log = structlog.get_logger()

ABOUT, SET = ".about", "set"
INHERITED = "inherited"
"""The set of a leader that was lost, which it had left to us."""
MOST_BYTES = 64 << 20
About = TypeVar("About", pb.AboutImage, pb.AboutSet)


@dataclass
class KeptSet:
    """Images as of one set of snapshots, in one folder."""

    folder: Path
    order: tuple[int, int]
    """Of the leadership in which it came, and its number there."""
    images: dict[int, Taken] = field(default_factory=dict)
    described: dict[int, pb.RankDescription] = field(default_factory=dict)
    """Their ranks, as they were."""


@dataclass(frozen=True)
class Left:
    """What whoever led a job before has left: images, and the set that they belong to."""

    images: pb.ImageSet
    kept: KeptSet

    def described(self, host: str) -> list[pb.RankDescription]:
        """Ranks that ran there when the images were taken, and whose images are here."""
        ranks = [one.rank for one in self.images.workers if one.host == host]
        return [self.kept.described[rank] for rank in ranks if rank in self.kept.described]


def write_about(
    taken: Taken, described: pb.RankDescription, run: str, order: tuple[int, int] = (0, 0)
) -> None:
    """Beside an image that is complete: from here on it is kept.  Raises OSError."""
    about = pb.AboutImage(
        run=run, described=described, header=taken.header, bytes=taken.bytes,
        file_bytes=taken.path.stat().st_size, leadership=order[0], number=order[1],
    )  # fmt: skip
    write_whole(_about(taken.path), about.SerializeToString())


def write_set(folder: Path, run: str, images: pb.ImageSet) -> None:
    """What the images of a folder belong to: from here on they count.  Raises OSError."""
    write_whole(folder / SET, pb.AboutSet(run=run, images=images).SerializeToString())


def _about(path: Path) -> Path:
    return path.with_name(path.name + ABOUT)


def remove_image(path: Path) -> None:
    """With what is told of it."""
    for one in (_about(path), path):
        one.unlink(missing_ok=True)


def read_kept(folder: Path, job: str, run: str) -> KeptSet:
    """The images of a folder that are whole, and of that run."""
    kept = KeptSet(folder, (0, 0))
    for path in sorted(folder.glob(f"rank-*{ABOUT}")):
        image = path.with_name(path.name.removesuffix(ABOUT))
        about = _read(path, pb.AboutImage(), run)
        if about is not None and (taken := _taken(image, about, job)) is not None:
            rank, kept.order = about.header.rank, (about.leadership, about.number)
            kept.images[rank], kept.described[rank] = taken, about.described
    return kept


def read_left(folder: Path, job: str, run: str) -> Left | None:
    """What the images of a folder belong to, if they count."""
    about = _read(folder / SET, pb.AboutSet(), run)
    return Left(about.images, read_kept(folder, job, run)) if about is not None else None


def find_kept(folder: Path, job: str, run: str) -> dict[str, KeptSet]:
    """Sets below a folder that have an image, by their names; all else there is removed."""
    try:
        sets = {path.name: read_kept(path, job, run) for path in sorted(folder.glob("[0-9a-f]*"))}
        sets = {name: kept for name, kept in sets.items() if kept.images}
        _remove_all_but(folder, {kept.folder for kept in sets.values()})
    except OSError as problem:
        log.warning("CPU images cannot be looked for", path=str(folder), problem=str(problem))
        return {}
    return sets


def find_left(folder: Path, job: str, run: str) -> tuple[Left | None, int]:
    """The newest set below a folder that counts, and the highest number there; all else is removed.

    Sets are numbered; INHERITED is older than each.
    """
    try:
        numbers = sorted(int(path.name) for path in folder.glob("[0-9]*") if path.name.isdecimal())
        names = [*map(str, reversed(numbers)), INHERITED]
        left = next(filter(None, (read_left(folder / name, job, run) for name in names)), None)
        _remove_all_but(folder, {left.kept.folder} if left is not None else set())
    except OSError as problem:
        log.warning("CPU images cannot be looked for", path=str(folder), problem=str(problem))
        return None, 0
    return left, max(numbers, default=0)


def _remove_all_but(folder: Path, kept: Collection[Path]) -> None:
    """Remove what is of a former run, or is not needed any more."""
    for path in folder.glob("*"):
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)
    if not kept:
        shutil.rmtree(folder, ignore_errors=True)


def _taken(image: Path, about: pb.AboutImage, job: str) -> Taken | None:
    header = about.header
    try:
        check_form(header)
        whole = image.stat().st_size == about.file_bytes
    except (Refusal, OSError) as problem:
        log.warning("a CPU image is left out", path=str(image), problem=str(problem))
        return None
    named = (header.job, image.name, about.described.rank) == (job, f"rank-{header.rank}", header.rank)
    return Taken(image, header, about.bytes) if whole and named else None


def _read(path: Path, message: About, run: str) -> About | None:
    """Whatever lies there may be of anybody."""
    try:
        message.ParseFromString(read_whole(path, MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, DecodeError) as problem:
        log.warning("what is told of CPU images cannot be read", path=str(path), problem=str(problem))
        return None
    return message if message.run == run else None
