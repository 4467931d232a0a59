"""Workers whose relay is gone with its host: what they print goes to files on the host where they run now."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.migration.incoming.incoming_worker import IncomingWorker
from understudy.recovery.migration.transfer.header import OUTPUTS
from understudy.recovery.migration.worker_state import WorkerState

log = structlog.get_logger()

BASE = "fostered"
"""In the relay's directory, beside its outputs: what they held when the worker came, so that a proxyd that
follows this one goes on where it was."""


class OrphanOutput:
    """Writes the output of one worker to files."""

    def __init__(self, incoming: IncomingWorker, folder: Path) -> None:
        self._incoming, self._folder = incoming, folder

    def path(self, name: str) -> Path:
        """Where what it writes to stdout, or stderr, goes."""
        header = self._incoming.header
        return self._folder / f"{header.job}.rank-{header.rank}.{header.move[:8]}.{name}"

    def prepare(self) -> None:
        """Before it runs; raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        relay = self._incoming.places.relay
        sizes = [(relay / name).stat().st_size if (relay / name).exists() else 0 for name in OUTPUTS]
        for name in OUTPUTS:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            os.close(os.open(self.path(name), flags, 0o600))
        (relay / BASE).write_text(" ".join(map(str, sizes)), encoding="ascii")

    async def run(self) -> None:
        """To its end here, or until it moves on."""
        incoming, header = self._incoming, self._incoming.header
        try:
            base = dict(zip(OUTPUTS, await asyncio.to_thread(self._base), strict=True))
            request = pb.FollowRequest(relay=header.relay)
            for name in OUTPUTS:
                arrived = base[name] + self.path(name).stat().st_size
                request.positions.append(pb.OutputPosition(name=name, offset=arrived))
            incoming.hear(request)
            async for reply in incoming.tell(request):
                if reply.data:
                    await asyncio.to_thread(self._append, reply, base)
                    end = reply.offset + len(reply.data)
                    incoming.hear(
                        pb.FollowRequest(positions=[pb.OutputPosition(name=reply.name, offset=end)])
                    )
        except (OSError, ValueError) as problem:
            log.error("what a worker prints is lost", job=header.job, rank=header.rank, problem=str(problem))
            await incoming.gone.wait()
        if incoming.state is WorkerState.ENDED:
            log.info("a worker that came back has ended", job=header.job, rank=header.rank,
                     status=incoming.status, problem=incoming.problem)  # fmt: skip

    def _base(self) -> list[int]:
        """Raises OSError or ValueError."""
        sizes = [int(word) for word in (self._incoming.places.relay / BASE).read_text("ascii").split()]
        if len(sizes) != len(OUTPUTS):
            raise ValueError("what is known of its output makes no sense")
        return sizes

    def _append(self, reply: pb.FollowReply, base: dict[str, int]) -> None:
        """Where it belongs, so that what comes twice is there once; raises OSError."""
        file = os.open(self.path(reply.name), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            view, at = memoryview(reply.data), reply.offset - base[reply.name]
            while view:
                written = os.pwrite(file, view, at)
                view, at = view[written:], at + written
        finally:
            os.close(file)
