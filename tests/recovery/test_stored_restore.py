"""Faults that only storage helps with: snapshots come back from there into a job whose workers live."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import proxied
import psutil
import pytest
import test_proxyd_recovery
from proxied import command_of, processes, until
from running_node import Node
from running_proxyd import running_proxyd
from test_snapshot_recovery import Killer, steps_of

from understudy import replay
from understudy.recovery.base.errors import ExitStatus
from understudy.recovery.base.own_modules import module_command, name_of
from understudy.recovery.host.evidence import LogManifests
from understudy.recovery.planning.facts import Manifest

pytestmark = pytest.mark.drawn(12)

MEMORY, STORAGE = "restore-snapshot-replay", "restore-stored-replay"
STEPS = 3000
PERSIST_ONLY = ("--persist-every", "1", "--persist-only", "--spares", "2")
WITHOUT_SHADOWS = ("--shadow-limit", "4K")
"""Until proxyd tells servers what is replicated they shadow all they can, and then need no snapshot."""
AHEAD = 4
"""Steps that ranks may do between two looks: a snapshot is ordered ahead of them."""

READER = name_of("recovery.snapshots.restore.restoring")
TINY = proxied.python(proxied.WORKLOADS / "tiny.py", "--steps", "15000", "--payload", "20000")
"""Long enough for a few durable sets, also on a fast machine."""

variables = test_proxyd_recovery.variables  # fixtures


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = proxied.run(TINY, folder=folder, options=("--snapshot-overhead", "0"))
    assert (ended.status, ended.report["recoveries"]) == (0, []), ended.output[-3000:]
    return steps_of(ended)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def node(tmp_path: Path, store: Path, variables: dict[str, str]) -> Iterator[Node]:
    with Node(tmp_path, variables, "--persist", str(store), *PERSIST_ONLY) as node:
        yield node


def train_until(node: Node, holds: Callable[[list[Any]], bool], what: str) -> None:
    """Let the ranks go on as far as that takes."""

    def more() -> bool:
        ranks = list(node.status().ranks)
        if len(ranks) == 2:
            node.let(min(STEPS - 1, min(rank.step for rank in ranks) + AHEAD))
        return len(ranks) == 2 and holds(ranks)

    until(more, what, 120)


def only_on_storage(ranks: list[Any]) -> bool:
    return all(rank.persisted_step and not rank.snapshot_bytes for rank in ranks)


def in_no_shadow(node: Node) -> bool:
    """Something of each rank dies with its server, as it does once proxyd has compared replicas."""

    def newest(log: replay.Log) -> Manifest:
        commits = [commit.number for commit in log.commits() if commit.has_manifest]
        return LogManifests(log).get(commits[-1], ()) if commits else ()

    return all(any(not buffer.shadowed for buffer in newest(log)) for log in node.logs())


def settle(node: Node) -> None:
    """Let the ranks come to their limit, and what they have begun to copy there become whole."""
    node.await_step(int((node.folder / "limit.0").read_text()))
    logs = node.logs()
    until(
        lambda: all(
            log.snapshot_begun < max([log.snapshot_floor, *(s.serial + 1 for s in log.snapshots())])
            for log in logs
        ),
        "whole snapshots",
    )


def kill_all_servers(node: Node) -> None:
    """At once, as proxyd sees it: it does not recover the first before the last has died."""
    servers = node.servers()
    os.kill(node.proxyd.pid, signal.SIGSTOP)
    for pid in servers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os.kill(node.proxyd.pid, signal.SIGCONT)


def await_recoveries(node: Node, count: int) -> None:
    def recovered() -> bool:
        ranks = list(node.status().ranks)
        return all(rank.state == "running" and rank.recoveries >= count for rank in ranks)

    until(recovered, f"{count} recoveries")


def damage_memory(node: Node) -> int:
    """One byte of every buffer of every published snapshot; answers of how many snapshots."""
    found = 0
    for log, rank in zip(node.logs(), node.status().ranks, strict=True):
        with open(Path(rank.log_directory) / "snapshot", "r+b") as area:
            for snapshot in log.snapshots():
                found += 1
                for _, count, _, offset in log.snapshot_contents(snapshot.serial).buffers:
                    area.seek(offset + count // 2)
                    byte = area.read(1)
                    area.seek(offset + count // 2)
                    area.write(bytes([byte[0] ^ 1]))
    return found


def damage_stores(store: Path) -> None:
    """Every chunk of every slot."""
    for path in store.glob("*/*/*.store"):
        with open(path, "r+b") as file:
            file.seek(8192)
            content = bytearray(file.read())
            for at in range(4096 + 100, len(content), 512):
                content[at] ^= 1
            file.seek(8192)
            file.write(content)


def test_all_servers_killed_while_the_set_is_on_storage_alone_changes_no_value(node: Node) -> None:
    node.train(STEPS, 30)
    for count in (1, 2):
        train_until(
            node, lambda ranks: only_on_storage(ranks) and in_no_shadow(node), "a set on storage alone"
        )
        kill_all_servers(node)
        await_recoveries(node, count)
    train_until(node, only_on_storage, "another set, behind the recovery")
    report = node.finish()
    assert {r["plan"] for r in report["recoveries"]} == {STORAGE}
    assert all(r["recovered"] and "on storage" in r["reason"] for r in report["recoveries"])


def test_restore_is_rehearsed_on_a_running_job_and_refused_where_storage_is_damaged(
    node: Node, store: Path
) -> None:
    node.train(STEPS, 30)
    train_until(node, only_on_storage, "a set that is on storage alone")
    told = node.recoveryctl("snapshots", "restore")
    assert told.startswith("rehearsal (rank 0 in step") and f"{STORAGE} in" in told, told
    assert "replayed values equal those delivered before" in told
    train_until(node, only_on_storage, "another set")
    settle(node)
    until(lambda: only_on_storage(list(node.status().ranks)), "no other set")
    servers = node.servers()
    damage_stores(store)
    command = [*module_command("recovery.recoveryctl"), "snapshots", "restore", "--socket", str(node.socket)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == ExitStatus.REFUSED and "is of no use" in refused.stderr, refused
    assert node.servers() == servers
    report = node.finish()
    assert {(r["fault"], r["plan"]) for r in report["recoveries"]} == {("rehearsal", STORAGE)}


def test_set_that_is_damaged_in_memory_comes_back_from_storage(
    tmp_path: Path, store: Path, variables: dict[str, str]
) -> None:
    options = ("--persist", str(store), "--persist-every", "1", "--spares", "2", *WITHOUT_SHADOWS)
    with Node(tmp_path, variables, *options) as node:
        node.train(STEPS, 30)
        train_until(node, lambda ranks: all(r.persisted_step and r.snapshot_commit for r in ranks), "a set")
        settle(node)
        assert damage_memory(node) >= 2
        kill_all_servers(node)
        await_recoveries(node, 1)
        report = node.finish()
    assert {r["plan"] for r in report["recoveries"]} == {STORAGE}
    assert f"tried before: {MEMORY}" in report["recoveries"][-1]["reason"]


def test_survivor_goes_back_to_storage_too_where_a_peer_held_what_nobody_else_has(
    tmp_path: Path, store: Path, variables: dict[str, str]
) -> None:
    options = (*WITHOUT_SHADOWS, "--validate-every", "0")
    with Node(tmp_path, variables, "--persist", str(store), *PERSIST_ONLY, *options) as node:
        node.train(STEPS, 30)
        for count in (1, 2):
            train_until(node, only_on_storage, "a set that is on storage alone")
            settle(node)  # else the next one may come into memory before the server dies
            until(lambda: only_on_storage(list(node.status().ranks)), "no other set")
            os.kill(node.servers()[count - 1], signal.SIGKILL)
            await_recoveries(node, count)
        report = node.finish()
    assert [r["plan"] for r in report["recoveries"]] == [STORAGE] * 2


def test_restore_is_done_again_if_who_reads_storage_or_a_new_server_is_killed_meanwhile(node: Node) -> None:
    node.train(STEPS, 30)
    train_until(node, only_on_storage, "a set that is on storage alone")
    count, first = 1, node.servers()
    while not any(killed(reader) for reader in read_storage(node, count)):  # it may have read what it wanted
        await_recoveries(node, count)
        count, first = count + 1, node.servers()
    until(lambda: not set(first) & set(node.servers()), "new servers")
    kill_all_servers(node)
    await_recoveries(node, count)
    report = node.finish()
    told = report["recoveries"]
    assert all(r["recovered"] for r in told)
    assert any(STORAGE in (r["plan"], *r["reason"].rpartition("tried before: ")[2].split(", ")) for r in told)


def test_successor_of_a_proxyd_that_died_amid_a_restore_does_it_again(node: Node) -> None:
    node.train(STEPS, 30)
    count = 1
    while not read_storage(node, count):  # servers that still shadow everything need none of it
        await_recoveries(node, count)
        count += 1
    node.kill()
    until(lambda: not readers(), "its end")
    node.restart()
    await_recoveries(node, count)
    assert STORAGE in {r["plan"] for r in node.finish()["recoveries"]}


def read_storage(node: Node, count: int) -> list[psutil.Process]:
    """All servers die, the `count`th time: who reads storage then; nobody if none is needed.

    They live for a tenth of a second, so they are looked for among proxyd's children alone.
    """
    train_until(
        node, lambda ranks: only_on_storage(ranks) and min(rank.step for rank in ranks) >= 30 * count,
        "a set that is on storage alone",
    )  # fmt: skip
    kill_all_servers(node)
    proxyd = psutil.Process(node.status().node.pid)
    found: list[psutil.Process] = []

    def read() -> bool:
        found[:] = [one for one in proxyd.children() if READER in command_of(one)]
        return bool(found)

    def back() -> bool:
        return all(rank.state == "running" and rank.recoveries >= count for rank in node.status().ranks)

    until(lambda: read() or back(), "a process that reads storage, or none is needed", 20, 0.0)
    return found


def readers() -> list[psutil.Process]:
    return [p for p in processes() if READER in command_of(p)]


def killed(process: psutil.Process) -> bool:
    """Whether it was still there."""
    with contextlib.suppress(psutil.Error):
        process.kill()
        return True
    return False


def test_successor_of_a_proxyd_that_died_knows_what_is_on_storage(node: Node) -> None:
    node.train(STEPS, 30)
    train_until(node, only_on_storage, "a set that is on storage alone")
    told = [rank.persisted_step for rank in node.status().ranks]
    node.kill()
    node.restart()
    assert [rank.persisted_step for rank in node.status().ranks] == told
    kill_all_servers(node)
    await_recoveries(node, 1)
    # Until the successor has compared replicas, servers may shadow everything, and then nothing is missing.
    assert {r["plan"] for r in node.finish()["recoveries"]} <= {STORAGE, "restart-copy-replay"}


def test_rank_alone_whose_log_has_lost_its_beginning_comes_back_from_storage(
    undisturbed: list[str], tmp_path: Path, store: Path
) -> None:
    next_step = 100

    def due(ranks: list[Any]) -> bool:
        nonlocal next_step
        if not only_on_storage(ranks) or ranks[0].step < next_step or not freed_segments(ranks[0]):
            return False
        next_step = ranks[0].step + 300
        return True

    with running_proxyd(socket := tmp_path / "socket", 1, ("--persist", str(store), *PERSIST_ONLY)):
        killer = Killer(socket, due, 3)
        faulted = proxied.run(TINY, folder=tmp_path, options=("--socket", str(socket)))
        killer.stop()
    assert faulted.status == 0, faulted.output[-3000:]
    assert steps_of(faulted) == undisturbed
    assert killer.killed >= 1  # on a busy machine the job may end before a second set is durable
    assert {r["plan"] for r in faulted.report["recoveries"]} == {STORAGE}
    assert faulted.report["replies_different"] == 0


def test_damaged_storage_ends_the_job_with_a_sentence_where_nothing_else_is_left(
    tmp_path: Path, store: Path
) -> None:
    def due(ranks: list[Any]) -> bool:
        if not only_on_storage(ranks) or not freed_segments(ranks[0]):
            return False
        damage_stores(store)
        return True

    with running_proxyd(
        socket := tmp_path / "socket", 1, ("--persist", str(store), *PERSIST_ONLY), tmp_path / "log"
    ):
        killer = Killer(socket, due, 1)
        ended = proxied.run(TINY, folder=tmp_path, options=("--socket", str(socket)))
        killer.stop()
    assert ended.status != 0
    (recovery,) = ended.report["recoveries"]
    assert recovery["plan"] == "give-up" and not recovery["recovered"]
    assert "does not come back from storage: " in recovery["reason"]
    assert f"tried before: {STORAGE}" in recovery["reason"]
    assert "does not come back from storage: " in (tmp_path / "log").read_text()


def freed_segments(rank: Any) -> int:
    """Of its log: from the beginning it cannot be replayed any more."""
    return replay.Log(rank.log_directory).freed_segments
