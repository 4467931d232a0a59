"""`recoveryctl snapshots tune`: what it measures, what it leaves behind, and what it says to do."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import test_proxyd_recovery
from proxied import until
from running_node import Node
from small_disks import tiny_file_system
from typer.testing import CliRunner

from understudy.recovery.base.errors import BadInput
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.commands import snapshots as snapshot_commands
from understudy.recovery.config.proxyd_settings import settings_of
from understudy.recovery.snapshots.tuning import probe
from understudy.recovery.snapshots.tuning.advice import Advice, Known, Slowdown, advise, usable
from understudy.recovery.snapshots.tuning.probe import Point, Timings, medians, points
from understudy.recovery.snapshots.tuning.tuner import CannotTune
from understudy.recovery.tuning.job_watch import JobWatch, Pace, RankSample, Sample, name_of_job
from understudy.recovery.tuning.tune import Order, Running, at_once, known_of, running, slowdown_of

pytestmark = pytest.mark.drawn(5)

GB = 10**9
TIMINGS = Timings("uring", "", GB, 3, {1: 1.0, 2: 1.5, 3: 2.4}, {1: 1.2, 2: 1.0, 4: 1.1}, 10.0 * GB)
KNOWN = Known(4 * GB, "said so", 0.5, "said so")


variables = test_proxyd_recovery.variables  # the fixture


def tune(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*module_command("recovery.recoveryctl"), "snapshots", "tune", *arguments]
    environment = {"UNDERSTUDY_SOCKET": "/nowhere/proxyd.sock"} | environment
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=os.environ | environment
    )


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """With one sentence."""
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not done.stdout, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


# ------------------------------------------------------------------ the whole command
def test_a_probe_leaves_nothing_behind_and_its_json_says_all(tmp_path: Path) -> None:
    done = tune(str(tmp_path), "--state", "3MiB", "--step", "0.35", "--json")
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    told = json.loads(done.stdout)
    assert set(told) == {
        "directory", "measured", "probe", "limits", "choice", "expected_overhead", "notes", "options",
    }  # fmt: skip
    measured, chosen = told["measured"], told["choice"]
    assert measured["state_bytes"] == told["probe"]["bytes"] == 3 << 20 and measured["step_s"] == 0.35
    assert set(measured["write_time_s"]) == {"1", "2", "3", "4"} and told["probe"]["rounds"] >= 1
    assert set(measured["thread_time_s"]) == {"1", "2", "4"}
    assert measured["state_from"] == "--state" and measured["step_from"] == "--step"
    assert measured["slowdown_while_persisting"] == 1 and "not measured" in measured["slowdown_from"]
    assert told["probe"]["engine"] in ("uring", "direct", "buffered", "mmap", "dax")
    assert str(tmp_path) not in told["probe"]["engine_notes"]
    assert told["limits"]["overhead"] == pytest.approx(1.03) and told["limits"]["dram_bytes"] == 64 << 20
    assert 1 <= told["expected_overhead"] < 1.031
    assert told["options"] == [
        "--persist", str(tmp_path), "--persist-slots", str(chosen["in_flight"] + 1),
        "--persist-every", str(max(1, math.ceil(chosen["interval"] * 0.35))),
    ]  # fmt: skip


def test_state_beyond_the_probe_limit_is_scaled_and_that_is_said(tmp_path: Path) -> None:
    done = tune(
        str(tmp_path), "--state", "64MiB", "--step", "2s", "--probe-limit", "1MiB", "--storage", "200M"
    )
    assert done.returncode == 0, done.stderr
    assert "measured with 1.05 MB and are scaled to 67.1 MB in proportion (--probe-limit)" in done.stdout
    assert "T_w by snapshots under way: 1: " in done.stdout
    assert "2: " not in done.stdout.split("T_w by snapshots")[1].split("\n")[0]  # no room for three slots
    assert f"proxyd … --persist {tmp_path} --persist-slots 2 --persist-every " in done.stdout


@pytest.mark.cold  # the files of the process itself are looked at
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_probe_that_is_killed_while_it_writes_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [*module_command("recovery.recoveryctl"), "snapshots", "tune", str(tmp_path)]
    run = subprocess.Popen(
        [*command, "--state", "96MiB", "--step", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        until(lambda: holds_a_nameless_file(run), "a store without a name")
        assert list(tmp_path.iterdir()) == []
        run.send_signal(number)
        run.communicate(timeout=60)
        assert run.returncode == -number
    finally:
        run.kill()
        run.communicate()
    assert list(tmp_path.iterdir()) == []


def holds_a_nameless_file(run: subprocess.Popen[bytes]) -> bool:
    assert run.poll() is None, "it ended before it was killed"
    for descriptor in Path(f"/proc/{run.pid}/fd").iterdir():
        try:
            if probe.PREFIX in os.readlink(descriptor) and os.readlink(descriptor).endswith("(deleted)"):
                return True
        except FileNotFoundError:
            continue
    return False


MAKING = """
import sys, threading
from pathlib import Path
from understudy.recovery.snapshots.tuning import probe

class Slow:
    needed_slot_bytes = staticmethod(lambda sizes: 4096)
    def create(path, **_):
        Path(path).write_bytes(bytes(4096))
        print("making", flush=True)
        threading.Event().wait()

probe.Store = Slow
with probe.opened(Path(sys.argv[1]), 4096, 1):
    pass
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_probe_that_is_killed_while_its_store_is_being_made_removes_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    run = subprocess.Popen([sys.executable, "-P", "-c", MAKING, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert run.stdout is not None and run.stdout.readline() == b"making\n"
        assert len(list(tmp_path.glob("*/store"))) == 1
        run.send_signal(number)
        assert run.wait(60) == -number
    finally:
        run.kill()
        run.communicate()
    assert list(tmp_path.iterdir()) == []


def test_a_probe_that_fails_amid_writing_leaves_nothing_behind_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be probed: Input/output error"):  # noqa: SIM117
        with probe.opened(tmp_path, 4096, 1):
            raise OSError(5, "Input/output error")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--state", "much", "--step", "1"], "--state 'much' is not a size"),
        (["--state", "1M", "--step", "0"], "--step '0' is no time"),
        (["--state", "1M", "--step", "-1"], "--step '-1' is no time"),
        (["--state", "1M", "--step", "1", "--overhead", "0"], "--overhead '0' leaves no time for snapshots"),
        (["--state", "1M", "--step", "1", "--overhead", "most"], "--overhead 'most' is no share"),
        (["--state", "1M", "--step", "1", "--dram", "0"], "--dram '0' is not a size"),
        (["--state", "1M", "--step", "1", "--dram", "1000"], "less than one chunk"),
        (["--state", "1M", "--step", "1", "--storage", "2M"], "need 2.62 MB of storage"),
        (["--state", "1M", "--step", "1", "--probe-limit", "x"], "--probe-limit 'x' is not a size"),
        (["--watch", "0"], "--watch '0' is no time"),
        ([], "no proxyd answers, so the training is not known: give --state SIZE and --step SECONDS"),
        (["--state", "1M"], "give --step SECONDS, or start it"),
        (["--step", "1"], "give --state SIZE, or start it"),
    ],
)
def test_a_mistake_is_answered_with_one_sentence(tmp_path: Path, arguments: list[str], words: str) -> None:
    assert_refused(tune(str(tmp_path), *arguments), words)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert_refused(tune(str(tmp_path / "none"), "--state", "1M", "--step", "1"), "is no directory: make it")


def test_a_full_file_system_is_refused_with_one_sentence(tmp_path: Path) -> None:
    with tiny_file_system(tmp_path, "64k") as tiny:
        known = ("--state", "1M", "--step", "1")
        assert_refused(tune(str(tiny), *known), "need 2.62 MB of storage", "free some")
        assert_refused(tune(str(tiny), *known, "--storage", "1G"), "has 65.5 kB free", "--probe-limit")
        assert list(tiny.iterdir()) == []


def test_a_read_only_file_system_is_refused_with_one_sentence(tmp_path: Path) -> None:
    with tiny_file_system(tmp_path, "64m,ro") as tiny:
        assert_refused(tune(str(tiny), "--state", "1M", "--step", "1"), "cannot be probed: Read-only file")


# ------------------------------------------------------------------ pure parts
def test_each_number_under_way_and_each_number_of_writers_is_measured_once_a_round() -> None:
    assert points(3) == [Point(1, 2), Point(2, 2), Point(3, 2), Point(1, 1), Point(1, 4)]
    found = {point: [9.0, float(number), 0.0] for number, point in enumerate(points(3), 1)}
    assert medians(found) == ({1: 1.0, 2: 2.0, 3: 3.0}, {1: 4.0, 2: 1.0, 4: 5.0})


def advice(slowdown: float = 1.0, overhead: float = 0.03, storage: int = 100 * GB) -> Advice:
    told = Slowdown(slowdown, "made up")
    return advise("/some where", KNOWN, TIMINGS, told, 64 << 20, storage, overhead)


@pytest.mark.parametrize("slowdown", [1.0, 1.02, 1.4, 3.0])
@pytest.mark.parametrize("overhead", [0.005, 0.03, 0.5])
def test_the_options_are_the_tuners_choice_and_proxyd_takes_them(
    tmp_path: Path, slowdown: float, overhead: float
) -> None:
    said = advice(slowdown, overhead)
    options = [str(tmp_path) if option == said.directory else option for option in said.options]
    settings = settings_of(["--devices", "cpu:1", *options]).persist
    assert settings is not None and settings.directory == tmp_path
    assert settings.in_flight == said.choice.in_flight == 2
    assert 0 <= settings.every_s - said.choice.interval * KNOWN.step_s < 1
    assert "--persist '/some where' --persist-slots 3" in said.text()
    assert said.measured.write_time_s == {1: 4.0, 2: 6.0, 3: pytest.approx(9.6)}
    assert said.measured.storage_bytes_s == pytest.approx(GB * 2 / 1.5)
    assert said.choice.threads == 2 and said.measured.slowdown_while_persisting == slowdown


def test_the_storage_that_counts_is_what_proxyd_can_fill_with_snapshots() -> None:
    assert advice(storage=10 * GB).choice.in_flight == 1
    assert advice(storage=15 * GB).choice.in_flight == 2
    assert usable(10 * GB) == 8 * GB == advice(storage=10 * GB).limits.storage_bytes
    assert at_once(usable(10 * GB), 4 * GB) == 1 and at_once(1000 * GB, 4 * GB) == probe.MOST_AT_ONCE
    with pytest.raises(BadInput, match=r"need 10 GB of storage.*--storage"):
        at_once(usable(10 * GB) - 1, 4 * GB)


def test_what_proxyd_cannot_count_is_refused() -> None:
    slow = Known(4 * GB, "", 1e6, "")
    with pytest.raises(CannotTune, match="rarer than proxyd can count: allow a larger --overhead"):
        advise("/x", slow, TIMINGS, Slowdown(9.0, ""), 64 << 20, 100 * GB, 0.000001)


def test_the_command_prints_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    @contextmanager
    def opened(directory: Path, count: int, most: int) -> Any:
        asked.append((directory, count, most))
        yield SimpleNamespace(measure=lambda: TIMINGS)

    monkeypatch.setattr(probe, "opened", opened)
    arguments = ["tune", str(tmp_path), "--state", "4000000000", "--step", "0.5", "--storage", "100000000000"]
    done = CliRunner().invoke(snapshot_commands.app, [*arguments, "--json"], catch_exceptions=False)
    expected = advice()
    told = json.loads(done.stdout)
    assert asked == [(tmp_path, 512 << 20, 4)]
    assert told["options"][2:] == list(expected.options[2:])
    assert told["choice"] == json.loads(json.dumps(expected.as_json()["choice"]))
    assert told["limits"]["storage_bytes"] == 80 * GB


# ------------------------------------------------------------------ a running job
class FakeDaemon:
    """A job whose steps take `step_s` of a clock that only the watch moves; every rank holds 1000 bytes."""

    def __init__(self, step_s: float, ranks: int = 2) -> None:
        self.now_s, self.step_s, self.done, self.ranks = 0.0, step_s, 0.0, ranks
        self.job, self.state, self.live = "made-up", "running", 1000

    def look(self) -> Any:
        ranks = [
            SimpleNamespace(
                job=self.job, rank=rank, step=1 + int(self.done), live_bytes=self.live, state=self.state,
                persisted_step=0,
            )
            for rank in range(self.ranks)
        ]  # fmt: skip
        return SimpleNamespace(ranks=ranks, node=SimpleNamespace(devices=[SimpleNamespace(driver="cpu")]))

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.done += seconds / self.step_s

    def watch(self, look: Callable[[], Any], job: str) -> JobWatch:
        return JobWatch(look, job, lambda: self.now_s, self.sleep)

    def running(self, order: Order) -> Running:
        found = running(order, self.look, self.watch)
        assert found is not None
        return found


@pytest.mark.parametrize("seconds", [0.002, 0.1, 0.7, 4.0, 15.0])
def test_the_step_time_is_read_off_the_status_whatever_its_length(tmp_path: Path, seconds: float) -> None:
    daemon = FakeDaemon(seconds)
    found = daemon.running(Order(tmp_path))
    known = known_of(Order(tmp_path), found)
    assert known.step_s == pytest.approx(seconds, rel=0.02)
    assert known.state_bytes == 2000 and "2 ranks on this node; the sum of all" in known.state_from
    assert "median over ranks" in known.step_from


def test_what_the_user_says_of_the_training_comes_first(tmp_path: Path) -> None:
    order = Order(tmp_path, state_bytes=77)
    found = FakeDaemon(0.5).running(order)
    known = known_of(order, found)
    assert (known.state_bytes, known.state_from) == (77, "--state") and "job made-up" in known.step_from
    both = Order(tmp_path, state_bytes=77, step_s=3.0)
    assert running(both, FakeDaemon(0.5).look) is None  # nobody is asked
    assert known_of(both, None) == Known(77, "--state", 3.0, "--step")


def test_the_slowdown_is_the_step_time_while_writing_over_that_before(tmp_path: Path) -> None:
    daemon = FakeDaemon(0.5)
    found = daemon.running(Order(tmp_path))

    def while_writing(question: Callable[[], Any]) -> Any:
        daemon.step_s = 0.6
        return question()

    probing = cast(probe.Probe, SimpleNamespace(while_writing=while_writing))
    assert slowdown_of(Order(tmp_path), found, probing).factor == pytest.approx(1.2, rel=0.03)
    assert "--no-load" in slowdown_of(Order(tmp_path, load=False), found, probing).told
    assert slowdown_of(Order(tmp_path), None, probing).factor == 1
    daemon.ranks = 0  # it ends
    ended = slowdown_of(Order(tmp_path), found, probing)
    assert ended.factor == 1 and "ended or finished no step" in ended.told


def test_a_job_that_does_not_advance_or_holds_nothing_is_told_of(tmp_path: Path) -> None:
    daemon = FakeDaemon(1e9)
    with pytest.raises(BadInput, match=r"not every rank finished steps.*--step SECONDS"):
        known_of(Order(tmp_path), daemon.running(Order(tmp_path)))
    assert daemon.now_s < 61  # it gave up
    daemon.live = 0
    with pytest.raises(BadInput, match=r"holds nothing on its devices yet.*--state SIZE"):
        known_of(Order(tmp_path), daemon.running(Order(tmp_path)))


def test_several_jobs_must_be_told_apart() -> None:
    status = SimpleNamespace(ranks=[SimpleNamespace(job="b"), SimpleNamespace(job="a")])
    assert name_of_job(status, "b") == "b" and name_of_job(SimpleNamespace(ranks=[]), "") == ""
    with pytest.raises(BadInput, match="name one with --job: a, b"):
        name_of_job(status, "")
    with pytest.raises(BadInput, match="--job 'c' does not run: a, b do"):
        name_of_job(status, "c")


def sample(at_s: float, *steps: int, running: bool = True, live: int = 10) -> Sample:
    return Sample(at_s, {rank: RankSample(step, live, running) for rank, step in enumerate(steps)})


def test_a_recovery_amid_the_watch_does_not_count_as_slow_steps() -> None:
    before = [sample(float(second), 1 + second) for second in range(5)]
    amid = [sample(5.0 + second, 5, running=False) for second in range(20)]
    after = [sample(25.0 + second, 3 + 2 * second) for second in range(5)]
    whole = Pace.of([*before, *amid, *after])
    assert whole.step_s == pytest.approx(0.5) and whole.enough(4)
    assert Pace.of([*before, *after]).step_s == pytest.approx(0.5)  # it went back, which shows as well
    assert Pace.of(before).enough(4) and not Pace.of([*before, *amid]).enough(4)


def test_the_step_time_is_the_median_over_ranks_and_the_state_the_most_of_their_sum() -> None:
    samples = [sample(float(second), second, 2 * second, 3 * second, live=second) for second in range(9)]
    seen = Pace.of(samples)
    assert seen.step_s == pytest.approx(0.5)
    assert (seen.state_bytes, seen.world) == (24, 3)
    ended = Pace.of([*samples, Sample(99.0, {}), sample(100.0, 500, 500, 500)])
    assert ended.step_s == pytest.approx(0.5) and ended.enough(1000)  # what follows is not part of it
    assert Pace.of(samples[:2]).step_s is None and Pace().step_s is None and Pace().state_bytes == 0


def test_a_running_job_is_measured_before_and_while_snapshots_are_written(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    with Node(tmp_path, variables) as node:
        node.train(10**7, 10**7)
        node.await_step(10)
        socket = str(node.socket)
        done = tune(str(target), "--watch", "1", "--json", "--socket", socket)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        measured = told["measured"]
        assert "2 ranks on this node" in measured["state_from"] and measured["state_bytes"] > 0
        assert 0 < measured["step_s"] < 10 and measured["slowdown_while_persisting"] >= 1
        assert measured["slowdown_from"].startswith("measured, ")
        spared = tune(str(target), "--watch", "1", "--no-load", "--socket", socket)
        assert spared.returncode == 0 and "--no-load" in spared.stdout, spared.stderr
    assert list(target.iterdir()) == []
