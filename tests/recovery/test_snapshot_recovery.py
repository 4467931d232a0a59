"""Faults no replica helps with: ranks come back from their snapshots and replay, and no value differs."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import proxied
import pytest
from running_proxyd import running_proxyd
from test_roll_forward import PARKED_INSIDE
from training_run import ROOT

from understudy.recovery.base.control import blocking_channel, pb, rpc

pytestmark = pytest.mark.drawn(9)

SMALL = ("--layers", "2", "--width", "48", "--batch-size", "4", "--block-size", "32", "--dropout", "0.1")
SNAPSHOT, REPLICA, ROLL_FORWARD = "restore-snapshot-replay", "restart-copy-replay", "roll-forward"


class Killer(threading.Thread):
    """Kills all device servers at once whenever `due` says so of the ranks' status."""

    def __init__(self, socket: Path, due: Callable[[list[Any]], bool], times: int) -> None:
        super().__init__(daemon=True)
        self._socket, self._due, self._times = socket, due, times
        self.killed = 0
        self.start()

    def run(self) -> None:
        with blocking_channel(self._socket) as channel:
            daemon = rpc.DaemonStub(channel)
            while self.killed < self._times:
                ranks = list(daemon.GetStatus(pb.StatusRequest(), wait_for_ready=True, timeout=60).ranks)
                if ranks and all(rank.state == "running" for rank in ranks) and self._due(ranks):
                    # Stopped first: a recovery that begins before the last is killed finds none that answers.
                    for number in (signal.SIGSTOP, signal.SIGKILL):
                        for rank in ranks:
                            with contextlib.suppress(ProcessLookupError):  # the job has just ended
                                os.kill(rank.server_pid, number)
                    self.killed += 1
                time.sleep(0.005)  # polls another process's state

    def stop(self) -> None:
        self._times = 0
        self.join()


def commits_of(recovery: dict[str, Any]) -> list[int]:
    return [int(number) for number in re.findall(r"at commit (\d+)", recovery["reason"])]


def char_gpt(
    folder: Path, name: str, socket: Path, steps: int, *drills: str
) -> tuple[list[str], dict[str, Any]]:
    """The losses of two ranks, and the report."""
    losses = folder / name
    script = ROOT / "examples" / "char_gpt.py"
    options = tuple(word for drill in drills for word in ("--drill", drill))
    ended = proxied.run(
        proxied.ranks(2, script, "--steps", str(steps), *SMALL, "--losses", str(losses)),
        folder=folder, options=("--socket", str(socket), *options),
    )  # fmt: skip
    assert ended.status == 0, ended.output[-3000:]
    found = sorted(folder.glob(f"{name}*"))
    assert len(found) == 2
    return [path.read_text() for path in found], ended.report


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What `tiny.py` prints of each of 4000 steps, whatever its payload."""
    tiny = proxied.python(proxied.WORKLOADS / "tiny.py", "--steps", "4000")
    ended = proxied.run(
        tiny, folder=tmp_path_factory.mktemp("undisturbed"), options=("--snapshot-overhead", "0")
    )
    assert (ended.status, ended.report["recoveries"]) == (0, []), ended.output[-3000:]
    lines = steps_of(ended)
    assert len(lines) == 4000
    return lines


def steps_of(ended: proxied.Ended) -> list[str]:
    return [line for line in ended.output.split("\n") if line.startswith("step")]


def test_rank_alone_that_dies_late_again_and_again_computes_the_same(
    undisturbed: list[str], tmp_path: Path
) -> None:
    tiny = proxied.python(proxied.WORKLOADS / "tiny.py", "--steps", "400", "--payload", "200000")
    drills = [f"kill-server rank=0 step={step} call={call}" for step, call in ((90, 7), (240, 3), (390, 12))]
    options = tuple(word for drill in drills for word in ("--drill", drill))
    faulted = proxied.run(tiny, folder=tmp_path, options=options)
    assert faulted.status == 0, faulted.output[-3000:]
    assert steps_of(faulted) == undisturbed[:400]
    recoveries = faulted.report["recoveries"]
    assert [r["recovered"] for r in recoveries] == [True] * 3
    assert recoveries[-1]["plan"] == SNAPSHOT
    assert commits_of(recoveries[-1])[0] > 10, "the log was replayed from its very beginning"
    assert faulted.report["replies_different"] == 0


def test_rank_alone_that_is_killed_at_random_instants_amid_snapshots_computes_the_same(
    undisturbed: list[str], tmp_path: Path
) -> None:
    seed = 20261121
    print(f"seed {seed}")
    chance = random.Random(seed)
    tiny = proxied.python(proxied.WORKLOADS / "tiny.py", "--steps", "4000", "--payload", "20000")
    with running_proxyd(socket := tmp_path / "socket", 1, ("--snapshot-overhead", "50%")):
        next_step = 300

        def due(ranks: list[Any]) -> bool:
            nonlocal next_step
            if ranks[0].step < next_step:
                return False
            next_step += chance.randint(300, 900)
            return True

        killer = Killer(socket, due, 100)
        faulted = proxied.run(tiny, folder=tmp_path, options=("--socket", str(socket)))
        killer.stop()
    assert faulted.status == 0, faulted.output[-3000:]
    assert steps_of(faulted) == undisturbed
    assert len(faulted.report["recoveries"]) >= 3
    assert SNAPSHOT in {r["plan"] for r in faulted.report["recoveries"]}
    assert faulted.report["replies_different"] == 0


def test_status_says_that_snapshots_have_no_room_and_training_goes_on(tmp_path: Path) -> None:
    tiny = proxied.python(proxied.WORKLOADS / "tiny.py", "--steps", "2000", "--payload", "20000")
    notes: set[str] = set()

    def due(ranks: list[Any]) -> bool:
        notes.add(ranks[0].note)
        return False

    with running_proxyd(socket := tmp_path / "socket", 1, ("--snapshot-limit", "4K")):
        watcher = Killer(socket, due, 1)
        ended = proxied.run(tiny, folder=tmp_path, options=("--socket", str(socket)))
        watcher.stop()
    assert ended.status == 0, ended.output[-3000:]
    assert any("no snapshots: there was no memory" in note for note in notes), notes
    assert ended.report["ranks"][0]["snapshot_bytes"] <= 4096


def test_all_servers_killed_at_once_three_times_changes_no_loss(tmp_path: Path) -> None:
    with running_proxyd(socket := tmp_path / "socket", 2, ("--spares", "2")):
        unfaulted, _ = char_gpt(tmp_path, "unfaulted", socket, 200)
        next_step = 50

        def due(ranks: list[Any]) -> bool:
            nonlocal next_step
            ready = len(ranks) == 2 and min(r.step for r in ranks) >= next_step
            if ready and all(r.snapshot_commit for r in ranks):
                next_step += 45
                return True
            return False

        killer = Killer(socket, due, 3)
        faulted, report = char_gpt(tmp_path, "faulted", socket, 200)
        killer.stop()
    assert killer.killed == 3
    assert faulted == unfaulted
    assert {r["plan"] for r in report["recoveries"]} == {SNAPSHOT}
    assert all(r["recovered"] and min(commits_of(r)) > 0 for r in report["recoveries"])
    assert report["replies_different"] == 0


def test_shards_that_nobody_else_holds_and_no_shadow_has_room_for_come_back(tmp_path: Path) -> None:
    script = proxied.WORKLOADS / "sharded_training.py"
    contents: dict[str, list[str]] = {}
    drills: tuple[str, ...] = ()
    with running_proxyd(socket := tmp_path / "socket", 2, ("--shadow-limit", "4K")):
        for name in ("unfaulted", "faulted"):
            ended = proxied.run(
                proxied.ranks(2, script, "--steps", "40", "--out", str(tmp_path / name)),
                folder=tmp_path, options=("--socket", str(socket), *drills),
            )  # fmt: skip
            assert ended.status == 0, ended.output[-3000:]
            contents[name] = [(tmp_path / f"{name}.{rank}").read_text() for rank in (0, 1)]
            calls = ended.report["calls_per_step"]
            at = ((1, 12, calls // 4), (0, 18, calls // 2), (1, 24, calls - 8), (0, 29, 5))
            drills = tuple(
                word for rank, step, call in at
                for word in ("--drill", f"kill-server rank={rank} step={step} call={call}")
            )  # fmt: skip
    assert contents["faulted"] == contents["unfaulted"]
    recoveries = ended.report["recoveries"]
    assert len(recoveries) == 4
    assert {r["plan"] for r in recoveries} == {SNAPSHOT}
    assert {r["phase"] for r in recoveries} == {"FORWARD_BACKWARD", "OPTIMIZER"}
    assert ended.report["replies_different"] == 0


def test_server_killed_in_the_optimizer_phase_without_pre_images_changes_no_loss(tmp_path: Path) -> None:
    with running_proxyd(socket := tmp_path / "socket", 2, ("--optimizer-preimages", "off")):
        unfaulted, report = char_gpt(tmp_path, "unfaulted", socket, 60)
        last = report["calls_per_step"]
        drills = [
            f"kill-server rank={i % 2} step={12 + 12 * i} call={last - back}"
            for i, back in enumerate((2, 4, 6, 9))
        ]
        faulted, report = char_gpt(tmp_path, "faulted", socket, 60, *drills)
    assert faulted == unfaulted
    recoveries = report["recoveries"]
    assert len(recoveries) == len(drills)
    assert all(r["recovered"] for r in recoveries)
    assert "OPTIMIZER" in {r["phase"] for r in recoveries}
    # The other rank finishes its step; if it is late, it has not begun it yet and can go back by itself.
    others = [r for r in recoveries if r["phase"] == "OPTIMIZER" and r["plan"] not in (ROLL_FORWARD, REPLICA)]
    assert all(PARKED_INSIDE in r["reason"] for r in others), others
    assert report["replies_different"] == 0
