"""File systems that are full and devices that fail, for tests that run as root; others are skipped."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def tiny_file_system(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of `size`, mounted where only a helper process sees it; it ends with that process."""
    inner = folder / "tiny"
    inner.mkdir()
    script = f'mount -t tmpfs -o size={size} none "$0" && echo ready && read _'
    try:
        with own_mounts(script, inner) as helper:
            yield Path(f"/proc/{helper}/root{inner}")
    finally:
        inner.rmdir()


@contextlib.contextmanager
def own_mounts(script: str, place: Path) -> Iterator[int]:
    """Process id of a shell in a namespace of mounts of its own; it says "ready", and ends with its input.

    Skips the test where that is not possible.
    """
    command = ["unshare", "--mount", "--propagation", "private", "bash", "-c", script, str(place)]
    helper = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert helper.stdin and helper.stdout and helper.stderr
        if helper.stdout.readline() != "ready\n":
            pytest.skip(f"no file system can be mounted here: {helper.stderr.read().strip()}")
        yield helper.pid
    finally:
        helper.communicate()


@contextlib.contextmanager
def loop_device(backing: Path, *options: str) -> Iterator[str]:
    """A block device whose blocks are those of a file."""
    if shutil.which("losetup") is None:
        pytest.skip("losetup is not installed")
    made = subprocess.run(
        ["losetup", "--find", "--show", *options, str(backing)], capture_output=True, text=True
    )
    if made.returncode != 0:
        pytest.skip(f"no loop device can be had here: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


@contextlib.contextmanager
def device_on_a_full_file_system(folder: Path, size: int) -> Iterator[str]:
    """A block device of `size` bytes on which every write fails: there is no room for any of its blocks."""
    with tiny_file_system(folder, "64k") as tiny:
        backing = tiny / "backing"
        with backing.open("wb") as file:
            file.truncate(size)
        with (tiny / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        with loop_device(backing) as device:
            yield device


@contextlib.contextmanager
def flakey_device(folder: Path, size: int) -> Iterator[str]:
    """A block device of `size` bytes on which every write fails (dm-flakey, always down)."""
    if not Path("/dev/mapper/control").exists() or shutil.which("dmsetup") is None:
        pytest.skip("this kernel has no device-mapper, or dmsetup is not installed")
    backing = folder / "backing"
    with backing.open("wb") as file:
        file.truncate(size)
    with loop_device(backing) as device:
        name = f"understudy-test-{Path(device).name}"
        table = f"0 {size // 512} flakey {device} 0 0 3600 1 error_writes"
        made = subprocess.run(["dmsetup", "create", name, "--table", table], capture_output=True, text=True)
        if made.returncode != 0:
            pytest.skip(f"no dm-flakey here: {made.stderr.strip().splitlines()[:1]}")
        try:
            yield f"/dev/mapper/{name}"
        finally:
            subprocess.run(["dmsetup", "remove", "--retry", name], check=True)
