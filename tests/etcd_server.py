"""An etcd for tests: the machine's own, or that of Debian's package, unpacked below build/."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from proxied import until
from start_ranks import free_port

PREFIX = Path(__file__).parent.parent / "build" / "etcd"
PATIENCE = ("-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=10", "-o", "Acquire::https::Timeout=10")


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
    unpacked = PREFIX / "root" / "usr" / "bin" / "etcd"
    PREFIX.mkdir(parents=True, exist_ok=True)
    with open(PREFIX / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if unpacked.exists():
            return str(unpacked), ""
        try:
            return str(unpacked), _unpack(unpacked)
        except subprocess.SubprocessError as problem:
            return "", str(problem)


def _unpack(unpacked: Path) -> str:
    """Why it did not work, if so; raises SubprocessError."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return "there is no apt-get"
    private = ["-o", f"Dir::State::lists={PREFIX}/lists", "-o", f"Dir::Cache={PREFIX}/cache"]
    (PREFIX / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (PREFIX / "cache" / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    failed = ""
    for options in ([], private):  # the machine's own package lists may be missing
        if options:
            subprocess.run(["apt-get", *PATIENCE, *options, "-qq", "update"], capture_output=True, timeout=60)
        got = subprocess.run(
            ["apt-get", *PATIENCE, *options, "-qq", "download", "etcd-server"],
            cwd=PREFIX, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        packages = sorted(PREFIX.glob("etcd-server_*.deb"))
        if got.returncode == 0 and packages:
            break
        failed = got.stderr.strip().splitlines()[-1] if got.stderr.strip() else "apt-get has none"
    else:
        return failed
    made = PREFIX / "root.new"
    shutil.rmtree(made, ignore_errors=True)
    subprocess.run(["dpkg-deb", "-x", str(packages[-1]), str(made)], check=True, timeout=60)
    made.rename(unpacked.parents[2])
    return ""


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
