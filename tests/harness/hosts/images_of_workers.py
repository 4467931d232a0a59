"""Workers as a stream of parts, without a worker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from understudy.protos import control_pb2 as pb
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY
from understudy.recovery.migration.transfer.header import VERSION
from understudy.recovery.migration.transfer.stream import StreamPart, parts

RUNTIME = f"{SHARED_MEMORY}/understudy-{os.getuid()}-1-2-abc"


def header(number: int = 1, **more: Any) -> pb.WorkerHeader:
    told: dict[str, Any] = {
        "version": VERSION, "move": "0" * 32, "job": "j", "rank": number, "world": 2, "home": "b",
        "directory": f"{RUNTIME}/j/rank-{number}", "relay": f"{RUNTIME}/r.01234567/r1",
        "worker": 5, "pids": [5],
    }  # fmt: skip
    return pb.WorkerHeader(**(told | more))


def some_parts(folder: Path, found: pb.WorkerHeader | None = None) -> list[pb.WorkerPart]:
    """Of a worker with an image and a log."""
    (folder / "core.img").write_bytes(b"image" * 1000)
    (folder / "control").write_bytes(b"\0" * 4096 + b"log" * 100)
    files = [StreamPart("image", folder / "core.img"), StreamPart("log", folder / "control")]
    return list(parts(found or header(), files))
