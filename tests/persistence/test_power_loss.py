"""The power goes: what was on storage, set and log, leads to the last minibatch or so, bit for bit."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import proxied
import psutil
import pytest
from proxied import until
from running_node import runtime_directories
from running_proxyd import RunningProxyd
from small_disks import tiny_file_system
from test_persistence import command_of
from training_run import installed
from zygotes import descendants

from understudy.recovery.base.control import blocking_channel, pb, rpc
from understudy.recovery.base.errors import ExitStatus
from understudy.recovery.base.own_modules import module_command, name_of
from understudy.recovery.snapshots.log.stored_log import Chain, Kind, read_commit, read_frames
from understudy.recovery.snapshots.stores.layout import logs_of, runs_of

pytestmark = pytest.mark.drawn(4)

SCRIPT = proxied.WORKLOADS / "replayable.py"
HOST_TO_DEVICE, INPUT_BYTES = 6, 16 * 24 * 4
SEED = int(os.environ.get("UNDERSTUDY_TEST_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
MOST_LOST = 20
"""Steps that ended while the copier waited for one of two cores, or for the disk; mostly it is 0 to 2."""
MORE = 5
"""Steps behind the one that was replayed to."""


class Powered:
    """A node with a training on it, until the power goes."""

    def __init__(
        self, folder: Path, ranks: int, *options: str, store: Path | None = None, hold: int = 0
    ) -> None:
        self.folder, self.ranks = folder, ranks
        self.socket, self.losses = folder / "proxyd.sock", folder / "losses"
        self.store = store or folder / "store"
        self.options = ("--persist", str(self.store), "--persist-every", "4steps", "--persist-log", *options)
        self.proxyd = self.start()
        command = self.command("--steps", "1000000", "--losses", str(self.losses), "--pace", "0.01",
                               "--hold", str(hold))  # fmt: skip
        self.run = subprocess.Popen(
            [*installed("proxyrun"), "--socket", str(self.socket), *command],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def start(self) -> RunningProxyd:
        return RunningProxyd(self.socket, self.ranks, self.options, self.folder / "proxyd.log")

    def command(self, *arguments: str) -> list[str]:
        if self.ranks == 1:
            return proxied.python(SCRIPT, *arguments)
        return proxied.torchrun(self.ranks, SCRIPT, *arguments)

    def status(self) -> Any:
        with blocking_channel(self.socket) as channel:
            return rpc.DaemonStub(channel).GetStatus(pb.StatusRequest(), timeout=30)

    def logged_step(self) -> int:
        """Up to which every rank's log is said to be durable, behind a set."""
        assert self.run.poll() is None
        ranks = self.status().ranks
        here = len(ranks) == self.ranks and all(rank.persisted_step for rank in ranks)
        return min(rank.logged_step for rank in ranks) if here else 0

    def cut_power(self) -> None:
        """All processes at once, and all memory."""
        directories = runtime_directories()
        doomed: list[psutil.Process] = []
        for pid in (self.run.pid, self.proxyd.pid):  # no step may end once its log has nobody to copy it
            with contextlib.suppress(psutil.Error):
                doomed += [psutil.Process(pid), *descendants(psutil.Process(pid))]
        doomed += [
            p for p in psutil.process_iter() if any(str(d) in " ".join(command_of(p)) for d in directories)
        ]
        for process in doomed:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.proxyd.process.wait()
        self.run.wait()
        psutil.wait_procs(doomed, timeout=30)
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)

    def trained(self) -> list[str]:
        """A line for each step that ended."""
        return [line for line in self.losses.read_text().splitlines(keepends=True) if line.endswith("\n")]


@contextlib.contextmanager
def powered(
    folder: Path, ranks: int, *options: str, store: Path | None = None, hold: int = 0
) -> Iterator[Powered]:
    node = Powered(folder, ranks, *options, store=store, hold=hold)
    try:
        yield node
    finally:
        node.cut_power()


def snapshots(*arguments: str, status: int = 0) -> str:
    """`recoveryctl snapshots …`: what it says."""
    done = subprocess.run(
        [*module_command("recovery.recoveryctl"), "snapshots", *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def assert_goes_on(node: Powered, told: int, folder: Path, store: Path | None = None) -> None:
    """Replay, export, resume: the losses of a run that never stopped."""
    seen, store = node.trained(), store or node.store
    said = snapshots("replay", str(store))
    snapshots("export", str(store), str(folder / "out"))
    found = re.search(r"^step (\d+) of job|leads no further .*step (\d+)", said, re.MULTILINE)
    assert found is not None, said
    step = int(found[1] or found[2])
    assert step >= told
    assert len(seen) - step <= MOST_LOST, "that many minibatches were lost"
    print(f"seed {SEED}: told durable {told}, seen {len(seen)}, replayed to {step}", file=sys.stderr)
    whole, rest = folder / "whole", folder / "rest"
    last = str(max(step + MORE, len(seen)))
    resume = ["--resume", str(folder / "out")]
    for arguments in (["--losses", str(whole)], ["--losses", str(rest), *resume]):
        ended = proxied.run(node.command("--steps", last, *arguments), folder=folder)
        assert ended.status == 0, ended.output
    lines = whole.read_text().splitlines(keepends=True)
    assert seen == lines[: len(seen)]
    assert rest.read_text().splitlines(keepends=True) == lines[step:]


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, (), id="one rank"),
        pytest.param(2, (), id="two ranks"),
        pytest.param(2, ("--persist-only",), id="two ranks, storage only"),
        pytest.param(2, ("--optimizer-preimages", "off"), id="no pre-images"),
    ],
)
def test_a_training_whose_node_lost_power_goes_on_from_its_last_minibatch_or_so_bit_for_bit(
    tmp_path: Path, ranks: int, options: tuple[str, ...]
) -> None:
    chance = random.Random(f"{SEED} {ranks} {options}")
    with powered(tmp_path, ranks, *options) as node:
        step = chance.randrange(5, 60)
        until(lambda: node.logged_step() > step, "a durable log", within_s=120)
        told = node.logged_step()
        node.cut_power()
    assert_goes_on(node, told, tmp_path)
    assert proxied.left_behind() == []


@pytest.mark.long
def test_what_else_breaks_before_the_power_goes_leaves_no_gap(tmp_path: Path) -> None:
    with powered(tmp_path, 2) as node:
        until(node.logged_step, "a durable log", within_s=120)
        for disturb in (kill_copier, kill_server, kill_proxyd):
            disturb(node)
            step = max(rank.step for rank in node.status().ranks)
            until(lambda step=step: node.logged_step() > step, "a durable log", within_s=120)  # type: ignore[misc]
        told = node.logged_step()
        node.cut_power()
    assert_goes_on(node, told, tmp_path)
    assert proxied.left_behind() == []


def kill_copier(node: Powered) -> None:
    (copier,) = copiers(node)
    copier.kill()
    until(lambda: copier not in copiers(node) and copiers(node), "another copier")


def copiers(node: Powered) -> list[psutil.Process]:
    known = descendants(psutil.Process(node.proxyd.pid))
    return [one for one in known if name_of("recovery.snapshots.log.log_copier") in command_of(one)]


def kill_server(node: Powered) -> None:
    psutil.Process(node.status().ranks[1].server_pid).kill()
    until(lambda: all(rank.recoveries for rank in node.status().ranks if rank.rank == 1), "its recovery")


def kill_proxyd(node: Powered) -> None:
    node.proxyd.kill()
    node.proxyd = node.start()


@pytest.mark.long
def test_a_full_disk_is_told_of_and_training_and_then_its_log_go_on(tmp_path: Path) -> None:
    with tiny_file_system(tmp_path, "8m") as disk:
        filler = disk / "filler"
        with powered(tmp_path, 1, store=disk / "store") as node:
            until(node.logged_step, "a durable log", within_s=120)
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))

            def told() -> bool:
                return "the log does not reach" in node.status().ranks[0].note

            until(told, "trouble in the status")
            step = node.status().ranks[0].step
            until(lambda: node.status().ranks[0].step > step + 50, "more steps")
            filler.unlink()
            until(lambda: not told() and node.logged_step() > step + 50, "a durable log")
            durable = node.logged_step()
            node.cut_power()
        assert_goes_on(node, durable, tmp_path)


@pytest.fixture(scope="module")
def at_31(tmp_path_factory: pytest.TempPathFactory) -> Powered:
    """A rank alone whose node lost power: there is a set of step 28 or before, and the log up to 31."""
    with powered(tmp_path_factory.mktemp("lost"), 1, hold=31) as node:
        until(lambda: node.logged_step() == 31, "a durable log", within_s=120)
        node.cut_power()
    return node


@pytest.fixture
def lost(at_31: Powered, tmp_path: Path) -> Path:
    """What lies on storage then, for one test."""
    return Path(shutil.copytree(at_31.store, tmp_path / "store"))


def test_a_training_that_stood_still_when_the_power_went_loses_nothing(
    at_31: Powered, lost: Path, tmp_path: Path
) -> None:
    assert_goes_on(at_31, 31, tmp_path, lost)
    assert proxied.left_behind() == []


def test_a_replay_that_is_told_to_stop_leaves_everything_as_it_was(lost: Path) -> None:
    before = sorted(lost.rglob("*"))
    replaying = subprocess.Popen(
        [*module_command("recovery.recoveryctl"), "snapshots", "replay", str(lost)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    until(runtime_directories, "its runtime directory")
    replaying.terminate()
    said, _ = replaying.communicate(timeout=60)
    assert replaying.returncode == ExitStatus.REFUSED, said
    assert "it was interrupted; nothing has changed" in said
    assert sorted(lost.rglob("*")) == before
    assert proxied.left_behind() == []


def test_a_replay_that_gives_other_values_than_the_script_was_given_is_refused(lost: Path) -> None:
    for one in [file for run in runs_of(lost) for file in logs_of(run)]:
        spoil_inputs(one.path)
    before = sorted(lost.rglob("*"))
    said = snapshots("replay", str(lost), status=ExitStatus.REFUSED)
    assert "are others in the replay: this program's log is not replayable" in said
    assert "can still be exported" in said
    assert sorted(lost.rglob("*")) == before
    assert proxied.left_behind() == []


def spoil_inputs(path: Path) -> None:
    """Other data for every step, under checksums that are right."""
    content, spoilt = path.read_bytes(), b""
    chain = Chain()
    for frame in read_frames(BytesIO(content), len(content)):
        body = bytearray(frame.content)
        at = 0
        while frame.kind is Kind.RECORDS and at < len(body):
            count, kind, frees = struct.unpack_from("<IHH", body, at)
            words = at + 24 + 8 * frees
            if kind == HOST_TO_DEVICE and struct.unpack_from("<Q", body, words + 8) == (INPUT_BYTES,):
                body[words + 16 : words + 16 + INPUT_BYTES] = bytes(INPUT_BYTES)
            at += count
        spoilt += chain.encode(frame.kind, frame.number, bytes(body))
    path.write_bytes(spoilt)


def test_a_log_whose_end_is_damaged_leads_to_the_step_before_and_says_so(lost: Path) -> None:
    (log,) = [file.path for run in runs_of(lost) for file in logs_of(run)]
    content = log.read_bytes()
    commits = [f for f in read_frames(BytesIO(content), len(content)) if f.kind is Kind.COMMIT]
    log.write_bytes(content[: commits[-2].end] + bytes(len(content) - commits[-2].end))
    assert [read_commit(one.content).commit.step for one in commits][-2:] == [30, 31]
    said = snapshots("replay", str(lost))
    assert f"what follows byte {commits[-2].end} of {len(content)} is not whole" in said
    assert "step 30 of job" in said
