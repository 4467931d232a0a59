"""Snapshots on storage: what was complete when all processes died is whole, bit for bit."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import test_proxyd_recovery
from proxied import command_of, processes, until
from running_node import Node, runtime_directories
from test_proxyd_recovery import FLOATS, PARAMETER, PRIVATE, expected
from zygotes import descendants

from understudy.recovery.base.errors import BadInput
from understudy.recovery.base.own_modules import module_command, name_of
from understudy.recovery.config.proxyd_settings import settings_of
from understudy.recovery.snapshots import Store
from understudy.recovery.snapshots.restore.checking import problems_of
from understudy.recovery.snapshots.restore.reading import SetReader
from understudy.recovery.snapshots.stores.catalogue import StoredSet, read_catalogue

pytestmark = pytest.mark.drawn(8)

STEPS = 200_000
"""More than any test waits for."""


variables = test_proxyd_recovery.variables  # the fixture


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def node(tmp_path: Path, store: Path, variables: dict[str, str]) -> Iterator[Node]:
    with Node(tmp_path, variables, "--persist", str(store), "--persist-every", "1") as node:
        yield node


def persisted_step(node: Node) -> int:
    return min((rank.persisted_step for rank in node.status().ranks), default=0)


def complete_sets(store: Path) -> list[StoredSet]:
    return [one for one in read_catalogue(store).sets if one.complete]


def newest_complete(store: Path) -> StoredSet:
    """Of them; what there is instead, if there is none."""
    found = read_catalogue(store)
    there = [(one.run, one.serial, one.step, sorted(one.parts)) for one in found.sets]
    complete = [one for one in found.sets if one.complete]
    if not complete:
        pytest.fail(f"{found.problems}, {there}, {sorted(map(str, store.rglob('*')))}")
    return complete[0]


def writers() -> list[psutil.Process]:
    return [p for p in processes() if name_of("recovery.snapshots.writing.writer") in command_of(p)]


def _runs(process: psutil.Process) -> bool:
    """Whoever inherits it reaps it some day."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def values_at(step: int, rank: int) -> dict[int, float]:
    """Of the parameter after so many steps, and of the private buffer: it changes behind the commit."""
    parameter = float(expected(rank, 2, step)[-1].split()[1])
    private = float(expected(rank, 2, step - 1)[-1].split()[2]) if step > 1 else float(rank)
    return {PARAMETER: parameter, PRIVATE: private}


def assert_bits(stored: StoredSet) -> None:
    assert problems_of(stored) == []
    with SetReader(stored) as reader:
        for rank in (0, 1):
            for handle, value in values_at(stored.step, rank).items():
                assert reader.buffer(rank, handle) == struct.pack("<f", value) * FLOATS, (rank, handle)


def kill_everything(node: Node) -> None:
    """As when power fails: nothing that runs or lies in memory is left."""
    directories = runtime_directories()
    node.kill()
    assert node.run is not None
    launched = psutil.Process(node.run.pid)
    doomed = [launched, *descendants(launched)]
    doomed += [p for p in processes() if any(str(d) in " ".join(command_of(p)) for d in directories)]
    for process in doomed:
        with contextlib.suppress(psutil.Error):
            process.kill()
    until(lambda: not any(_runs(process) for process in doomed), "the end of all processes")
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def test_newest_complete_snapshot_outlives_every_process_and_all_memory(node: Node, store: Path) -> None:
    node.train(STEPS, STEPS)
    until(lambda: persisted_step(node) > 0, "a durable snapshot")
    told = persisted_step(node)
    kill_everything(node)
    until(lambda: not writers(), "the end of the writer")
    newest = newest_complete(store)
    assert newest.step >= told
    for stored in complete_sets(store):
        assert_bits(stored)
    with SetReader(newest) as reader:  # what both ranks hold is written by one of them
        assert {reader.place(rank, PARAMETER).rank for rank in (0, 1)} in ({0}, {1})


def test_what_a_killed_writer_was_writing_is_never_found_and_another_one_goes_on(
    node: Node, store: Path
) -> None:
    node.train(STEPS, STEPS)
    until(lambda: persisted_step(node) > 0, "a durable snapshot")
    for _ in range(3):
        told = persisted_step(node)
        for writer in writers():
            with contextlib.suppress(psutil.Error):
                writer.kill()
        for stored in complete_sets(store):
            assert problems_of(stored) == []
        until(lambda told=told: persisted_step(node) > told, "a newer one")  # type: ignore[misc]
    kill_everything(node)
    assert_bits(newest_complete(store))


def test_successor_of_a_proxyd_that_died_goes_on_in_the_same_stores(node: Node, store: Path) -> None:
    node.train(STEPS, STEPS)
    until(lambda: persisted_step(node) > 0, "a durable snapshot")
    told = persisted_step(node)
    node.kill()
    until(lambda: not writers(), "the end of the writer")
    node.restart()
    until(lambda: persisted_step(node) > told, "a newer one")
    kill_everything(node)
    found = read_catalogue(store)
    assert found.problems == ()
    assert len({one.run for one in found.sets}) == 1
    assert_bits(newest_complete(store))


def test_every_nth_step_becomes_durable_where_steps_were_asked_for(
    tmp_path: Path, store: Path, variables: dict[str, str]
) -> None:
    with Node(tmp_path, variables, "--persist", str(store), "--persist-every", "50steps") as node:
        node.train(STEPS, STEPS)
        seen: set[int] = set()

        def enough() -> bool:
            seen.update(rank.persisted_step for rank in node.status().ranks)
            return len(seen - {0}) >= 5

        until(enough, "five durable snapshots")
        kill_everything(node)
    assert all(step % 50 == 0 for step in seen), seen
    for stored in complete_sets(store):
        assert stored.step % 50 == 0
        assert_bits(stored)


def test_how_snapshots_are_written_is_up_to_the_options_of_proxyd(
    tmp_path: Path, store: Path, variables: dict[str, str]
) -> None:
    options = ("--persist-threads", "3", "--persist-chunk", "64KiB", "--persist-memory", "256KiB")
    with Node(tmp_path, variables, "--persist", str(store), "--persist-every", "50steps", *options) as node:
        node.train(STEPS, STEPS)
        until(lambda: persisted_step(node) > 0, "a durable snapshot")
        (writer,) = [command_of(process) for process in writers() if _runs(process)]
        told = dict(itertools.pairwise(writer))
        assert (told["--threads"], told["--chunk"], told["--pool"]) == ("3", "65536", "262144")
        kill_everything(node)
    found = newest_complete(store)
    assert_bits(found)
    for part in found.parts.values():
        with Store.open(part.path, writable=False) as opened:
            assert opened.chunk_bytes == 65536


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--persist-threads", "0"), "--persist-threads 0 is not possible: 1 to 64"),
        (
            ("--persist-chunk", "6000"),
            "--persist-chunk 6000 is not possible: a multiple of 4KiB, up to 256MiB",
        ),
        (("--persist-chunk", "512MiB"), "--persist-chunk 512MiB is not possible"),
        (
            ("--persist-memory", "1MiB"),
            "--persist-memory 1MiB does not hold one --persist-chunk of 4194304 bytes",
        ),
    ],
)
def test_an_impossible_way_to_write_is_refused_in_one_sentence(
    tmp_path: Path, options: tuple[str, str], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        settings_of(["--devices", "cpu:1", "--persist", str(tmp_path / "store"), *options])
    assert not (tmp_path / "store").exists()


def test_only_as_many_snapshots_stay_as_there_are_slots(node: Node, store: Path) -> None:
    node.train(STEPS, STEPS)
    seen: set[int] = set()

    def several() -> bool:
        seen.add(persisted_step(node))
        return len(seen - {0}) >= 5

    until(several, "five snapshots")
    kill_everything(node)
    assert len(read_catalogue(store).sets) <= 3
    assert_bits(newest_complete(store))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_full_disk_is_told_of_and_training_goes_on_until_there_is_room_again(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=False)
    if mounted.returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    try:
        with Node(tmp_path, variables, "--persist", str(disk), "--persist-every", "1") as node:
            node.train(STEPS, STEPS)
            until(
                lambda: any("No space left" in rank.note for rank in node.status().ranks),
                "trouble in the status",
            )
            step = node.rank_status(0).step
            until(lambda: node.rank_status(0).step > step + 100, "more steps")
            assert persisted_step(node) == 0
            assert not list(disk.glob("*/*/*"))  # nothing half-made
            subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
            until(lambda: persisted_step(node) > 0, "a durable snapshot")
            assert node.rank_status(0).note == ""
            assert "a snapshot is not durable" in node.said()
            kill_everything(node)
        assert_bits(complete_sets(disk)[0])
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_recoveryctl_lists_and_verifies_and_names_what_is_damaged(node: Node, store: Path) -> None:
    node.train(STEPS, STEPS)
    until(lambda: persisted_step(node) > 0, "a durable snapshot")
    kill_everything(node)
    sets = read_catalogue(store).sets
    newest = newest_complete(store)
    listed, status = ask("list", str(store), "--json")
    assert status == 0 and len(listed["snapshots"]) == len(sets)
    verified, status = ask("verify", str(store), "--json")
    assert status == 0 and verified["newest"]["serial"] == newest.serial
    part = newest.parts[0]
    with open(part.path, "r+b") as file:  # somewhere in the payload of each slot
        for slot in range(3):
            file.seek(8192 + slot * ((os.path.getsize(part.path) - 8192) // 3) + 4096 + 200)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
    verified, status = ask("verify", str(store), "--json")
    assert status == 1 and verified["newest"] is None
    assert all(row["problems"] for row in verified["snapshots"] if 0 in row["ranks"])
    missing, status = ask("list", str(store / "none"))
    assert status == 2 and "cannot be read" in missing


def ask(*arguments: str) -> tuple[Any, int]:
    """`recoveryctl snapshots …`: what it prints (JSON if asked for), and its status."""
    command = [*module_command("recovery.recoveryctl"), "snapshots", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return json.loads(done.stdout) if "--json" in arguments else done.stdout + done.stderr, done.returncode
