"""Hosts that lose their power amid a training, and what is needed to tell what became of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import psutil
from host_cluster import Cluster, HostRun
from proxied import WORKLOADS, until

STEPS = 60
"""Of a training that may do the first of them only until there is an image; then a host is lost."""
WAIT_S = 300
PACED_GPT = WORKLOADS / "migration" / "paced_gpt.py"


def keeping_images(folder: Path) -> tuple[str, ...]:
    """Options of a proxyd: an image every two seconds."""
    return "--persist", str(folder / "store"), "--cpu-image-every", "2"


def power_off(hosts: Cluster, name: str) -> None:
    """Whatever runs there is gone at once, and its links with it."""
    hosts.net.cut(name)
    hosts.net.cut_data(name)
    network = os.stat(f"/proc/{hosts[name]._keeper.pid}/ns/net").st_ino
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if pid != hosts[name]._keeper.pid and os.stat(f"/proc/{pid}/ns/net").st_ino == network:
                os.kill(pid, signal.SIGKILL)
    hosts[name].proxyd.process.wait()


def power_on(hosts: Cluster, name: str) -> None:
    """Its memory holds nothing, and proxyd starts."""
    for path in hosts[name].path("/dev/shm").iterdir():
        shutil.rmtree(path)
    hosts.net.heal(name)
    hosts.net.heal_data(name)
    hosts[name].socket.unlink(missing_ok=True)
    hosts[name].start_proxyd()


def image_step(hosts: Cluster, rank: int = 1, leader: str = "a") -> int:
    """Of the newest image of that rank."""
    return max((one.cpu_image_step for one in hosts[leader].status().ranks if one.rank == rank), default=0)


def account(hosts: Cluster, run: HostRun, leader: str = "a") -> str:
    """Of what went wrong."""
    return "\n".join([*run.errors[-40:], hosts[leader].log.read_text()[-8000:]])


def let(limit: Path, steps: str) -> None:
    """So many be done; whoever reads it never sees half of it, and an image finds it as long as it was."""
    new = limit.with_suffix(".new")
    new.write_text(f"{int(steps):06}")
    new.rename(limit)


def go_on_until_there_is_an_image(hosts: Cluster, limit: Path, rank: int = 1) -> int:
    """Images go with sets of snapshots, and those come with steps; answers how many may be done by then."""

    def another_step() -> bool:
        let(limit, str(int(limit.read_text()) + 1))
        return image_step(hosts, rank) > 0

    until(another_step, "there is an image", 120, 0.5)
    return int(limit.read_text())


def train_until_there_is_an_image(
    hosts: Cluster,
    folder: Path,
    *first_options: str,
    rank: int = 1,
    steps: int = STEPS,
    options_of: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> list[HostRun]:
    """char_gpt with a rank on hosts a, which leads, and b; then it trains on, and has steps left to do."""
    limit = folder / "limit"
    let(limit, "12")
    words = [str(limit), "--steps", str(steps), "--losses", str(folder / "losses"), "--log-every", "1"]
    runs = hosts.start_ranks("ab", PACED_GPT, words, *first_options, options_of=options_of)
    try:
        go_on_until_there_is_an_image(hosts, limit, rank)
    except AssertionError as problem:
        raise AssertionError(f"{problem}\n{account(hosts, runs[0])}") from problem
    let(limit, str(steps + 1))
    return runs


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
