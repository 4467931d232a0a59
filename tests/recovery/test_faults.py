"""Every fault of the table, ordered at exact records of two ranks: what is noticed, done and computed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import test_proxyd_recovery
from places import ROOT
from test_proxyd_recovery import LAUNCH, expected, proxyrun

from understudy.recovery.base.errors import BadInput, ExitStatus
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.drills.fault_table import BY_NAME, BY_NUMBER, FAULTS, as_markdown
from understudy.recovery.drills.spec import parse_drill
from understudy.recovery.planning.progress import SECOND, SHORTEST_NS, TIMES

pytestmark = pytest.mark.drawn(6)

variables = test_proxyd_recovery.variables  # the fixture

RANK = test_proxyd_recovery.__file__
NOTICED_WITHIN_S = 1.0
"""max(1 s, 5 x step time), and steps here take milliseconds."""
ANYHOW_WITHIN_S = 30.0
"""However busy the machine is: a tenth of --hang-timeout."""


# ------------------------------------------------------------------ the table
@pytest.mark.drawn(1)
def test_numbers_and_names_of_faults_are_those_of_the_log() -> None:
    text = (ROOT / "replay/csrc/log/log_format.h").read_text()
    listed = re.search(r"enum class DrillKind : uint32_t \{(.*?)\}", text, re.DOTALL)
    assert listed is not None
    kinds = dict(re.findall(r"k(\w+) = (\d+)", listed[1]))
    named = {re.sub(r"(?<!^)([A-Z])", r"-\1", name).lower(): int(number) for name, number in kinds.items()}
    assert named.pop("none") == 0
    assert named == {fault.name: fault.number for fault in FAULTS}
    assert len(BY_NAME) == len(BY_NUMBER) == len(FAULTS)


@pytest.mark.drawn(1)
def test_the_documented_list_of_faults_is_the_table() -> None:
    assert as_markdown() in (ROOT / "docs/faults.md").read_text()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_can_be_scheduled(fault: Any) -> None:
    assert parse_drill(f"{fault.name} rank=1 step=2 call=3").kind == fault.name


@pytest.mark.drawn(1)
def test_an_unknown_fault_is_refused_with_the_list_of_valid_ones() -> None:
    with pytest.raises(BadInput) as refused:
        parse_drill("earthquake rank=0 step=1 call=1")
    assert all(name in str(refused.value) for name in BY_NAME)


# ------------------------------------------------------------------ what follows a fault
def drilled(
    variables: dict[str, str],
    folder: Path,
    drills: list[str],
    *options: str,
    steps: int,
) -> dict[str, Any]:
    """Two ranks with these drills; the values they print must be right.  Answers the report."""
    flags = [word for drill in drills for word in ("--drill", drill)]
    devices = () if "--devices" in options else ("--devices", "cpu:2")
    done, report = proxyrun(variables, folder, *devices, *options, *flags, steps=steps)
    assert done.returncode == 0, done.stderr[-2000:]
    values = [part.split("\n")[:-1] for part in done.stdout.split("\0")]
    assert values == [expected(rank, 2, steps) for rank in (0, 1)]
    assert all(fault["fired"] for fault in report["faults"])
    assert report["replies_different"] == 0
    for recovery in report["recoveries"]:
        assert recovery["recovered"] and recovery["evidence"] and recovery["verified"]
    return report


def at_each_call(kind: str) -> list[str]:
    """At seven calls of a minibatch, each in another one, on both ranks in turn."""
    return [f"{kind} rank={call % 2} step={1 + 4 * call} call={call}" for call in range(1, 8)]


PLANS = {
    "stop-server": ("server-stopped", "restart-copy-replay", ""),
    "call-error": ("call-failed", "rewind-in-place", ""),
    "sticky-error": ("call-failed", "restart-copy-replay", "tried before: rewind-in-place"),
    "driver-suspect": ("driver-suspect", "stash-restart-restore", "is suspect"),
    "collective-hang": ("collective-hung", "rewind-in-place", "a collective hung"),
    "network-partition": ("collective-failed", "rewind-in-place", "a collective failed"),
}


@pytest.mark.parametrize("kind", PLANS)
def test_a_fault_at_any_call_changes_no_value(kind: str, variables: dict[str, str], tmp_path: Path) -> None:
    report = drilled(variables, tmp_path, at_each_call(kind), steps=34)
    fault, plan, reason = PLANS[kind]
    assert {recovery["fault"] for recovery in report["recoveries"]} == {fault}
    assert {recovery["plan"] for recovery in report["recoveries"]} == {plan}
    found = [recovery["step"] for recovery in report["recoveries"]]
    if (
        kind == "network-partition"
    ):  # before it heals, new connections may break as well, in the next step too
        found = sorted({step - (step - 1) % 4 for step in found})
    assert found == [1 + 4 * call for call in range(1, 8)]
    assert all(reason in recovery["reason"] for recovery in report["recoveries"])
    for recovery in report["recoveries"]:
        print(f"{kind} noticed after {recovery['detect_s']:.3f} s: {recovery['evidence']}")
    assert all(in_time(recovery) for recovery in report["recoveries"])


def in_time(recovery: dict[str, Any]) -> bool:
    """A collective is given time in view of those before it, and only time in which nothing moves counts."""
    evidence = re.search(
        r"nothing has moved for ([0-9.]+) s; the longest before took ([0-9.]+) s", recovery["evidence"]
    )
    if evidence is None:
        return bool(recovery["detect_s"] <= NOTICED_WITHIN_S)
    quiet_s, longest_s = map(float, evidence.groups())
    patience_s = max(SHORTEST_NS / SECOND, TIMES * (longest_s + 0.01))
    return quiet_s <= patience_s + NOTICED_WITHIN_S and recovery["detect_s"] < ANYHOW_WITHIN_S


def test_a_call_that_fails_again_on_a_healthy_server_raises_its_own_error(
    variables: dict[str, str], tmp_path: Path
) -> None:
    # It fails as often as it is tried: the third time counts of which proxyd has heard.  Of some it may hear
    # from the other rank alone, whose collective that breaks off.
    drills = ["--drill", "call-error rank=1 step=7 call=5"] * 12
    done, report = proxyrun(variables, tmp_path, "--devices", "cpu:2", *drills)
    assert done.returncode != 0
    recovery = report["recoveries"][-1]
    assert (recovery["fault"], recovery["plan"]) == ("call-failed", "give-up")
    tried = recovery["reason"].partition("tried before: ")[2].split(", ")
    assert list(dict.fromkeys(tried))[:2] == ["rewind-in-place", "restart-copy-replay"]
    assert "RemoteError: a driver error, injected by a drill [device call collective, record" in done.stderr


def test_a_device_that_is_gone_is_left_for_a_spare_one(variables: dict[str, str], tmp_path: Path) -> None:
    drills = ["device-gone rank=1 step=4 call=5", "device-gone rank=0 step=8 call=2"]
    report = drilled(variables, tmp_path, drills, "--devices", "cpu:4", steps=12)
    assert [(r["rank"], r["fault"], r["plan"]) for r in report["recoveries"]] == [
        (1, "device-gone", "restart-copy-replay"), (0, "device-gone", "restart-copy-replay")
    ]  # fmt: skip
    assert {rank["rank"]: rank["device"] for rank in report["ranks"]} == {1: "cpu:2", 0: "cpu:3"}


def test_a_device_that_is_gone_ends_the_job_where_no_other_is_free(
    variables: dict[str, str], tmp_path: Path
) -> None:
    done, report = proxyrun(
        variables, tmp_path, "--devices", "cpu:2", "--drill", "device-gone rank=1 step=4 call=5"
    )
    assert done.returncode != 0
    assert report["recoveries"][0]["plan"] == "give-up"
    assert "the device of rank 1 is gone" in done.stderr
    assert "no other is free: start proxyd with more --devices than ranks" in done.stderr


def test_what_is_no_fault_starts_no_recovery(variables: dict[str, str], tmp_path: Path) -> None:
    drills = [
        "slow-rank rank=1 step=4 call=2", "kill-spare rank=0 step=6 call=3", "bit-flip rank=1 step=9 call=1"
    ]  # fmt: skip
    report = drilled(variables, tmp_path, drills, steps=12)
    noticed = [one["fault"] for one in report["recoveries"]]
    assert noticed in ([], ["silent-corruption"])  # whether digests are compared before the end is chance


def test_all_servers_killed_at_once_are_rebuilt_while_the_log_is_whole(
    variables: dict[str, str], tmp_path: Path
) -> None:
    report = drilled(variables, tmp_path, ["kill-all-servers rank=0 step=2 call=3"], steps=6)
    assert sorted(recovery["rank"] for recovery in report["recoveries"]) == [0, 1]


@pytest.mark.long
def test_a_partition_that_never_heals_ends_the_job_with_a_sentence(
    variables: dict[str, str], tmp_path: Path
) -> None:
    done, report = proxyrun(
        variables, tmp_path, "--devices", "cpu:2", "--drill", "lasting-partition rank=1 step=4 call=5"
    )
    assert done.returncode != 0
    (recovery,) = report["recoveries"]
    assert recovery["plan"] == "give-up" and not recovery["recovered"]
    assert "could not rebuild its communicators" in done.stderr
    assert "no route" in done.stderr


def test_a_killed_worker_ends_its_rank(variables: dict[str, str], tmp_path: Path) -> None:
    done, report = proxyrun(
        variables, tmp_path, "--devices", "cpu:2", "--drill", "kill-worker rank=1 step=4 call=2"
    )
    assert done.returncode != 0
    assert [fault["fired"] for fault in report["faults"]] == [True]


def test_a_killed_proxyd_is_started_again_and_adopts_its_job(
    variables: dict[str, str], tmp_path: Path
) -> None:
    report = drilled(variables, tmp_path, ["kill-proxyd rank=0 step=4 call=2"], steps=1500)
    (adoption,) = report["adoptions"]
    assert adoption["ranks"] == 2 and adoption["servers_lost"] == 0 and not adoption["recovery_redone"]
    assert 0 < adoption["away_s"] < 60
    assert report["recoveries"] == []


def test_a_drill_for_a_rank_that_there_is_not_is_refused_with_the_ranks_there_are(
    variables: dict[str, str],
    tmp_path: Path,
) -> None:
    done, _ = proxyrun(
        variables, tmp_path, "--devices", "cpu:2", "--drill", "stop-server rank=5 step=1 call=1"
    )
    assert done.returncode != 0
    assert "names a rank that there is not: this job has ranks 0 to 1" in done.stderr


# ------------------------------------------------------------------ ordered online
@contextmanager
def paused_job(variables: dict[str, str], folder: Path) -> Iterator[tuple[Path, subprocess.Popen[str], Path]]:
    """Two ranks that stand still in the middle until a file goes: (proxyd's socket, the run, that file)."""
    socket, pause = folder / "proxyd.sock", folder / "pause"
    pause.touch()
    ours, theirs = os.pipe()
    daemon = subprocess.Popen(
        [*module_command("recovery.proxyd"), "--devices", "cpu:2", "--socket", str(socket),
         "--ready-fd", str(theirs),
         "--log-level", "error"],
        env=variables, pass_fds=[theirs],
    )  # fmt: skip
    os.close(theirs)
    with open(ours) as ready:
        assert json.loads(ready.readline())["ready"]
    run = subprocess.Popen(
        [*module_command("recovery.proxyrun"), "--socket", str(socket),
         sys.executable, "-c", LAUNCH, RANK, "2", "12"],
        env=variables | {"PAUSE_AT": "4", "PAUSE_FILE": str(pause)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        while not all((folder / f"pause.{rank}").exists() for rank in (0, 1)):
            assert run.poll() is None
            time.sleep(0.01)  # waits for a file, which has no event here
        yield socket, run, pause
    finally:
        run.terminate()
        run.communicate(timeout=60)
        daemon.terminate()
        daemon.wait(60)


def recoveryctl(socket: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*module_command("recovery.recoveryctl"), *arguments, "--socket", str(socket)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_faults_ordered_online_are_carried_out_and_accounted_for(
    variables: dict[str, str], tmp_path: Path
) -> None:
    with paused_job(variables, tmp_path) as (socket, run, pause):
        refusals = {
            ("kill-server", "--rank", "7"): "has no running rank 7; running: 0, 1",
            (
                "call-error",
                "--rank",
                "1",
                "--step",
                "2",
                "--call",
                "1",
            ): "name a step from 6 on, or none for now",
            ("earthquake", "--rank", "1"): "unknown drill 'earthquake' (there are: kill-server, stop-server",
            ("stop-server",): "stop-server needs --rank",
        }
        for order, sentence in refusals.items():
            refused = recoveryctl(socket, "drill", *order)
            assert refused.returncode in (ExitStatus.USAGE, ExitStatus.REFUSED)
            assert sentence in " ".join(refused.stderr.split())
        killed = recoveryctl(socket, "drill", "kill-server", "--rank", "1")
        assert killed.returncode == 0, killed.stderr
        for part in ("restart-copy-replay in", "noticed: its process ended", "why: ", "verified: every rank"):
            assert part in killed.stdout
        spare = recoveryctl(socket, "drill", "kill-spare")
        assert "spare" in spare.stdout, spare.stderr
        pause.unlink()
        output, _ = run.communicate(timeout=60)
        assert run.returncode == 0
        assert [part.split("\n")[:-1] for part in output.split("\0")] == [expected(r, 2, 12) for r in (0, 1)]


@pytest.mark.drawn(1)
def test_every_fault_is_listed_by_the_command_line() -> None:
    listed = subprocess.run(
        [*module_command("recovery.recoveryctl"), "drill", "--list"],
        capture_output=True, text=True, timeout=60, check=True, env=os.environ | {"COLUMNS": "200"},
    )  # fmt: skip
    assert all(f" {fault.name} " in listed.stdout for fault in FAULTS)
