"""Whether the second tier can be reached at all: asked once, as proxyd starts, and told in its log.

python -m understudy.recovery.snapshots.remote.first_contact

reads the URL from its stdin, where no list of processes shows it, and prints what is wrong, or nothing.
A process of its own: libraries of object stores take seconds to load, and may wait for longer than is liked.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import structlog

from understudy.recovery.base.own_modules import module_command

log = structlog.get_logger()

WITHIN_S = 10.0


async def tell_of_first_contact(url: str, within_s: float = WITHIN_S) -> None:
    """One line in proxyd's log; training and snapshots do not wait for it."""
    problem = await _ask(url, within_s)
    if problem:
        meanwhile = "snapshots stay on this host's storage, and each is tried again"
        log.warning("the second tier cannot be reached", problem=problem, meanwhile=meanwhile)
    else:
        log.info("the second tier answers")


async def _ask(url: str, within_s: float) -> str:
    process = await asyncio.create_subprocess_exec(
        *module_command("recovery.snapshots.remote.first_contact"),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is proxyd's to handle
    )  # fmt: skip
    try:
        async with asyncio.timeout(within_s):
            said, _ = await process.communicate(url.encode())
        return said.decode(errors="replace").strip() or (
            f"asking it ended with status {process.returncode}" if process.returncode else ""
        )
    except TimeoutError:
        return f"it has not answered within {within_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def main() -> int:
    """Entry point of the process that asks."""
    from understudy.recovery.snapshots.remote.second_tier import Remote

    try:
        Remote(sys.stdin.read()).greet()
    except (OSError, ValueError) as problem:
        sys.stdout.write(" ".join(str(problem).split())[:500])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
