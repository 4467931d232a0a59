"""Drives an executor with hand-written records, as a hostile or a good worker would."""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed  # noqa: F401 - the executor's communicators are its types
from training_run import driver

from understudy.proxy_server import _server
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY
from understudy.replay import Log, LogWriter, create_log

PATIENCE_S = 30.0
FLOAT, LONG = 6, 4  # c10::ScalarType
(PAD, OPERATOR, OPERATOR_SYNC, FREE, ALLOCATE, RESIZE, HOST_TO_DEVICE, DEVICE_TO_HOST, SEED, GENERATOR_GET,
 GENERATOR_SET, GENERATOR_FREE, PHASE, COMMIT, SETTING, COMMUNICATOR_CREATE, COMMUNICATOR_DESTROY, COLLECTIVE,
 SYNCHRONIZE, END, MEMORY, ENVIRONMENT, STREAM, STREAM_MARK, STREAM_WAIT, STREAM_USE) = range(26)  # fmt: skip
GROUP_BEGIN, GROUP_END = 15, 16  # replay::CollectiveKind


def double(value: float) -> int:
    return int.from_bytes(struct.pack("<d", value), "little")


def vector(length: int = 4, offset: int = 0, dtype: int = FLOAT) -> list[int]:
    """Key words of a contiguous 1-d tensor argument."""
    return [1 | dtype << 8 | 1 << 16, offset, length, 1]


def anonymous_bytes() -> int:
    """Of this process; what it shares (logs) and what comes from files (libraries) does not count."""
    (line,) = [row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("RssAnon")]
    return int(line.split()[1]) << 10


def no_backend(*_: object) -> None:
    raise RuntimeError("this test has no peers")


class Harness:
    def __init__(
        self,
        *,
        protect: bool = True,
        optimizer_preimages: bool = True,
        segment_count: int = 8,
        world: int = 2,
        shadow_bytes: int = 256 << 20,
        snapshot_bytes: int = 0,
        dictionary_bytes: int = 1 << 20,
    ) -> None:
        self.directory = tempfile.mkdtemp(prefix="understudy-test-", dir=SHARED_MEMORY)
        create_log(
            self.directory,
            world=world,
            segment_bytes=4 << 20,
            segment_count=segment_count,
            dictionary_bytes=dictionary_bytes,
            shadow_bytes=shadow_bytes,
            snapshot_bytes=snapshot_bytes,
            proxyd_pid=os.getpid(),
        )
        self.options: dict[str, int] = {"protect": protect, "optimizer_preimages": optimizer_preimages}
        self.log = Log(self.directory)
        self.writer = LogWriter(self.directory)
        self.executor = self.new_executor()
        self.executor.resume()

    def new_executor(self) -> _server.Executor:
        executor = _server.Executor(no_backend)
        executor.attach(self.directory, device=f"{driver()}:0", threads=1, generation=0, **self.options)
        return executor

    def spoil(self, file: str, values: tuple[float, float, float, float]) -> None:
        """Change a byte wherever these lie in `shadow` or `snapshot`."""
        wanted = struct.pack("<4f", *values)
        with open(f"{self.directory}/{file}", "r+b") as area:
            content = area.read(1 << 16)
            places = [at for at in range(0, len(content) - 16, 4) if content[at : at + 16] == wanted]
            assert places
            for place in places:
                area.seek(place)
                area.write(b"\xff")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.executor.detach()
        shutil.rmtree(self.directory)

    # ---- records
    def new(self, handle: int, values: list[float]) -> None:
        self.writer.append(ALLOCATE, handle, [4 * len(values)])
        data = struct.pack(f"<{len(values)}f", *values)
        data += b"\0" * (-len(data) % 8)
        words = list(struct.unpack(f"<{len(data) // 8}Q", data))
        self.writer.append(HOST_TO_DEVICE, handle, [0, 4 * len(values), *words])

    def template(self, name: str, key: list[int], outputs: list[int] | None = None) -> int:
        return self.writer.put_template(name, key, outputs if outputs is not None else [0])

    def add(self, target: int, source: int, length: int = 4) -> None:
        key = [*vector(length), *vector(length), 17, double(1.0)]
        self.writer.append(OPERATOR, self.template("aten::add_.Tensor", key), [target, source])

    def commit(self) -> None:
        self.writer.append(COMMIT, 0, [])

    def read(self, handle: int, count: int = 4) -> tuple[float, ...]:
        return struct.unpack(f"<{count}f", self.writer.call(DEVICE_TO_HOST, handle, [0, 4 * count]))

    def synchronize(self) -> None:
        self.writer.call(SYNCHRONIZE, 0, [])

    def run_all(self) -> None:
        """Wait until every record is done, without adding one."""
        self.wait(lambda: self.log.cursor_index == self.log.tail_index, "did not run its records")

    def wait(self, over: Callable[[], bool], problem: str) -> None:
        """For shared memory, which has no event here."""
        deadline = time.monotonic() + PATIENCE_S
        while not over():
            if self.log.session_state != 0:
                self.synchronize()  # raises what was wrong
            assert time.monotonic() < deadline, f"the executor {problem}"
            time.sleep(0)
