"""Scripts, workers and daemons that end badly: a clear sentence, the right status, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import proxied
import pytest
from proxied import WORKLOADS, python, run, torchrun, until
from running_proxyd import running_proxyd
from training_run import installed
from zygotes import STANDS_FOR_A_FORK

from understudy.recovery.base.own_modules import name_of
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY
from understudy.recovery.run.embedded import MOST_RESTARTS

pytestmark = pytest.mark.drawn(8)

TINY = WORKLOADS / "tiny.py"


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert proxied.left_behind() == []


def test_a_script_that_raises_in_mid_minibatch_keeps_its_own_error_and_status(tmp_path: Path) -> None:
    ended = run(python(TINY, "--fail", "raise"), folder=tmp_path)
    assert ended.status == 1
    assert "ValueError: the script gives up" in ended.output


def test_a_script_that_exits_in_mid_minibatch_keeps_its_status(tmp_path: Path) -> None:
    assert run(python(TINY, "--fail", "exit"), folder=tmp_path).status == 7


def test_a_killed_worker_ends_the_run_with_its_signal(tmp_path: Path) -> None:
    assert run(python(TINY, "--fail", "killed"), folder=tmp_path).status == 128 + signal.SIGKILL


def test_an_asynchronous_error_of_the_program_is_raised_with_the_operators_name(tmp_path: Path) -> None:
    ended = run(python(TINY, "--fail", "index"), folder=tmp_path)
    assert ended.status == 1
    assert "index out of range" in ended.output
    assert "embedding" in ended.output


def test_an_error_of_one_ranks_program_starts_no_recovery_and_hangs_nobody(tmp_path: Path) -> None:
    begin = time.monotonic()
    ended = run(torchrun(2, WORKLOADS / "one_raises.py"), folder=tmp_path)
    assert ended.status != 0
    assert "IndexError: index out of range" in ended.output
    assert "device call aten::index_select" in ended.output, "what an embedding calls"
    assert ended.report["recoveries"] == [], "nothing broke that could have been recovered"
    assert "given up" not in ended.output
    assert "rank 0 step 1" in ended.output and "step 2" not in ended.output
    assert time.monotonic() - begin < 100, "far below every timeout of a collective"


def test_an_operator_the_driver_cannot_run_is_named(tmp_path: Path) -> None:
    ended = run(python(TINY, "--fail", "operator"), folder=tmp_path)
    assert ended.status == 1
    assert "NotImplementedError" in ended.output and "aten::_cslt_compress" in ended.output


def test_one_rank_whose_log_still_begins_at_the_beginning_is_replayed_from_there(tmp_path: Path) -> None:
    undisturbed = run(python(TINY), folder=tmp_path)
    ended = run(python(TINY), folder=tmp_path, options=("--drill", "kill-server rank=0 step=3 call=4"))
    assert ended.status == 0
    steps = [line for line in ended.output.splitlines() if line.startswith("step")]
    assert steps == [line for line in undisturbed.output.splitlines() if line.startswith("step")]
    assert ended.report["recoveries"][0]["recovered"]


def test_one_rank_without_replica_or_snapshot_gets_an_error_that_says_so_when_its_server_dies(
    tmp_path: Path,
) -> None:
    ended = run(
        python(TINY, "--steps", "30", "--payload", "500000"),  # 2 MB a step: the log's start is released
        folder=tmp_path,
        options=("--snapshot-overhead", "0", "--drill", "kill-server rank=0 step=25 call=4"),
    )
    assert ended.status == 1
    assert "the device server of rank 0 died" in ended.output
    assert ended.report["recoveries"][0]["plan"] == "give-up"


def test_more_ranks_than_devices_is_one_sentence(tmp_path: Path) -> None:
    ended = run(torchrun(2, TINY), folder=tmp_path, options=("--devices", "cpu:1"))
    assert ended.status == 1
    assert (
        "there is no cuda:1, this worker sees 1 device(s); for more ranks start proxyd with more"
        in ended.output
    )


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_command_and_daemon(how: signal.Signals) -> None:
    process = subprocess.Popen(
        [*installed("proxyrun"), *python(TINY, "--fail", "hang")],
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert any(line.startswith("hanging") for line in process.stdout)
    os.killpg(process.pid, how) if how is signal.SIGINT else process.send_signal(how)
    process.stdout.read()
    assert process.wait(30) != 0


def test_an_embedded_proxyd_that_is_killed_once_too_often_is_told_of_and_leaves_nothing() -> None:
    process = subprocess.Popen(
        # A rank that stands for a validation when the last proxyd dies is let go on by nobody.
        [
            *installed("proxyrun"),
            "--adoption-grace",
            "1",
            "--validate-every",
            "0",
            *python(TINY, "--steps", "1000000"),
        ],
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    last = 0
    for round_ in range(MOST_RESTARTS + 1):
        for line in process.stdout:
            if line.startswith("step ") and int(line.split()[1]) > last:
                break
        last = int(line.split()[1]) + 100  # training goes on meanwhile
        (daemon,) = until(
            lambda: [
                entry
                for entry in proxied.our_processes()
                if name_of("recovery.proxyd") in entry and STANDS_FOR_A_FORK not in entry
            ],
            "a proxyd",
        )
        os.kill(int(daemon.split(":")[0]), signal.SIGKILL)
        sentence = (
            "starting it again" if round_ < MOST_RESTARTS else "once too often: the job goes on without"
        )
        assert any(sentence in line for line in process.stdout)
    for line in process.stdout:
        if line.startswith("step ") and int(line.split()[1]) > last:
            break
    process.send_signal(signal.SIGTERM)
    output = process.stdout.read()
    assert process.wait(90) != 0
    assert "proxyd did not report on the run" in output


def test_another_job_is_not_harmed_by_a_killed_worker(tmp_path: Path) -> None:
    socket = tmp_path / "proxyd.sock"
    with running_proxyd(socket, 2) as daemon:
        options = ("--socket", str(socket))
        script = tmp_path / "second.py"  # as tiny.py, on the other device
        script.write_text(TINY.read_text().replace('os.environ.get("LOCAL_RANK", "0")', '"1"'))
        calm = subprocess.Popen(
            [*installed("proxyrun"), *options, *python(script, "--steps", "400")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        killed = run(python(TINY, "--fail", "killed"), folder=tmp_path, options=options)
        assert killed.status == 128 + signal.SIGKILL
        output, _ = calm.communicate(timeout=60)
        assert calm.returncode == 0 and output.rstrip().endswith("done"), output[-2000:]
        after = run(python(TINY), folder=tmp_path, options=options)
        assert after.status == 0, after.output
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.process.wait(30) == 0


def test_a_proxyd_lets_go_of_the_memory_of_jobs_that_have_ended(tmp_path: Path) -> None:
    with running_proxyd(tmp_path / "proxyd.sock", 1) as daemon:
        options = ("--socket", str(daemon.socket))
        assert run(python(TINY), folder=tmp_path, options=options).status == 0
        assert run(python(TINY, "--fail", "killed"), folder=tmp_path, options=options).status != 0
        struck = (*options, "--drill", "kill-server rank=0 step=3 call=4")
        assert run(python(TINY), folder=tmp_path, options=struck).status == 0
        maps = Path(f"/proc/{daemon.pid}/maps")
        until(lambda: f"{SHARED_MEMORY}/understudy-" not in maps.read_text(), "no log is mapped")
