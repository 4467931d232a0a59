"""proxyd's side of the spawner: the process with PyTorch loaded that every device server is forked from.

It speaks JSON lines: it says {"ready": {...}} or {"error": "sentence"} once, then answers each
{"spawn": {"socket": ..., "device": ...}} with {"spawned": {"pid": ..., "socket": ...}}, and {"ended": pid},
of one whose pidfd says so, with {"status": ...}: negative, the signal that it died of; null, nobody knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.errors import Failure
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.membership.network.data_network import DataNetwork

_LONGEST_START = 180.0
"""Seconds; importing PyTorch from a cold disk takes long."""


class SpawnerError(Failure):
    """The spawner cannot work; its text is the sentence for the user."""


@dataclass(frozen=True)
class Installation:
    """What the spawner found: the PyTorch that executes calls, and its device."""

    torch_version: str
    capability: pb.Capability
    gpus: int = 0
    """That the cuda driver finds on this host."""
    gpu_uuids: tuple[str, ...] = ()
    """Of each of them, as NVML knows it; empty: it is a part of one (MIG)."""


def default_command(
    socket: Path, runtime: Path, driver: str, grace_s: float, network: DataNetwork, exact: str = "on",
    collectives: str = "pytorch",
) -> list[str]:  # fmt: skip
    """How the real spawner is started."""
    command = [*module_command("proxy_server.spawner")]
    return [
        *command,
        "--daemon-socket",
        str(socket),
        "--runtime",
        str(runtime),
        "--driver",
        driver,
        "--parent",
        str(os.getpid()),
        "--grace",
        str(grace_s),
        "--exact",
        exact,
        *network.options,
        *(["--own-collectives"] if collectives == "own" else []),
    ]


_OF_OPENMP = ("OMP_DYNAMIC", "OMP_THREAD_LIMIT")
"""It reads them as it is loaded, which is before any session; a script that has them is refused."""


class Spawner:
    """One spawner process."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> Installation:
        """Start it and wait until PyTorch is loaded; raises SpawnerError."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is proxyd's to handle
            env={name: value for name, value in os.environ.items() if name not in _OF_OPENMP},
        )
        try:
            answer = await asyncio.wait_for(self._answer(), _LONGEST_START)
        except TimeoutError:
            raise SpawnerError(
                f"the device servers' spawner did not start within {_LONGEST_START:.0f} s"
            ) from None
        ready = answer.get("ready")
        if not isinstance(ready, dict):
            raise SpawnerError(str(answer.get("error", f"the spawner said {answer!r}")))
        capability = pb.Capability(**ready.get("capability", {}))
        uuids = tuple(map(str, ready.get("gpu_uuids", ())))
        return Installation(str(ready["torch_version"]), capability, len(uuids), uuids)

    async def spawn(self, socket: Path, device: str, gpu: str = "") -> int:
        """Fork a device server; answers its pid.  `gpu`: the UUID of its device.  Raises SpawnerError."""
        answer = await self._asked({"spawn": {"socket": str(socket), "device": device, "gpu": gpu}})
        if "spawned" not in answer:
            raise SpawnerError(str(answer.get("error", f"the spawner said {answer!r}")))
        return int(answer["spawned"]["pid"])

    async def status_of(self, pid: int) -> int | None:
        """How a device server has ended that it forked: as a returncode; None if it knows nothing of it.

        Not to be cancelled, as `spawn`: the next one who asks would get the answer.  Raises SpawnerError.
        """
        status = (await self._asked({"ended": pid})).get("status")
        return status if isinstance(status, int) else None

    async def _asked(self, request: dict[str, Any]) -> dict[str, Any]:
        async with self._turn:
            process = self._process
            if process is None or process.stdin is None or process.returncode is not None:
                raise SpawnerError("the device servers' spawner is not running")
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                await process.stdin.drain()
            except OSError as problem:
                raise SpawnerError(f"the device servers' spawner ended: {problem}") from problem
            return await self._answer()

    async def settle(self, within_s: float) -> None:
        """Until whoever has asked for a server knows of it; one that was forked for nobody would live on."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._turn:
                pass

    async def wait(self) -> int:
        """Until it ends; answers its exit status."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, grace: float = 5.0) -> None:
        """End it and reap it."""
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), grace)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _answer(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            status = await self._process.wait()
            raise SpawnerError(
                f"the device servers' spawner ended with status {status}; its own message is above"
            )
        try:
            answer = json.loads(line)
        except ValueError:
            raise SpawnerError(f"the device servers' spawner said {line[:200]!r} instead of JSON") from None
        return answer if isinstance(answer, dict) else {}
