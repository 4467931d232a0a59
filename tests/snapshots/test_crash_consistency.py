"""Whatever a crash leaves of unsynced writes, the snapshot store still has what it promised."""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass
from itertools import product

import pytest
from disk_images import BLOCK, Promise, Workload, images

from understudy.recovery.snapshots._store import RecordedDisk, Store

pytestmark = pytest.mark.drawn(3)

KINDS = ("", "ranges", "old", "area")


@dataclass
class Tried:
    failures: int = 0
    images: int = 0
    different: int = 0
    violations: int = 0
    first: str = ""


def try_crashes(
    rng: random.Random,
    *,
    in_flight: int,
    rounds: int = 4,
    kind: str = "",
    ignore: str = "",
    failing: bool = False,
    at_each: int = 4,
    exhaustive: int = 5,
) -> Tried:
    """Runs a workload, then opens what crashes may leave of it."""
    work = Workload(rng, slots=in_flight + 3, kind=kind)
    disk = work.empty_disk()
    start = disk.content()
    for slot in range(work.slots):
        header = 2 * BLOCK + slot * (BLOCK + work.slot_bytes)
        if ignore == "slot":
            disk.ignore_syncs(header, header + BLOCK + work.slot_bytes)
    if ignore == "superblock":
        disk.ignore_syncs(0, 2 * BLOCK)
    elif ignore == "everything":
        disk.ignore_syncs(0, len(start))
    if failing:
        opening = 2 + 2 * work.slots  # reads of superblocks and headers
        disk.fail(opening + rng.randrange(28 * in_flight), rng.choice([errno.EIO, errno.ENOSPC]))
    work.run(disk, in_flight, rounds)
    tried = Tried(len(work.failures))
    seen: set[tuple[int, int]] = set()
    for image, marks in images(disk.log(), start, rng, at_each, exhaustive):
        tried.images += 1
        key = (hash(image), marks)
        if key in seen:
            continue
        seen.add(key)
        tried.different += 1
        if violation := work.violation(image, marks):
            tried.violations += 1
            tried.first = tried.first or violation
            if not ignore:
                break
    return tried


def try_many(seed: int, images_wanted: int, at_each: int, exhaustive: int) -> None:
    rng = random.Random(seed)
    total = different = runs = failures = 0
    while total < images_wanted:
        for in_flight in (1, 2, 3):
            for failing, kind in product((False, True), KINDS):
                tried = try_crashes(
                    rng,
                    in_flight=in_flight,
                    kind=kind,
                    failing=failing,
                    rounds=5 - in_flight,
                    at_each=at_each,
                    exhaustive=exhaustive,
                )
                where = f"in_flight={in_flight}, kind={kind!r}, failing={failing}"
                assert not tried.first, f"image {tried.images} of {where}: {tried.first}"
                total += tried.images
                different += tried.different
                failures += tried.failures
                runs += 1
    print(f"{total} images of {runs} runs with {failures} failed calls, {different} of them different")
    assert failures > 0


@pytest.mark.drawn(1)
def test_a_crash_at_any_moment_loses_nothing_that_was_promised(seed: int) -> None:
    try_many(seed, 4000, at_each=2, exhaustive=4)


@pytest.mark.long
def test_a_crash_at_any_moment_loses_nothing_in_many_more_images(seed: int) -> None:
    try_many(seed, 150_000, at_each=6, exhaustive=7)


@pytest.mark.parametrize(
    ("kind", "ignore"), [("ranges", "slot"), ("ranges", "superblock"), ("", "everything")]
)
def test_the_same_crashes_find_each_sync_that_is_left_out(seed: int, kind: str, ignore: str) -> None:
    rng = random.Random(seed)
    tried = try_crashes(rng, in_flight=1, rounds=6, kind=kind, ignore=ignore)
    print(f"{tried.violations} violations in {tried.different} images; the first: {tried.first}")
    assert tried.violations > 0


def test_a_store_goes_on_from_what_a_crash_left_and_survives_the_next_one(seed: int) -> None:
    rng = random.Random(seed)
    work = Workload(rng, slots=5)
    start = work.empty_disk().content()
    marks_before = 0
    for _ in range(8):
        disk = RecordedDisk(start)
        work.run(disk, in_flight=2, rounds=2)
        left = list(images(disk.log(), start, rng, at_each=1, exhaustive=0))
        for image, marks in rng.sample(left, min(40, len(left))):
            assert not work.violation(image, marks_before + marks)
        start, marks = rng.choice(left)
        del work.promises[marks_before + marks :]  # what was promised after that crash has not happened
        with Store.open_on(RecordedDisk(start), writable=False) as store:
            listed = store.snapshots()
        known = {promise.sequence for promise in work.promises}
        for entry in listed:  # what was found will be found again
            assert entry.valid_header
            if entry.sequence not in known:
                work.promises.append(Promise(0, entry.sequence, entry.serial, True))
        marks_before = len(work.promises)


@pytest.mark.parametrize("kind", KINDS)
def test_a_writer_that_was_killed_leaves_nothing_that_the_next_one_could_lose(seed: int, kind: str) -> None:
    """Its last superblock is written, and no sync has followed it: then power fails."""
    rng = random.Random(seed)
    tried = 0
    for _ in range(8):
        work = Workload(rng, slots=3, kind=kind)
        disk = work.empty_disk()
        start = disk.content()
        for _ in range(5):
            work.run(disk, in_flight=1, rounds=2)
        for image, marks in images(disk.log(), start, rng, at_each=2, exhaustive=5):
            tried += 1
            assert not (violation := work.violation(image, marks)), violation
    print(f"{tried} images")
