"""An upload or removal that is cut short anywhere leaves only whole sets that count, and nothing for good."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import fsspec
import mirrors
import pytest
from mirrors import JOB, RUN, ObjectServer, Stores, assert_whole, contents_of, new_bucket

from understudy.recovery.base.own_modules import module_command
from understudy.recovery.snapshots.remote.mirror import Mirror
from understudy.recovery.snapshots.remote.mirror_messages import (
    Answer,
    Copied,
    Copy,
    Failed,
    Moved,
    Ready,
    Target,
    decode_answer,
)
from understudy.recovery.snapshots.remote.second_tier import Remote
from understudy.recovery.snapshots.stores.catalogue import StoredSet
from understudy.recovery.snapshots.stores.retention import Retention
from understudy.recovery.snapshots.tiers import MirrorTier

pytestmark = pytest.mark.drawn(9)

KEEP = Retention(keep_last=2)
CHANGES = ("open", "mv", "rm_file", "makedirs")


class Crash(BaseException):
    """The process ends here."""


class CrashingFiles:
    """A file system whose process ends at one of its changes: before it, or after a part of it."""

    def __init__(self, files: Any, at: int, half: bool) -> None:
        self._files, self._at, self._half = files, at, half
        self.changes = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._files, name)
        if name not in CHANGES:
            return real

        def changed(*arguments: Any, **options: Any) -> Any:
            self.step()
            answer = real(*arguments, **options)
            return CrashingFile(answer, self) if name == "open" else answer

        return changed

    def step(self) -> bool:
        """Counts a change; true if it is to be done by half."""
        self.changes += 1
        if self.changes == self._at and not self._half:
            raise Crash
        return self.changes == self._at


class CrashingFile:
    def __init__(self, file: Any, files: CrashingFiles) -> None:
        self._file, self._files = file, files

    def write(self, content: bytes) -> None:
        if self._files.step():
            self._file.write(content[: len(content) // 2])
            self._file.flush()
            raise Crash
        self._file.write(content)

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return int(self._file.fileno())

    def __enter__(self) -> CrashingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def upload_and_tidy(url: str, stored: StoredSet, at: int, half: bool) -> tuple[bool, int]:
    """Whether the set was uploaded, and how many changes were made."""
    remote = Remote(url)
    remote._files = files = CrashingFiles(remote._files, at, half)
    mirror, uploaded = Mirror(remote), False
    try:
        mirror.upload(stored)
        uploaded = True
        mirror.tidy(JOB, RUN, KEEP)
    except Crash:
        pass
    return uploaded, files.changes


def everything_at(url: str) -> set[str]:
    files, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    return set(files.find(root))


@pytest.mark.parametrize("half", [False, True], ids=["before a change", "in the middle of a write"])
def test_a_crash_at_any_change_leaves_whole_sets_the_newest_among_them_and_the_next_run_clears_up(
    tmp_path: Path, half: bool
) -> None:
    stores = Stores(tmp_path / "stores")
    sets = [stores.put(serial) for serial in (1, 2, 3, 4)]
    at, crashed = 0, True
    while crashed:
        at += 1
        mirror = tmp_path / f"mirror-{at}"
        mirror.mkdir()
        url = f"file://{mirror}"
        for stored in sets[:2]:
            Mirror(Remote(url)).upload(stored)
        uploaded, changes = upload_and_tidy(url, sets[2], at, half)
        crashed = changes >= at
        left = [one.serial for one in assert_whole(url)]
        assert left[:2] == ([3, 2] if uploaded else [2, 1])
        Mirror(Remote(url)).upload(sets[3])
        Mirror(Remote(url)).tidy(JOB, RUN, KEEP)
        (newest, _) = assert_whole(url)
        assert newest.serial == 4
        assert len(everything_at(url)) == 2 * (1 + stores.ranks)
    assert at > 10


server, url = mirrors.server, mirrors.url  # fixtures


class RunningUploader:
    """The real process, asked as proxyd asks it."""

    def __init__(self, directory: Path, url: str) -> None:
        command = [*module_command("recovery.snapshots.remote.uploader"), str(directory)]
        self.process = subprocess.Popen(
            [*command, "--job", JOB, "--parent", str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._say(Target(url, KEEP.keep_last, KEEP.keep_every).encode())
        assert self.next() == Ready()

    def copy(self, serial: int) -> None:
        self._say(Copy(serial, RUN).encode())

    def next(self) -> Answer:
        assert self.process.stdout is not None
        return decode_answer(self.process.stdout.readline())

    def until(self, kind: type) -> Answer:
        while not isinstance(answer := self.next(), kind):
            assert isinstance(answer, Moved), answer
        return answer

    def kill_after(self, seconds: float) -> None:
        """From now, by our clock: wherever it is then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.process.kill()
        self.process.communicate()

    def _say(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()


def test_an_uploader_that_is_killed_at_any_moment_leaves_only_whole_sets(
    url: str, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    stores = Stores(tmp_path / "stores", slots=16)
    sizes = (18 << 20, 3000, 1 << 20)
    stores.put(1, sizes=sizes)
    undisturbed = RunningUploader(stores.directory, url)
    begun = time.monotonic()
    undisturbed.copy(1)
    assert isinstance(undisturbed.until(Copied), Copied)
    assert undisturbed.next() == Ready()
    takes_s = time.monotonic() - begun
    undisturbed.kill_after(0)
    complete = {1}
    for serial in range(2, 7):
        stores.put(serial, sizes=sizes)
        doomed = RunningUploader(stores.directory, url)
        doomed.copy(serial)
        doomed.kill_after(chance.uniform(0, 1.2 * takes_s))
        found = [one.serial for one in assert_whole(url)]
        assert found and found[0] >= max(complete), (found, complete)
        complete |= set(found)
    last = stores.put(10, sizes=sizes)
    successor = RunningUploader(stores.directory, url)
    successor.copy(10)
    assert successor.until(Copied) == Copied(10, last.step, last.bytes, ANY)
    assert successor.next() == Ready()
    successor.kill_after(0)
    newest, _ = assert_whole(url)
    assert newest.serial == 10
    assert len(everything_at(url)) == 2 * (1 + stores.ranks)
    place = MirrorTier(url)
    with place.readable(place.catalogue("").sets[0], tmp_path / "out") as fetched:
        assert contents_of(fetched) == contents_of(last)


def test_a_set_that_cannot_be_removed_keeps_neither_new_ones_from_coming_nor_others_from_going(
    tmp_path: Path,
) -> None:
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    stores = Stores(tmp_path / "stores")
    uploader = RunningUploader(stores.directory, mirror.as_uri())
    for serial in (1, 2, 3, 4):
        stores.put(serial)
        with immutable(mirror.glob(f"{JOB}/{RUN}/1/*")):
            uploader.copy(serial)
            assert isinstance(uploader.until(Copied), Copied)
            if serial > KEEP.keep_last:
                failed = uploader.next()
                assert isinstance(failed, Failed) and "stays: " in failed.error
            assert uploader.next() == Ready()
    uploader.kill_after(0)
    assert [one.serial for one in assert_whole(mirror.as_uri())] == [4, 3, 1]


@contextlib.contextmanager
def immutable(files: Iterable[Path]) -> Iterator[None]:
    """Even for root, as objects under a retention lock are."""
    names = [str(path) for path in files]
    if names and subprocess.run(["chattr", "+i", *names], check=False).returncode != 0:
        pytest.skip("files cannot be made immutable here")
    try:
        yield
    finally:
        if names:
            subprocess.run(["chattr", "-i", *names], check=True)


def test_an_object_server_that_goes_away_and_comes_back_gets_the_newest_set_then(
    server: ObjectServer, tmp_path: Path
) -> None:
    url = new_bucket(server)
    stores = Stores(tmp_path / "stores")
    stores.put(1)
    uploader = RunningUploader(stores.directory, url)
    server.stop()
    try:
        uploader.copy(1)
        failed = uploader.until(Failed)
        assert isinstance(failed, Failed) and "very-secret-words" not in failed.error
    finally:
        server.restart()
    last = stores.put(2)
    assert uploader.next() == Ready()
    uploader.copy(2)
    assert uploader.until(Copied) == Copied(2, last.step, last.bytes, ANY)
    uploader.kill_after(0)
    assert [one.serial for one in assert_whole(url)] == [2]
