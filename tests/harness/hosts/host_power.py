"""Hosts that lose their power amid a training, and what is needed to tell what became of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import psutil
from host_cluster import SHARED_MEMORY, Cluster, HostRun
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
    for path in hosts[name].path(SHARED_MEMORY).iterdir():
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
    """Images go with sets of snapshots, and those come with steps; answers how many may be done by then.

    Each step is let through later than the one before, so that a slow machine has not come to the
    training's end by then: 26 steps in 120 s.
    """
    far, pause_s, next_at = int(limit.read_text()), 0.5, time.monotonic()
    deadline = next_at + 120
    while not image_step(hosts, rank):
        assert time.monotonic() < deadline, f"in 120 s and {far} steps there was no image"
        if time.monotonic() >= next_at:
            far += 1
            let(limit, str(far))
            pause_s *= 1.15
            next_at = time.monotonic() + pause_s
        time.sleep(0.1)
    return far


def train_until_there_is_an_image(
    hosts: Cluster,
    folder: Path,
    *first_options: str,
    rank: int = 1,
    steps: int = STEPS,
    options_of: Mapping[str, Sequence[str]] = MappingProxyType({}),
    names: str = "ab",
) -> list[HostRun]:
    """char_gpt with a rank on each of these hosts; a leads: three steps past an image, 18 before its end.

    It goes on by `let_it_go_on`.
    """
    limit = folder / "limit"
    let(limit, "12")
    words = [str(limit), "--steps", str(steps), "--losses", str(folder / "losses"), "--log-every", "1"]
    runs = hosts.start_ranks(names, PACED_GPT, words, *first_options, options_of=options_of)
    try:
        far = go_on_until_there_is_an_image(hosts, limit, rank)
        let(limit, str(far + 3))
        until(lambda: runs[0].steps() == far + 2, "the training has gone on, into step far + 3", 60)
    except AssertionError as problem:
        raise AssertionError(f"{problem}\n{account(hosts, runs[0])}") from problem
    return runs


def let_it_go_on(folder: Path, steps: int = STEPS) -> None:
    """To its end."""
    let(folder / "limit", str(steps + 1))


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
