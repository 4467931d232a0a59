"""Disks that really fail, hang, or are slow, for tests that run as root; others are skipped with the reason.

A disk is an ext4 file system on a loop device on a file.  It is mounted where only a helper process sees it,
and goes with that process, so that nothing is left of a test however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_disks import own_mounts

FIFREEZE, FITHAW = 0xC0045877, 0xC0045878
EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2
THROTTLE = "blkio.throttle.write_bps_device"


class LoopDisk:
    """Mounted at `path`."""

    def __init__(self, image: Path, helper: int, place: Path) -> None:
        self._image, self._helper, self._place = image, helper, place
        self._throttled: Path | None = None
        self.mount()

    @property
    def path(self) -> Path:
        """As every process sees it."""
        return Path(f"/proc/{self._helper}/root{self._place}")

    @property
    def number(self) -> str:
        """MAJOR:MINOR of its block device."""
        device = os.stat(self.path).st_dev
        return f"{os.major(device)}:{os.minor(device)}"

    # -------------------------------------------------------------- what a person does
    def mount(self) -> None:
        """Skips the test where that is not possible."""
        made = self._within("mount", "-o", "loop,errors=remount-ro", str(self._image), str(self._place))
        if made.returncode != 0:
            pytest.skip(f"no ext4 on a loop device can be mounted here: {made.stderr.strip()}")

    def unmount(self) -> str:
        """Empty, or why it is refused."""
        return self._within("umount", str(self._place)).stderr.strip()

    def repair(self) -> None:
        """Of a file system that is not mounted."""
        command = ["e2fsck", "-fy", str(self._image)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 1), done.stdout + done.stderr

    # -------------------------------------------------------------- what a disk does
    def die(self) -> None:
        """Every access answers EIO until it is mounted anew; what was not durable is lost."""
        self._control(EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))

    def find_damage(self) -> None:
        """The kernel finds its file system damaged and makes it read-only, until it is repaired."""
        name = Path(f"/sys/dev/block/{self.number}").resolve().name
        Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("1")

    def hang(self) -> None:
        """Who writes to it sleeps, and cannot even be killed."""
        self._control(FIFREEZE)

    def recover(self) -> None:
        """From hanging."""
        self._control(FITHAW)

    def slow_down(self, bytes_s: int) -> None:
        """Writes take no more than this; 0: as it was.  Skips the test where the kernel has no such limit."""
        where = self._throttled or _throttle()
        try:
            where.write_text(f"{self.number} {bytes_s}")
        except OSError as problem:
            pytest.skip(f"writes cannot be slowed down here: {problem}")
        self._throttled = where

    def end(self) -> None:
        """Nothing of it may wait for anything."""
        if self._throttled is not None:
            self.slow_down(0)
        with contextlib.suppress(OSError):  # it does not hang
            self.recover()

    def _control(self, request: int, argument: bytes = bytes(4)) -> None:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(descriptor, request, argument)
        finally:
            os.close(descriptor)

    def _within(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["nsenter", "--mount", f"--target={self._helper}", *command],
            capture_output=True, text=True, check=False,
        )  # fmt: skip


@contextlib.contextmanager
def loop_disk(folder: Path, bytes_: int = 64 << 20) -> Iterator[LoopDisk]:
    """A disk that works, of so many bytes."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    for program in ("mkfs.ext4", "e2fsck", "fsfreeze", "nsenter", "unshare", "mount"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    image, place = folder / "disk.image", folder / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(bytes_)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    script = 'echo ready; cat > /dev/null; fsfreeze --unfreeze "$0" 2> /dev/null'
    with own_mounts(script, place) as helper:
        disk = LoopDisk(image, helper, place)
        try:
            yield disk
        finally:
            disk.end()


def _throttle() -> Path:
    """Where limits of our own control group stand.  Skips the test where there are none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if "blkio" in controllers.split(","):
            found = Path("/sys/fs/cgroup/blkio") / group.lstrip("/") / THROTTLE
            if found.exists():
                return found
    pytest.skip("writes cannot be slowed down here: there is no control group of the controller blkio")
