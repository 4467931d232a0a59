"""A proxyd that outlives its jobs, for what needs several of them, options of its own, or to end it."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from training_run import RunFailed, driver, installed

STOPPED_WITHIN_S = 30


class RunningProxyd:
    """`--socket` names it to proxyrun."""

    def __init__(
        self,
        socket: Path,
        ranks: int,
        options: tuple[str, ...] = (),
        log: Path | None = None,
        environment: Mapping[str, str] = os.environ,
        program: Sequence[str] = (*installed("proxyd"),),
    ) -> None:
        """Start it.  Raises RunFailed with its exit status and what it says if it does not.

        `log`: where it and its servers write.
        """
        self.socket = socket
        command = [*program, "--devices", f"{driver()}:{ranks}", "--socket", str(socket)]
        ours, theirs = os.pipe()
        command += ["--log-level", "info" if log else "error", *options, "--ready-fd", str(theirs)]
        with open(log, "a") if log else nullcontext() as output:
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs],
                start_new_session=True,
                stdout=output,
                stderr=output,
                env={**environment, "OMP_NUM_THREADS": "1"},
            )
        os.close(theirs)
        with open(ours, "rb") as pipe:
            answer = json.loads(pipe.readline() or b"{}")
        self.pid = answer.get("pid", self.process.pid)
        """Not that of `process` where tests have a fork for it (tests/harness/launcher.py)."""
        if not answer.get("ready"):
            status = self.process.wait(STOPPED_WITHIN_S)
            raise RunFailed(f"proxyd ended with status {status}: {answer.get('error', 'it did not say why')}")

    def kill(self) -> None:
        """As the kernel does when memory runs out."""
        os.kill(self.pid, signal.SIGKILL)
        self.process.wait(STOPPED_WITHIN_S)

    def stop(self) -> int:
        """End it, if it has not ended; its exit status."""
        self.process.terminate()
        return self.process.wait(STOPPED_WITHIN_S)


@contextmanager
def running_proxyd(
    socket: Path,
    ranks: int,
    options: tuple[str, ...] = (),
    log: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    program: Sequence[str] = (*installed("proxyd"),),
) -> Iterator[RunningProxyd]:
    """Until the block ends."""
    proxyd = RunningProxyd(socket, ranks, options, log, environment, program)
    try:
        yield proxyd
    finally:
        proxyd.stop()
