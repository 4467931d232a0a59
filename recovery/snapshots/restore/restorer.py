"""proxyd's side of a restore from storage: a process does it, for as long as it may take."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from understudy.recovery.base.own_modules import module_command
from understudy.recovery.snapshots.persistence import Persistence
from understudy.recovery.state.durable import Durable

AT_LEAST_S = 30.0
SLOWEST = 20 << 20
"""Bytes a second; storage that is slower is not waited for."""
ATTEMPTS = 2
"""A process that was killed says nothing against the storage that it read."""
END_S = 5.0
"""How long a process that was killed may take to end; one that a disk holds up may take for ever."""


class NotRestored(RuntimeError):
    """Why a snapshot does not come back from storage, in a sentence."""


class Restorer:
    """Restores ranks of a job.  `persistence`: what may be copying from memory that a restore overwrites."""

    def __init__(self, persistence: Persistence | None) -> None:
        self._persistence = persistence

    def break_off(self) -> None:
        """Stop what is under way to storage.

        Called with the decision for a stored snapshot, before anything is waited for: a newer one that became
        durable meanwhile would take its place, and no recovery knows of that.
        """
        if self._persistence is not None:
            self._persistence.break_off()

    async def restore(self, durable: Durable, directories: Mapping[int, Path]) -> int:
        """Bring it back into the logs of these ranks, whose device servers have ended; answers the bytes.

        Raises NotRestored.  Precondition: `break_off`.
        """
        return await _ask(durable, [f"{rank}={path}" for rank, path in sorted(directories.items())])


async def check(durable: Durable) -> None:
    """Read all of a set, and change nothing; raises NotRestored."""
    await _ask(durable, [])


async def _ask(durable: Durable, logs: list[str]) -> int:
    output, status = b"", 0
    for _ in range(ATTEMPTS):
        output, status = await _run(durable, logs)
        if status == 0:
            break
    try:
        answer = json.loads(output)
        error, count = str(answer.get("error", "")), int(answer.get("bytes", 0))
    except (AttributeError, TypeError, ValueError):
        raise NotRestored(f"the process that read {durable.run} ended with status {status}") from None
    if error:
        raise NotRestored(error)
    return count


async def _run(durable: Durable, logs: list[str]) -> tuple[bytes, int]:
    """What the process says, and its exit status."""
    process = await asyncio.create_subprocess_exec(
        *module_command("recovery.snapshots.restore.restoring"), str(durable.run), *logs,
        "--serial", str(durable.serial), "--parent", str(os.getpid()),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    allowed = AT_LEAST_S + durable.bytes / SLOWEST
    try:
        output, _ = await asyncio.wait_for(process.communicate(), allowed)
        return output, await process.wait()
    except TimeoutError:
        raise NotRestored(f"{durable.run} has not answered within {allowed:.0f} s") from None
    finally:
        if process.returncode is None:  # it must not write into memory that others use from here on
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), END_S)
