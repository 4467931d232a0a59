"""Runs of a campaign: what broken ones show, how time is split, and a small one from beginning to end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from proxied import until
from start_ranks import free_port

from understudy.campaigns.planning import reading
from understudy.campaigns.planning.faults import Fault
from understudy.campaigns.programs import keepers, loop
from understudy.campaigns.programs.own_faults import OwnFaults, fired_marker
from understudy.campaigns.programs.plan import Plan, PlannedFault
from understudy.campaigns.results import comparing, splitting
from understudy.campaigns.results.records import PARTS, RESTART, Attempt, Recovery, Run
from understudy.campaigns.results.stamps import Recorder, Stamp, of_ranks
from understudy.campaigns.running.manifest import Manifest
from understudy.campaigns.running.own_processes import marked
from understudy.campaigns.running.runner import Runner, _seen
from understudy.campaigns.running.supervisor import End, Order, supervise
from understudy.data import ResumableSampler
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY

SMALL = """
name: small
seeds: [1]
global_batch: 16
steps: 12
checkpoint_every: 5
suites:
  - {name: steps, data: digits, model: mlp, schedule: {kind: steps, at: [8]}}
variants: [blocking, transparent]
undisturbed: [bare]
"""


# ------------------------------------------------------------------ broken variants
@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is the only rank."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "1"}
    for name, value in (place | {"RANK": "0", "LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def plan(folder: Path, **changed: Any) -> Plan:
    made = Plan("digits", "mlp", 6, 16, 1, "none", 2, 4, str(folder), str(folder / "store"), "cpu", 10.0)
    return replace(made, **changed)


def trained(folder: Path, **changed: Any) -> Path:
    folder.mkdir()
    made = plan(folder, **changed)
    made.write()
    loop.train(made, Recorder(folder, 0, 0), 0, 0)
    return folder


def test_a_run_that_is_as_it_should_be_passes(tmp_path: Path, alone: None) -> None:
    folder = trained(tmp_path / "run")
    assert comparing.samples_of(folder, None).exact
    course = splitting.of_restarts(of_ranks(folder), [], [], 0.0, time.monotonic(), {})
    assert (course.steps, course.redone) == (6, 0)


def test_a_sampler_that_repeats_one_window_is_caught(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = ResumableSampler._shares

    def repeats(self: Any, begun: Any, order: Any) -> Iterator[list[int]]:
        shares = list(honest(self, begun, order))
        shares[3] = shares[2]
        return iter(shares)

    monkeypatch.setattr(ResumableSampler, "_shares", repeats)
    found = comparing.samples_of(trained(tmp_path / "run"), None)
    assert not found.exact and "epoch 0, step 3" in found.sentence


def test_a_variant_that_skips_a_step_is_caught(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Skips(keepers.Keeper):
        def load(self) -> None:
            self.sampler.advance()

    monkeypatch.setitem(keepers.KEEPERS, "none", Skips)  # type: ignore[arg-type]
    found = comparing.samples_of(trained(tmp_path / "run"), None)
    assert not found.exact and "epoch 0, step 0" in found.sentence


def test_another_model_at_the_end_is_caught_and_how_far_away_it_is(tmp_path: Path, alone: None) -> None:
    reference = trained(tmp_path / "a--bare--1")
    other = trained(tmp_path / "b--bare--1", seed=2)
    found = comparing.compared(other, other / "store", of_ranks(other), reference, of_ranks(reference))
    assert not found.parameters_equal and not found.losses_equal
    assert found.loss_difference > 0 and all(distance > 0 for distance in found.distances.values())
    same = comparing.compared(
        reference, reference / "store", of_ranks(reference), reference, of_ranks(reference)
    )
    assert same.parameters_equal and same.losses_equal and same.loss_difference == 0


def test_a_fault_that_never_fired_is_not_said_to_have_fired(tmp_path: Path) -> None:
    fault = Fault(3, 0, "kill")
    assert not _seen(0, fault, tmp_path, {}, 0.0).fired
    drill = {"kind": "kill-server", "rank": 0, "step": 3, "call": 1}
    assert not _seen(0, fault, tmp_path, {"faults": [drill | {"fired": False}]}, 0.0).fired
    assert not _seen(0, fault, tmp_path, {"faults": [drill | {"fired": True, "step": 30}]}, 0.0).fired
    assert _seen(0, fault, tmp_path, {"faults": [drill | {"fired": True}]}, 0.0).fired
    fired_marker(tmp_path, 0).write_text("12.5\n")
    seen = _seen(0, fault, tmp_path, {}, 10.0)
    assert seen.fired and seen.at == 2.5


def test_a_fault_comes_once_whichever_attempt_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    struck: list[int] = []
    monkeypatch.setattr("os.kill", lambda process, number: struck.append(number))
    planned = ((2, 0, "KILL", 0.0), (3, 1, "KILL", 0.0), (4, 0, "ERROR", 0.5))
    made = plan(tmp_path, faults=tuple(PlannedFault(*one) for one in planned))
    for attempt in range(3):
        faults = OwnFaults(made, 0, Recorder(tmp_path, 0, attempt))
        for step in range(1, 6):
            faults.begin(step)
            faults.midway(0.4)
            if attempt == 0 and step == 4:
                with pytest.raises(RuntimeError, match="device-side assert"):
                    faults.midway(1.0)
            else:
                faults.midway(1.0)
    assert struck == [signal.SIGKILL]
    assert [stamp.note for stamp in of_ranks(tmp_path) if stamp.what == "fault"] == ["KILL", "ERROR"]


def test_storage_fails_once_and_is_late_once(tmp_path: Path) -> None:
    planned = ((2, 0, "STORAGE_ERROR", 0.0), (3, 0, "STORAGE_LATE", 0.0))
    made = plan(tmp_path, faults=tuple(PlannedFault(*one) for one in planned))
    faults, honest = OwnFaults(made, 0, Recorder(tmp_path, 0, 0), late=0.01), os.fsync
    (tmp_path / "store").mkdir()
    with (tmp_path / "store" / "file").open("wb") as file, (tmp_path / "log").open("wb") as log:
        faults.begin(2)
        os.fsync(log.fileno())
        with pytest.raises(OSError, match="Input/output error"):
            os.fsync(file.fileno())
        os.fsync(file.fileno())
        faults.begin(3)
        os.fsync(file.fileno())
    assert os.fsync is honest
    assert fired_marker(tmp_path, 0).exists() and fired_marker(tmp_path, 1).exists()


# ------------------------------------------------------------------ the supervisor
def order(folder: Path, *scripts: str, restarts: int = 5, limit: float = 60.0) -> Order:
    mark = f"{folder}-{random.randrange(10**9)}"
    return Order(
        lambda attempt: (["bash", "-c", scripts[min(attempt, len(scripts) - 1)]], 1),
        folder,
        mark,
        {},
        restarts,
        limit,
    )


def test_the_supervisor_starts_again_until_the_target_is_reached(tmp_path: Path) -> None:
    ended = supervise(order(tmp_path, "exit 3", "kill -9 $$", "echo done"))
    assert ended.end is End.COMPLETED
    assert [one.status for one in ended.attempts] == [3, -signal.SIGKILL, 0]
    written = json.loads((tmp_path / "supervisor.json").read_text())
    assert written["restarts"] == 2 and written["end"] == "completed"
    assert (tmp_path / "output").read_text() == "done\n"


def test_the_supervisor_ends_at_its_limit_of_restarts_and_of_time(tmp_path: Path) -> None:
    ended = supervise(order(tmp_path, "exit 3", restarts=2))
    assert ended.end is End.FAILED and len(ended.attempts) == 3
    late = order(tmp_path, "sleep 600 & sleep 600", limit=0.5)
    assert supervise(late).end is End.OVERDUE
    assert not list(marked(late.mark))


def test_a_process_that_is_left_behind_is_named_and_killed(tmp_path: Path) -> None:
    leaves = replace(order(tmp_path, "setsid sleep 600 & echo done"), settled=0.2)
    ended = supervise(leaves)
    assert ended.end is End.COMPLETED
    assert len(ended.left_behind) == 1 and "sleep 600" in ended.left_behind[0]
    assert not list(marked(leaves.mark))


# ------------------------------------------------------------------ where time went
def test_the_seconds_of_a_restart_are_split_and_none_is_lost() -> None:
    """Two attempts: a checkpoint behind step 2, killed in step 4, begun again at step 3."""
    stamps = [Stamp("began", 101.0, 101.0, 0, 0)]
    at = 105.0
    for step in (1, 2, 3):
        stamps.append(Stamp("step", at, at + 1.0, 0, 0, step))
        kept = 0.5 if step == 2 else 0.0
        stamps.append(Stamp("kept", at + 1.0, at + 1.0 + kept, 0, 0))
        at += 1.0 + kept
    stamps += [
        Stamp("fault", at + 0.25, at + 0.25, 1, 0, 4, "KILL"),
        Stamp("began", at + 3.0, at + 3.0, 0, 1),
        Stamp("imports", at + 3.0, at + 5.0, 0, 1),
        Stamp("group", at + 5.0, at + 5.5, 0, 1),
        Stamp("model", at + 5.5, at + 6.0, 0, 1),
        Stamp("chosen", at + 6.0, at + 6.0, 0, 1),
        Stamp("loaded", at + 6.0, at + 6.25, 0, 1),
    ]
    fault, at = at, at + 6.5  # a quarter of a second that nothing explains
    for step in (3, 4, 5):
        stamps += [Stamp("step", at, at + 1.0, 0, 1, step), Stamp("kept", at + 1.0, at + 1.0, 0, 1)]
        at += 1.0
    attempts = [
        Attempt(ranks=2, began=0.0, ended=fault + 2.0 - 100.0, status=1),
        Attempt(ranks=2, began=fault + 2.0 - 100.0, ended=at + 1.0 - 100.0, status=0),
    ]
    course = splitting.of_restarts(
        stamps, [], attempts, 100.0, at + 1.0 - 100.0, {"snapshot": 0.1, "write": 0.3}
    )
    expected = {
        "compute": 5.0, "snapshot": 0.1, "write": 0.3, "sync": 0.1, "detect": 1.75, "restart": 3.5,
        "copy": 0.25, "communicators": 0.5, "replay": 0.0, "redone": 1.25,
    }  # fmt: skip
    assert set(expected) == set(PARTS)
    assert {name: pytest.approx(value, abs=1e-9) for name, value in course.parts.items()} == expected
    assert course.unaccounted == pytest.approx(0.25)
    assert (course.starting, course.ending) == (pytest.approx(5.0), pytest.approx(1.0))
    assert (course.steps, course.redone) == (5, 1)
    (recovery,) = course.recoveries
    assert (recovery.fault, recovery.rank) == ("KILL", 1)
    total = course.starting + course.ending + sum(course.parts.values()) + course.unaccounted
    assert total == pytest.approx(at + 1.0 - 100.0)


def test_a_wait_for_peers_inside_of_a_start_is_counted_once() -> None:
    """As torchft's: the first quorum is waited for while its state is given back."""
    stamps = [
        Stamp("step", 10.0, 11.0, 0, 0, 1),
        Stamp("fault", 11.0, 11.0, 0, 0, 2, "KILL"),
        Stamp("began", 12.0, 12.0, 0, 1),
        Stamp("imports", 12.0, 13.0, 0, 1),
        Stamp("model", 13.0, 14.0, 0, 1),
        Stamp("quorum", 14.0, 16.0, 0, 1),
        Stamp("loaded", 14.0, 16.0, 0, 1),
        Stamp("uncommitted", 14.0, 16.5, 0, 1, 2),
        Stamp("step", 16.5, 17.0, 0, 1, 2),
    ]
    course = splitting.of_restarts(stamps, [], [], 0.0, 17.0, {})
    assert course.parts["compute"] == pytest.approx(1.5)
    assert course.parts["restart"] == pytest.approx(3.0)
    assert course.parts["detect"] == pytest.approx(2.5) and course.parts["copy"] == 0
    assert course.unaccounted == pytest.approx(0.0)


def test_recoveries_of_one_round_are_taken_out_of_their_step_once() -> None:
    stamps = [Stamp("step", float(n), n + 1.0 + (2.5 if n == 5 else 0.0), 0, 0, n + 1) for n in range(6)]
    entry: dict[str, Any] = {
        "fault": "server-died",
        "plan": "restart-copy-replay",
        "generation": 1,
        "at_ms": 0,
    }
    entry |= {"detect_s": 0.5, "restart_s": 0.5, "copy_s": 0.5, "communicators_s": 0.25, "replay_s": 0.25}
    both = [entry | {"rank": 0, "total_s": 2.0}, entry | {"rank": 1, "total_s": 1.0}]
    course = splitting.of_proxy(stamps, {"recoveries": both}, 0.0, 10.0)
    assert course.parts["compute"] == pytest.approx(6.0)
    assert course.parts["detect"] == 0.5 and course.parts["replay"] == 0.25
    assert course.unaccounted == pytest.approx(0.5)
    assert len(course.recoveries) == 2 and course.redone == 0


def test_restarts_are_counted_whoever_starts_the_ranks_again() -> None:
    """torchrun starts them again inside of one attempt of the supervisor's."""
    restart = Recovery(fault="KILL", rank=0, plan=RESTART, total=5.0, parts={})
    proxied = restart.model_copy(update={"plan": "restart-copy-replay"})
    attempt = Attempt(ranks=2, began=0.0, ended=9.0, status=0)
    run = Run(
        suite="s", training="t", data="d", model="m", schedule="steps", variant="jit", seed=1, disturbed=True,
        status="done", target=6, attempts=(attempt,), recoveries=(restart, restart, proxied),
    )  # fmt: skip
    assert run.restarts == 2
    assert run.model_copy(update={"recoveries": (), "attempts": (attempt,) * 3}).restarts == 2


# ------------------------------------------------------------------ from beginning to end
HANGS = """
name: hangs
seeds: [1]
ranks: 1
global_batch: 16
steps: 12
checkpoint_every: 5
suites:
  - {name: mine, command: "bash -c 'sleep 600' {steps} {losses}", schedule: {kind: none}}
variants: [bare]
undisturbed: [bare]
"""


def test_a_campaign_that_is_ended_takes_with_it_what_it_has_started(tmp_path: Path) -> None:
    file, place = tmp_path / "hangs.yaml", tmp_path / "runs"
    file.write_text(HANGS)
    words = [*module_command("recovery.recoveryctl"), "campaign", "run", str(file), "--out", str(place)]
    runner = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        until(lambda: list(marked(str(place.resolve()))), "the command", 60)
        runner.terminate()
        assert runner.wait(60) == 128 + signal.SIGTERM
    finally:
        runner.kill()
    assert not list(marked(str(place.resolve()))) and not list(SHARED_MEMORY.glob("us-*"))


@pytest.mark.drawn(8)
def test_a_small_campaign_is_killed_goes_on_and_says_what_it_was(tmp_path: Path) -> None:
    """The runner is killed amid its second run; the same command goes on, and redoes that run alone."""
    file, place = tmp_path / "small.yaml", tmp_path / "runs"
    file.write_text(SMALL)
    words = [*module_command("recovery.recoveryctl"), "campaign", "run", str(file), "--out", str(place)]
    runner = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    first = place / "runs" / "digits-mlp-undisturbed--bare--1" / "run.json"
    begun = place / "runs" / "steps--blocking--1", place / "runs" / "steps--transparent--1"
    try:
        until(lambda: first.exists() and any((one / "output").exists() for one in begun), "a second run", 120)
    finally:
        runner.kill()
        runner.wait()
    before = first.stat().st_mtime_ns
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"a gate is failed: {done.stdout}{done.stderr}"
    assert first.stat().st_mtime_ns == before
    assert not list(marked(str(place.resolve())))
    assert not list(SHARED_MEMORY.glob("us-*"))
    with Manifest.of(place, reading.of_file(file)) as manifest:
        records = {record.variant: record for record in Runner(manifest).work()}
    for record in records.values():
        assert record.status == "done" and record.steps == 12, record
        assert record.samples is not None and record.samples.exact and not record.left_behind
        assert all(fault.fired for fault in record.faults)
        if record.comparison is not None:
            assert record.comparison.parameters_equal and record.comparison.losses_equal
    assert len(records["blocking"].attempts) == 2 and records["blocking"].redone == 2
    assert len(records["transparent"].attempts) == 1 and len(records["transparent"].recoveries) == 1
    assert (place / "report.html").exists() and (place / "report.json").exists()
