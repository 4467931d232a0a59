"""Disks that fail, hang or are slow under a training that persists: it goes on, and snapshots resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import proxied
import pytest
import test_proxyd_recovery
from loop_disks import LoopDisk, loop_disk
from running_node import LONG_S, Node
from test_metrics import a_free_port, scrape
from test_persistence import assert_bits, complete_sets, persisted_step, writers

pytestmark = pytest.mark.drawn(6)

STEPS = 8_000
STEPS_S = 30
"""So many are let go a second while a test waits, four minutes at most; the rest takes seconds."""

variables = test_proxyd_recovery.variables  # the fixture


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LoopDisk]:
    with loop_disk(tmp_path) as disk:
        yield disk


class Persisting(Node):
    """Two ranks that train, and whose snapshots go to a disk."""

    def __init__(self, folder: Path, disk: LoopDisk, environment: dict[str, str], *options: str) -> None:
        self.store = disk.path / "store"
        self.port = a_free_port()
        self.limit = 1
        super().__init__(
            folder, environment, "--persist", str(self.store), "--metrics", str(self.port),
            *(options or ("--persist-every", "1")),
        )  # fmt: skip

    def until(self, holds: Callable[[], object], what: str, within_s: float = 60) -> None:
        """As the others', but the ranks may do some more steps each second."""
        begun_s, limit = time.monotonic(), self.limit

        def look() -> object:
            self.limit = min(limit + 1 + int(STEPS_S * (time.monotonic() - begun_s)), STEPS)
            self.let(self.limit)
            return holds()

        proxied.until(look, what, within_s)

    def await_newer(self) -> None:
        """Until a snapshot is durable that was not."""
        told = persisted_step(self)
        self.until(lambda: persisted_step(self) > told, "a newer snapshot")

    def await_trouble(self, words: str) -> None:
        """In status and metrics; training goes on meanwhile."""
        self.until(lambda: words in self.rank_status(1).note, f"{words} in the status")
        self.goes_on()
        assert scrape(self.port)["understudy_persist_trouble", ""] == 1

    def goes_on(self) -> None:
        step = self.rank_status(0).step
        self.until(lambda: self.rank_status(0).step > step + 100, "more steps")

    def assert_untroubled(self) -> None:
        assert [rank.note for rank in self.status().ranks] == ["", ""]
        assert scrape(self.port)["understudy_persist_trouble", ""] == 0

    def interval(self) -> float:
        return scrape(self.port).get(("understudy_persist_interval", ""), 0)  # no rank is there at first

    def failures(self) -> float:
        return scrape(self.port)["understudy_persist_failures_total", ""]

    def assert_all_bits(self) -> None:
        """Of all that was trained, and of what is on the disk."""
        assert self.limit < STEPS
        report = self.finish()
        assert report["recoveries"] == []
        assert_bits(complete_sets(self.store)[0])


@pytest.fixture
def node(tmp_path: Path, disk: LoopDisk, variables: dict[str, str]) -> Iterator[Persisting]:
    node = Persisting(tmp_path, disk, variables)
    with node:
        node.train(STEPS, node.limit)
        node.await_newer()
        yield node


def test_snapshots_resume_on_a_disk_that_died_once_it_is_mounted_anew(
    node: Persisting, disk: LoopDisk
) -> None:
    disk.die()
    node.await_trouble("Input/output error")
    assert node.failures() >= 1
    node.until(lambda: not disk.unmount(), "that nobody holds the disk")
    disk.mount()
    node.await_newer()
    node.assert_untroubled()
    node.assert_all_bits()


def test_snapshots_resume_on_a_damaged_file_system_once_it_is_repaired(
    node: Persisting, disk: LoopDisk
) -> None:
    disk.find_damage()
    node.await_trouble("Read-only file system")
    node.until(lambda: not disk.unmount(), "that nobody holds the disk")
    disk.repair()
    disk.mount()
    node.await_newer()
    node.assert_untroubled()
    node.assert_all_bits()


def test_a_disk_that_hangs_holds_up_nothing_and_what_it_was_writing_becomes_durable_in_the_end(
    node: Persisting, disk: LoopDisk
) -> None:
    disk.hang()
    node.await_trouble("its storage is slow")
    disk.recover()
    node.await_newer()
    node.until(lambda: node.rank_status(1).note == "", "no trouble")
    node.assert_untroubled()
    assert node.failures() == 0
    node.assert_all_bits()


@pytest.mark.long
def test_proxyd_ends_and_its_successor_begins_while_a_disk_hangs(node: Persisting, disk: LoopDisk) -> None:
    disk.hang()
    node.await_trouble("its storage is slow")
    node.kill()
    node.restart()
    node.goes_on()
    disk.recover()
    node.until(lambda: persisted_step(node) > 0, "a durable snapshot")
    node.assert_untroubled()
    disk.hang()
    node.await_trouble("its storage is slow")
    node.finish()
    assert node.proxyd.stop() == 0
    disk.recover()
    proxied.until(lambda: not writers(), "the end of the writer")
    assert_bits(complete_sets(node.store)[0])


@pytest.mark.long
def test_a_disk_that_becomes_slow_makes_snapshots_rarer_and_one_that_is_quick_again_makes_them_more_frequent(
    tmp_path: Path, disk: LoopDisk, variables: dict[str, str]
) -> None:
    node = Persisting(
        tmp_path, disk, variables, "--persist-every", "auto", "--persist-overhead", "30%",
        "--persist-slots", "2",
    )  # fmt: skip
    with node:
        node.train(STEPS, node.limit)
        node.until(lambda: node.interval() > 0, "a first choice")
        node.await_newer()
        quick = node.interval()
        assert node.rank_status(0).persist_choice.startswith(f"every {quick:.0f} steps (about ")
        disk.slow_down(20_000)
        node.until(lambda: node.interval() > 2 * quick, "rarer snapshots", 2 * LONG_S)
        slow = node.interval()
        disk.slow_down(0)
        node.until(lambda: node.interval() < slow / 2, "more frequent snapshots", 2 * LONG_S)
        assert "snapshots go to storage every" in node.recoveryctl("status")
        node.assert_untroubled()
        node.assert_all_bits()
