"""What the command lines accept, and the one sentence they answer a mistake with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.config.proxyd_settings import settings_of
from understudy.recovery.config.proxyrun_options import parse
from understudy.recovery.config.settings import BadInput, parse_bytes, parse_devices
from understudy.recovery.drills.spec import Drill, parse_drill
from understudy.recovery.run.conclusion import conclude
from understudy.recovery.run.launch import ranks_wanted


def run(module: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*module_command(f"recovery.{module}"), *arguments],
        env=os.environ | variables, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def assert_one_sentence(done: subprocess.CompletedProcess[str], *words: str, status: int = 2) -> None:
    assert done.returncode == status
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


# ------------------------------------------------------------------ drills
def test_drill_is_read_in_any_order() -> None:
    expected = Drill("kill-server", rank=1, step=30, call=120)
    assert parse_drill("kill-server rank=1 step=30 call=120") == expected
    assert parse_drill("  kill-server call=120  step=30 rank=1 ") == expected
    assert parse_drill(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no fault is named"),
        ("melt rank=1 step=1 call=1", "unknown drill 'melt'"),
        ("kill-server step=1 call=1", "does not say which rank"),
        ("kill-server rank=1 call=1", "does not say which step"),
        ("kill-server rank=1 step=0 call=1", "step counts from 1"),
        ("kill-server rank=1 step=1 call=0", "call counts from 1"),
        ("kill-server rank=-1 step=1 call=1", "rank must be a whole number"),
        ("kill-server rank=one step=1 call=1", "rank must be a whole number"),
        ("kill-server rank=1 rank=2 step=1 call=1", "names rank twice"),
        ("kill-server rank=1 step=1 call=1 now", "'now' is not rank=, step= or call="),
        ("kill-server rank=1 step=1 call=99999999999", "too large"),
    ],
)
def test_bad_drill_is_refused_with_the_reason(text: str, complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        parse_drill(text)


# ------------------------------------------------------------------ proxyd
def test_device_specs_are_kind_and_count() -> None:
    assert parse_devices("cpu:2").names == ["cpu:0", "cpu:1"]
    assert parse_devices("cuda:1").names == ["cuda:0"]


@pytest.mark.parametrize(
    "text", ["", "cpu", "cpu:", "cpu:x", "tpu:2", "cpu:0", "cpu:-1", "cpu:0,cpu:1", "cpu:99999"]
)
def test_bad_device_spec_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="device spec"):
        parse_devices(text)


def test_sizes_have_units() -> None:
    assert parse_bytes("4GiB", "--log-cap") == 4 << 30
    assert parse_bytes("512M", "--log-cap") == 512 << 20
    assert parse_bytes("1024", "--log-cap") == 1024
    with pytest.raises(BadInput, match="--log-cap 'much' is not a size"):
        parse_bytes("much", "--log-cap")


def test_areas_of_a_gpus_rank_may_take_its_share_of_the_shared_memory() -> None:
    whole = shutil.disk_usage("/dev/shm").total
    for devices, expected in (("cpu:1", 8 << 30), ("cuda:1", max(8 << 30, whole)), ("cuda:64", 8 << 30)):
        found = settings_of(["--devices", devices])
        assert (found.shadow_bytes, found.snapshot_bytes) == (expected, expected)
    given = settings_of(["--devices", "cuda:1", "--shadow-limit", "1GiB", "--snapshot-limit", "2GiB"])
    assert (given.shadow_bytes, given.snapshot_bytes) == (1 << 30, 2 << 30)


def test_optimizer_preimages_are_kept_unless_they_are_switched_off() -> None:
    assert settings_of(["--devices", "cuda:1"]).keeps_optimizer_preimages
    assert not settings_of(["--devices", "cpu:1", "--optimizer-preimages", "off"]).keeps_optimizer_preimages


def test_snapshots_that_are_to_be_on_storage_only_need_a_storage(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--persist-only is of no use without --persist"):
        settings_of(["--devices", "cpu:1", "--persist-only"])
    given = settings_of(["--devices", "cpu:1", "--persist-only", "--persist", str(tmp_path)]).persist
    assert given is not None and not given.stays_in_memory


def test_unknown_device_spec_ends_proxyd_with_one_sentence(tmp_path: Path) -> None:
    done = run("proxyd", "--devices", "quantum:2", "--socket", str(tmp_path / "s"))
    assert_one_sentence(done, "unknown device spec 'quantum:2'", "cpu:2")


def test_proxyd_without_devices_says_so_in_one_sentence() -> None:
    assert_one_sentence(run("proxyd"), "--devices")


# ------------------------------------------------------------------ proxyrun
def test_flags_behind_the_command_belong_to_the_command() -> None:
    order = parse(
        ["--drill", "kill-server rank=0 step=1 call=1", "torchrun", "--nproc-per-node", "2", "--report", "x"]
    )
    assert order.command == ["torchrun", "--nproc-per-node", "2", "--report", "x"]
    assert order.report is None
    assert len(order.drills) == 1


def test_command_may_follow_two_dashes() -> None:
    assert parse(["--", "python", "--version"]).command == ["python", "--version"]


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("torchrun --nproc-per-node 4 train.py", 4),
        ("torchrun --nproc_per_node=3 train.py", 3),
        ("accelerate launch --num_processes 2 train.py", 2),
        ("torchrun --nproc-per-node gpu train.py", 1),
        ("torchrun --nproc-per-node", 1),
        ("python train.py", 1),
    ],
)
def test_number_of_ranks_is_read_from_the_command(command: str, ranks: int) -> None:
    assert ranks_wanted(command.split()) == ranks


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["no command"]),
        (["--drill", "kill-server rank=1", "python"], ["does not say which step"]),
        (["--devices", "abacus:1", "python"], ["unknown device spec 'abacus:1'"]),
        (["--report", "/nowhere/at/all/r.json", "python"], ["cannot write the report"]),
        (["--no-such-flag", "python"], ["--no-such-flag"]),
    ],
)
def test_bad_input_ends_proxyrun_with_one_sentence(
    arguments: list[str], words: list[str], tmp_path: Path
) -> None:
    assert_one_sentence(run("proxyrun", *arguments, UNDERSTUDY_SOCKET=str(tmp_path / "none.sock")), *words)


# ------------------------------------------------------------------ recoveryctl
@pytest.mark.parametrize(
    "arguments", [["status"], ["log", "dump", "0"], ["drill", "kill-server", "--rank", "0"]]
)
def test_recoveryctl_without_a_proxyd_says_so_in_one_sentence(arguments: list[str], tmp_path: Path) -> None:
    socket = str(tmp_path / "none.sock")
    assert_one_sentence(
        run("recoveryctl", *arguments, UNDERSTUDY_SOCKET=socket), "no proxyd answers at", socket, status=3
    )


def test_what_goes_into_a_pipe_is_not_cut_at_a_terminals_width() -> None:
    code = "from rich.table import Table; from understudy.recovery.text.tables import make_console; "
    code += "make_console().print(Table('x' * 150))"
    for variables, whole in (({}, True), ({"COLUMNS": "80"}, False)):
        environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | variables
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert ("x" * 150 in done.stdout) is whole


def test_nothing_of_recovery_imports_torch() -> None:
    code = (
        "import sys; from understudy.recovery import proxyd, proxyrun, recoveryctl; "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.lower()) is False


# ------------------------------------------------------------------ how a run ends
NEVER_FIRED = pb.FaultOutcome(drill=Drill("kill-server", rank=0, step=9, call=1).message())
DIFFERENT = "1 replayed value differs from what the program was given before"


@pytest.mark.parametrize(
    ("report", "status", "ends"),
    [
        (pb.JobReport(), 0, 0),
        (pb.JobReport(), 7, 7),
        (pb.JobReport(error="no report"), 0, 4),
        (pb.JobReport(faults=[NEVER_FIRED]), 0, 4),
        (pb.JobReport(replies_different=1), 0, 1),
        (pb.JobReport(replies_different=1, faults=[NEVER_FIRED], error="no report"), 0, 1),
        (pb.JobReport(replies_different=1), 7, 7),
        (pb.JobReport(replies_different=1), 128 + 9, 128 + 9),
    ],
)
def test_a_run_whose_replayed_values_differed_never_ends_in_silence(
    report: Any, status: int, ends: int
) -> None:
    lines, found = conclude(report, [], status, whole=True)
    assert found == ends
    if report.replies_different:
        assert lines[-1].startswith(DIFFERENT)
        assert lines[-1].endswith("(exit status 1)") == (ends == 1)
    else:
        assert not any("replayed" in line for line in lines)


def test_the_reason_why_a_rank_was_refused_is_said_last() -> None:
    report = pb.JobReport(error="the run ended", refused=["all 2 devices are leased"])
    assert conclude(report, [], 1, whole=True)[0][-1] == "all 2 devices are leased"
    assert conclude(pb.JobReport(refused=["tried again later"], records=3), [], 0, whole=True)[0] == []


def test_a_run_that_used_no_device_is_told_that_nothing_was_protected() -> None:
    said = "no rank used a device: nothing was protected"
    assert conclude(pb.JobReport(), [], 0, whole=True) == ([said], 0)
    silent = [
        conclude(pb.JobReport(), [], 1, whole=True),
        conclude(pb.JobReport(), [], 0, whole=False),
        conclude(pb.JobReport(records=1), [], 0, whole=True),
    ]
    assert [sentences for sentences, _ in silent] == [[], [], []]
