"""Asks NVML about the GPUs of this host where a server has failed, and follows the Xids they tell of.

proxyd itself never calls NVML: its calls may block for ever on a sick GPU, and crash.  A process of its own
does (`machine/nvml.py`), and is ended if it takes too long.  That NVML does not answer is no verdict, as a
driver that initialises eight GPUs is slow, too; the server that tries the device decides (`placement.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import structlog

from understudy.recovery.base.background import BackgroundTasks
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.planning.gpu_verdict import (
    TROUBLES,
    XIDS,
    Finding,
    Reading,
    Severity,
    judge,
    reading_of,
)

log = structlog.get_logger()

ASKED_S = 5.0
"""How long NVML is waited for, seconds: a recovery waits meanwhile."""
AGAIN_S = 60.0
"""Between two processes that follow Xids, the first of which has ended."""
REAPED_S = 1.0
"""How long one that was ended is waited for; in a call of the driver that hangs it cannot end."""


class GpuHealth:
    """What NVML tells of the GPUs of a host; of other devices, and without NVML, nothing, and at no cost."""

    def __init__(self, uuids: Sequence[str] = (), asked_s: float = ASKED_S, again_s: float = AGAIN_S) -> None:
        """`uuids`: of each device, by its index, as CUDA names it; empty: it has none, as a part by MIG."""
        self._uuids = list(uuids)
        self._asked_s, self._again_s = asked_s, again_s
        self._before: dict[int, Reading] = {}
        """Each device when its rank came there."""
        self._xids: dict[int, list[int]] = {}
        self._tasks = BackgroundTasks("GPU health")
        self._absent = ""
        self.followed = asyncio.Event()
        """Xids that come from here on are noticed."""

    async def run(self, tell: Callable[[int], None]) -> None:
        """Follow Xids until cancelled; ends by itself where there is nothing to follow.

        `tell`: is told of a device that no server may have before it is reset: `unusable` says why.
        """
        if not any(self._uuids):
            return
        without = [f"cuda:{index}" for index, uuid in enumerate(self._uuids) if not uuid]
        if without:
            log.info("NVML is not asked about parts of GPUs", devices=without)
        while await self._follow(tell):
            await asyncio.sleep(self._again_s)

    async def close(self) -> None:
        """Nothing is asked any more."""
        await self._tasks.cancel()

    def begin(self, index: int) -> None:
        """A rank has come to a device: what is counted there by now is not its affair."""
        if not self._uuid(index):
            return
        self._before.pop(index, None)
        self._xids[index] = self._lasting(index)
        self._tasks.start(self._begin(index))

    def forget(self, index: int) -> None:
        """Somebody says that a device is sound again."""
        self._before.pop(index, None)
        self._xids.pop(index, None)

    def unusable(self, index: int) -> str:
        """Why no server may have a device before it is reset, as far as its Xids tell; empty: none does."""
        found = judge(None, None, self._lasting(index))
        return found.sentence if found is not None else ""

    async def finding(self, index: int, newcomer: bool = False) -> Finding | None:
        """What tells against a device where a server has failed.

        `newcomer`: against one to which a rank is to come; what it told of until now was others' affair.
        """
        now = await self._read(index)
        if newcomer:
            return judge(None, now, self._lasting(index))
        found = judge(self._before.get(index), now, self._xids.get(index, ()))
        if now is not None:
            self._before.setdefault(index, now)
        return found

    def _lasting(self, index: int) -> list[int]:
        """The Xids of a device that only a reset ends."""
        return [xid for xid in self._xids.get(index, ()) if XIDS[xid][0] is Severity.UNUSABLE]

    def _uuid(self, index: int) -> str:
        return self._uuids[index % len(self._uuids)] if self._uuids and not self._absent else ""

    async def _follow(self, tell: Callable[[int], None]) -> bool:
        """Until the process that does has ended; whether another one could do better."""
        none = False
        try:
            async with self._asking("watch", *sorted(filter(None, set(self._uuids)))) as lines:
                async for message in lines:
                    for index in self._take(message):
                        tell(index)
                    none = none or message == {"watching": []}
        except OSError as problem:
            log.warning("Xids of GPUs are not followed", reason=str(problem))
        return not none and not self._absent

    async def _begin(self, index: int) -> None:
        if (now := await self._read(index)) is None:
            return
        self._before.setdefault(index, now)
        if now.mig or now.trouble:
            why = "it is divided (MIG)" if now.mig else TROUBLES[now.trouble]
            log.warning("NVML cannot say whether a GPU fails later", device=f"cuda:{index}", reason=why)

    async def _read(self, index: int) -> Reading | None:
        if not (uuid := self._uuid(index)):
            return None
        reading = None
        try:
            async with asyncio.timeout(self._asked_s), self._asking("read", uuid) as lines:
                async for message in lines:
                    self._take(message)
                    reading = reading_of(message)
        except TimeoutError:
            log.warning("NVML did not answer", device=f"cuda:{index}", within_s=self._asked_s)
        except OSError as problem:
            log.warning("NVML was not asked", device=f"cuda:{index}", reason=str(problem))
        return reading

    @contextlib.asynccontextmanager
    async def _asking(self, *words: str) -> AsyncIterator[AsyncIterator[Any]]:
        """What a process says that asks NVML; it has ended, or is being ended, behind this."""
        command = [*module_command("recovery.machine.nvml"), str(os.getpid()), *words]
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        try:
            yield _messages(process)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), REAPED_S)

    def _take(self, message: Any) -> list[int]:
        """Answers the devices that no server may have any more."""
        if not isinstance(message, dict):
            return []
        if (absent := message.get("absent")) and not self._absent:
            self._absent = str(absent)
            log.info("what NVML knows of GPUs is not asked", reason=self._absent)
        if "watching" in message:
            self.followed.set()
        xid, uuid = message.get("xid"), message.get("uuid")
        if not isinstance(xid, int) or uuid not in self._uuids:
            return []
        severity, words = XIDS.get(xid, (None, "of the program, or not judged"))
        write = log.info if severity is None else log.warning
        devices = [index for index, one in enumerate(self._uuids) if one == uuid]
        for index in devices:
            write("a GPU tells of an Xid", device=f"cuda:{index}", xid=xid, means=words)
            known = self._xids.setdefault(index, [])
            if severity is not None and xid not in known:
                known.append(xid)
        return devices if severity is Severity.UNUSABLE else []


async def _messages(process: asyncio.subprocess.Process) -> AsyncIterator[Any]:
    assert process.stdout is not None
    async for line in process.stdout:
        with contextlib.suppress(ValueError):
            yield json.loads(line)
    if status := await process.wait():
        log.warning("a process that asked NVML ended", status=status)
