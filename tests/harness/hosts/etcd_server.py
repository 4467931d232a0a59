"""An etcd for tests: the machine's own, or that of Debian's package, unpacked below build/."""

from __future__ import annotations

import contextlib
import functools
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from needs import ETCD, ROOT, CannotBeHad, Patience, unpacked
from proxied import until
from start_ranks import free_port


def etcd_binary() -> str:
    """Where it is; skips the test where there is none and none can be had."""
    found, problem = _find()
    if problem:
        pytest.skip(f"no etcd on this machine, and Debian's etcd-server cannot be had: {problem}")
    return found


@functools.cache
def _find() -> tuple[str, str]:
    """Where it is, or why it is not; asked once, as a network that does not answer takes its time."""
    if found := shutil.which("etcd"):
        return found, ""
    try:
        return str(unpacked(ROOT, ETCD, Patience())), ""
    except (CannotBeHad, OSError) as problem:
        return "", str(problem)


class EtcdServer:
    """A cluster of one; it can be ended, stopped in its tracks and started again with what it knew."""

    def __init__(self, folder: Path, host: str, scheme: str, more: Sequence[str]) -> None:
        """`more`: options."""
        self.url = f"{scheme}://{host}:{free_port()}"
        peer = f"http://127.0.0.1:{free_port()}"
        self._metrics = f"http://127.0.0.1:{free_port()}"
        self._log = folder / "etcd.log"
        self._command = [
            etcd_binary(), "--data-dir", str(folder / "etcd"), "--name", "only",
            "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--listen-metrics-urls", self._metrics,  # /health without certificates
            "--initial-cluster", f"only={peer}", "--unsafe-no-fsync", "--logger", "zap", *more,
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        """Until it serves."""
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        until(self._serves, "etcd that serves", 60)

    def kill(self) -> None:
        """At once; what it knew stays on disk."""
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """It keeps its connections and answers nothing, once all of its threads have stopped."""
        self.process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.process.pid}/task")

        def stopped() -> bool:
            return all(
                file.read_text().rsplit(")", 1)[1].split()[0] == "T" for file in threads.glob("*/stat")
            )

        until(stopped, "etcd that stands still", 20)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def _serves(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()
        try:
            with urllib.request.urlopen(f"{self._metrics}/health", timeout=5) as page:
                return b'"true"' in page.read()
        except OSError:
            return False


@contextlib.contextmanager
def running_etcd(
    folder: Path, host: str = "127.0.0.1", scheme: str = "http", more: Sequence[str] = ()
) -> Iterator[EtcdServer]:
    """Until the block ends."""
    server = EtcdServer(folder, host, scheme, more)
    try:
        yield server
    finally:
        server.kill()
