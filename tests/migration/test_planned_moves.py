"""Nothing is broken, but a rank is to leave its device: it goes on elsewhere, and no value differs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_proxyd_recovery
from proxied import until
from running_node import LONG_S, RANK, Node
from running_proxyd import RunningProxyd
from test_proxyd_recovery import LAUNCH, expected

from understudy.recovery.base.errors import ExitStatus
from understudy.recovery.base.own_modules import module_command

pytestmark = pytest.mark.drawn(7)

variables = test_proxyd_recovery.variables  # the fixture

STASH = "stash-restart-restore"


class RoomyNode(Node):
    """With a device more than its job has ranks."""

    def start(self, ranks: int = 3) -> RunningProxyd:
        return super().start(ranks)

    def refused(self, *arguments: str, status: int = ExitStatus.REFUSED) -> str:
        """What `recoveryctl` says of an order that cannot be carried out."""
        command = [*module_command("recovery.recoveryctl"), *arguments, "--socket", str(self.socket)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
        assert (done.returncode, done.stdout) == (status, ""), done
        return " ".join(done.stderr.split())

    def devices(self) -> list[tuple[str, int]]:
        """State and rank of each."""
        return [(device.state, device.rank) for device in self.status().node.devices]


@pytest.fixture
def node(variables: dict[str, str], tmp_path: Path) -> Iterator[RoomyNode]:
    node = RoomyNode(tmp_path, variables)
    with node:
        yield node


def test_a_drained_device_is_left_by_its_rank_and_can_be_given_back(node: RoomyNode) -> None:
    node.train(steps=60, limit=20)
    node.await_step(20)
    former = node.servers()
    told = node.recoveryctl("drain", "cpu:1")
    assert told.startswith("cpu:1 is drained; rank 1 runs on cpu:2 planned-move (rank 1 in step 21"), told
    assert f"{STASH} in" in told and "left for one on another device" in told
    assert node.devices() == [("leased", 0), ("drained", -1), ("leased", 1)]
    assert node.servers()[0] == former[0] and node.servers()[1] != former[1]
    node.let(40)
    node.await_step(40)
    assert "no other device is free to take it: nothing has changed" in node.refused("drain", "cpu:0")
    assert node.recoveryctl("drain", "cpu:1", "--undo") == "cpu:1 can be had again"
    assert node.devices()[1] == ("idle", -1)
    assert "rank 0 runs on cpu:1" in node.recoveryctl("migrate", "--rank", "0", "--to", "cpu:1")
    assert node.devices() == [("idle", -1), ("leased", 0), ("leased", 1)]
    report = node.finish()
    assert [(r["fault"], r["rank"], r["plan"]) for r in report["recoveries"]] == [
        ("planned-move", 1, STASH), ("planned-move", 0, STASH)
    ]  # fmt: skip
    assert all(r["planned"] for r in report["recoveries"])


def test_ranks_move_back_and_forth_while_they_compute(node: RoomyNode) -> None:
    node.train(steps=400, limit=399)
    node.await_step(2)
    for to, rank in (("cpu:2", 0), ("cpu:0", 1), ("cpu:1", 0), ("cpu:2", 1)):
        assert f"rank {rank} runs on {to}" in node.recoveryctl("migrate", "--rank", str(rank), "--to", to)
    report = node.finish()
    assert [r["rank"] for r in report["recoveries"]] == [0, 1, 0, 1]
    assert {r["plan"] for r in report["recoveries"]} == {STASH}


def test_what_cannot_be_drained_or_moved_is_one_sentence_and_changes_nothing(node: RoomyNode) -> None:
    node.train(steps=30, limit=10)
    node.await_step(10)
    former = node.servers()
    here = node.status().node.membership.host
    said = {
        ("drain", "cpu:7"): "there is no device cpu:7; there are: cpu:0, cpu:1, cpu:2",
        ("drain", "elsewhere:cpu:1"): f"there is no host elsewhere; known are: {here}",
        ("drain", here, "--undo"): "a whole host cannot be given back: name one of its devices",
        ("drain", "cpu:x"): "'cpu:x' is no place: write a device as cpu:1",
        ("drain", "cpu:1", "--undo"): "cpu:1 is not drained",
        ("migrate", "--rank", "1", "--to", "cpu:1"): "rank 1 is on cpu:1 already",
        ("migrate", "--rank", "1", "--to", "cpu:0"): "rank 1 cannot move to cpu:0: rank 0 of job",
        ("migrate", "--rank", "5", "--to", "cpu:2"): "has no running rank 5",
        ("migrate", "--rank", "1", "--to", "there:cpu:2"): "there is no host there; known are",
        ("migrate", "--rank", "1", "--to", "cpu:2", "--images", "/tmp"): "of no use with --to",
    }
    for arguments, sentence in said.items():
        wrong = "cpu:x" in arguments or "--images" in arguments
        status = ExitStatus.USAGE if wrong else ExitStatus.REFUSED
        assert sentence in node.refused(*arguments, status=status), arguments
    assert node.devices() == [("leased", 0), ("leased", 1), ("idle", -1)]
    assert node.recoveryctl("drain", "cpu:2") == "cpu:2 is drained: no session held it"
    assert "cpu:2 is drained already" in node.refused("drain", "cpu:2")
    assert "it is drained" in node.refused("migrate", "--rank", "1", "--to", "cpu:2")
    assert "no other device is free" in node.refused("drain", "cpu:1")
    assert node.servers() == former
    assert node.finish()["recoveries"] == []


# ------------------------------------------------------------------ what may come between
def ordered(node: RoomyNode, *arguments: str) -> subprocess.Popen[str]:
    """An order whose answer is awaited later."""
    command = [*module_command("recovery.recoveryctl"), *arguments, "--socket", str(node.socket)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_drain_goes_on_under_the_successor_of_a_proxyd_that_died_amid_it(node: RoomyNode) -> None:
    node.train(steps=60, limit=20)
    node.await_step(20)
    stopped = node.servers()[0]
    os.kill(stopped, signal.SIGSTOP)  # it does not park
    try:
        order = ordered(node, "drain", "cpu:1")
        until(lambda: node.devices()[1][0] == "recovering", "the move")
        node.kill()
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert order.wait(LONG_S) == ExitStatus.NOBODY_ANSWERS
    node.restart()
    until(lambda: node.devices() == [("leased", 0), ("drained", -1), ("leased", 1)], "the drained device")
    node.kill()
    node.restart()
    assert node.devices() == [("leased", 0), ("drained", -1), ("leased", 1)]
    assert node.recoveryctl("drain", "cpu:1", "--undo") == "cpu:1 can be had again"
    assert "rank 1 runs on cpu:1" in node.recoveryctl("migrate", "--rank", "1", "--to", "cpu:1")
    node.finish()


def test_a_rank_whose_server_dies_amid_its_move_arrives_all_the_same(node: RoomyNode) -> None:
    node.train(steps=60, limit=20)
    node.await_step(20)
    other, leaving = node.servers()
    os.kill(other, signal.SIGSTOP)
    try:
        order = ordered(node, "drain", "cpu:1")
        until(lambda: node.devices()[1][0] == "recovering", "the move")
        os.kill(leaving, signal.SIGKILL)
    finally:
        os.kill(other, signal.SIGCONT)
    told, problem = order.communicate(timeout=LONG_S)
    assert order.returncode == 0 and "rank 1 runs on cpu:2" in told, problem
    assert node.devices() == [("leased", 0), ("drained", -1), ("leased", 1)]
    plans: list[Any] = [(r["rank"], r["fault"]) for r in node.finish()["recoveries"]]
    assert (1, "server-died") in plans and (1, "planned-move") in plans


def test_a_worker_that_ends_leaves_its_drained_device_free(node: RoomyNode) -> None:
    node.train(steps=20, limit=10)
    node.await_step(10)
    assert "rank 1 runs on cpu:2" in node.recoveryctl("drain", "cpu:1")
    assert node.recoveryctl("drain", "cpu:1", "--undo") == "cpu:1 can be had again"
    assert "rank 0 runs on cpu:1" in node.recoveryctl("drain", "cpu:0")
    node.finish()
    until(lambda: node.devices() == [("drained", -1), ("idle", -1), ("idle", -1)], "idle devices")


def test_a_rank_that_is_alone_moves_by_a_snapshot_that_is_taken_for_it(node: RoomyNode) -> None:
    node.let(60, 0)
    script = [sys.executable, "-c", LAUNCH, RANK, "1", "9000"]
    alone = subprocess.Popen(
        [*module_command("recovery.proxyrun"), "--socket", str(node.socket), *script],
        env=node.environment | {"LIMIT_FILE": str(node.folder / "limit")}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    until(lambda: [rank.step for rank in node.status().ranks] == [61], "step 61")
    order = ordered(node, "drain", "cpu:0")

    def ended() -> bool:
        """It is taken at the next commit, so there have to be some."""
        node.let(min(9000, node.status().ranks[0].step + 1), 0)
        return order.poll() is not None

    until(ended, "the move")
    told, problem = order.communicate(timeout=LONG_S)
    assert order.returncode == 0 and "restore-snapshot-replay in" in told, problem
    assert "no pre-images, as it is alone; newest consistent snapshots: rank 0 at commit " in told
    assert node.devices() == [("drained", -1), ("leased", 0), ("idle", -1)]
    node.let(9000, 0)
    output, _ = alone.communicate(timeout=LONG_S)
    assert output.split("\n")[:-1] == expected(0, 1, 9000)
