"""A CUDA device that is simulated: what it is like, and what runs on it. Nothing of it is a GPU's result."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import proxied
import pytest
from native_reference import native_losses
from places import TESTS
from proxied import WORKLOADS
from simulated_case import does
from training_run import Training

from understudy.recovery.agent_api.commands import command_named

pytestmark = [pytest.mark.drawn(23), pytest.mark.usefixtures("simulated_gpus")]

DRIVER_LOST = 86
LOSS = re.compile(r"rank \d step \d 0x[0-9a-f.]+p[+-]\d+")
SUSPECT = ("--drill", "driver-suspect rank=1 step=5 call=3")
OLD_DRIVER = {"SIMULATED_CUDA_OLD_DRIVER": "1"}


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("asynchrony", ["50 0 52000.0"]),
        ("poison", ["True False"]),
        ("limit", ["CUDA out of memory", str(1 << 30)]),
        ("sticky", ["700 CUDA error: an illegal memory access was encountered"] * 2),
        ("assertion", ["710 CUDA error: device-side assert triggered"]),
    ],
)
def test_it_behaves_as_a_gpu_does(case: str, said: list[str]) -> None:
    done = does(case)
    assert (done.returncode, done.stdout.splitlines()) == (0, said), done.stderr


def test_the_host_cannot_touch_its_memory() -> None:
    done = does("touch")
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "touches\n"), done.stderr


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("aborted_commit", ["1 parked", "True"]),
        ("aborted_read", ["[]", "True"]),
        ("given_up_group", ["[]", "True"]),
        ("end_behind_a_collective", ["[]", "True"]),
    ],
)
def test_nothing_counts_before_the_device_has_passed_it(collectives: str, case: str, said: list[str]) -> None:
    done = does(case, "simulated_executor_cases.py", collectives)
    assert (done.returncode, done.stdout.splitlines()) == (0, said), done.stderr


def test_the_scripts_allocator_settings_and_blocking_launches_reach_the_device() -> None:
    done = does("the_scripts_environment", "simulated_executor_cases.py")
    assert (done.returncode, done.stdout.splitlines()) == (0, ["3 max_split_size_mb:64", "3", "[3, 3, 0]"]), (
        done.stderr
    )


def test_a_snapshot_is_taken_beside_what_the_device_has_to_do() -> None:
    done = does(
        "snapshot_beside_a_collective", "simulated_executor_cases.py", SIMULATED_CUDA_NS_PER_KIB="2000"
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, ["True"] * 3), done.stderr


@pytest.mark.parametrize(
    ("case", "said", "told"),
    [
        ("no_room", ["True"] * 3, "has no memory for a copy"),
        ("no_room_in_a_step", ["1 0", "0 1", "1 True", "1"], "has no memory for a copy"),
        (
            "the_program_needs_room",
            ["1", "(0.0, 0.0, 0.0, 0.0)", "True", "True"],
            "as the program needs memory",
        ),
    ],
)
def test_memory_goes_to_the_program_before_what_is_kept_for_going_back(
    case: str, said: list[str], told: str
) -> None:
    done = does(case, "simulated_executor_cases.py")
    assert (done.returncode, done.stdout.splitlines()) == (0, said), done.stderr
    assert done.stderr.count(told) == 1


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("messages_together", ["True"] * 2),
        ("left_amid_a_group", ["running 2", "2 True", "parked", "True", "True"]),
        ("groups_that_make_no_sense", ["True"] * 4),
    ],
)
def test_messages_of_a_group_start_together(collectives: str, case: str, said: list[str]) -> None:
    done = does(case, "simulated_executor_cases.py", collectives)
    assert (done.returncode, done.stdout.splitlines()) == (0, said), done.stderr


@pytest.mark.parametrize("driver", ["new", "old"])
def test_a_commits_digests_are_made_on_the_device_unless_its_driver_is_too_old(driver: str) -> None:
    done = does("digests", "simulated_executor_cases.py", **OLD_DRIVER if driver == "old" else {})
    assert (done.returncode, done.stdout.splitlines()) == (0, ["True", str(driver == "new")]), done.stderr
    refused = "does not take our code for digests (CUDA_ERROR_UNSUPPORTED_PTX_VERSION)"
    assert (refused in done.stderr) == (driver == "old")


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("lost_device", "the MPS client has been terminated by the server"),
        ("library_on_a_lost_device", "an illegal memory access was encountered"),
    ],
)
def test_a_device_server_ends_with_an_error_that_its_code_or_the_device_tells(case: str, error: str) -> None:
    done = does(case, "simulated_failing_calls.py")
    assert done.returncode == DRIVER_LOST, done.stderr
    assert f"({error}) [in one of the records" in done.stderr


def test_a_device_server_ends_with_an_error_that_a_commits_copies_or_digests_are_the_first_to_meet() -> None:
    for nth in ("1", "2", "3"):
        done = does("lost_device_at_a_commit", "simulated_failing_calls.py", NTH=nth)
        assert done.returncode == DRIVER_LOST, (nth, done.stderr)
        assert "(an illegal memory access was encountered) [in one of the records" in done.stderr


@pytest.mark.parametrize("case", ["library_on_a_sound_device", "library_on_a_device_that_refuses_a_call"])
def test_an_error_of_a_library_is_the_programs_unless_the_device_has_one_too(case: str) -> None:
    done = does(case, "simulated_failing_calls.py")
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_a_training_on_two_of_them_has_the_bits_of_the_cpu_through_a_killed_server_and_a_failed_call(
    collectives: str, folder: Path
) -> None:
    training = Training("char_gpt.py", 2, 8)
    drills = ("kill-server rank=1 step=4 call=200", "call-error rank=0 step=6 call=100")
    done = training.run(folder / "run", proxied=True, drills=drills, options=("--collectives", collectives))
    found = [(one["fault"], one["recovered"]) for one in done.report["recoveries"]]
    assert found == [("server-died", True), ("call-failed", True)]
    assert done.losses == native_losses(training)


def test_a_collective_that_hangs_on_the_device_is_told_as_one(collectives: str, folder: Path) -> None:
    """Also where connections have broken: the device says nothing of that, and goes on waiting."""
    training = Training("char_gpt.py", 2, 8)
    drills = ("collective-hang rank=1 step=4 call=200", "network-partition rank=0 step=6 call=60")
    done = training.run(folder / "run", proxied=True, drills=drills, options=("--collectives", collectives))
    found = [(one["fault"], one["recovered"]) for one in done.report["recoveries"]]
    assert found == [("collective-hung", True)] * 2
    assert done.losses == native_losses(training)


def test_a_rank_that_connects_to_a_peer_which_stops_meanwhile_keeps_its_state(
    collectives: str, folder: Path
) -> None:
    """The server of rank 1 has died, and the next one stops before it comes to its first collective."""
    training = Training("char_gpt.py", 2, 8)
    drills = ("kill-server rank=1 step=4 call=20", "stop-server rank=1 step=4 call=100")
    done = training.run(folder / "run", proxied=True, drills=drills, options=("--collectives", collectives))
    found = [(one["fault"], one["recovered"]) for one in done.report["recoveries"]]
    assert found == [("server-died", True), ("server-stopped", True)]
    park = command_named("Park")
    assert park is not None
    assert done.report["recoveries"][1]["restart_s"] < park.within_s  # rank 0 did not have to be killed
    assert [one["fired"] for one in done.report["faults"]] == [True, True]
    assert done.losses == native_losses(training)


def test_a_rank_that_waits_on_the_device_for_a_late_peer_is_waited_for(
    collectives: str, folder: Path
) -> None:
    """Longer than a server may take for a record."""
    command = proxied.torchrun(2, WORKLOADS / "late_rank.py", "12")
    options = ("--devices", "cuda:2", "--hang-timeout", "8", "--collectives", collectives)
    done = proxied.run(command, folder=folder, options=options)
    assert (done.status, done.report["recoveries"]) == (0, []), done.output[-3000:]


def test_two_ranks_and_three_that_send_before_they_receive_do_not_wait_for_each_other(
    collectives: str, folder: Path
) -> None:
    """In batches: one by one they would, for good. Servers are killed at each call of a step with batches."""
    for ranks, calls in ((2, range(1, 19)), (3, range(2, 17, 5))):
        drills = [f"kill-server rank={i % ranks} step={2 + i} call={call}" for i, call in enumerate(calls)]
        steps = len(drills) + 4
        options = (
            "--devices",
            f"cuda:{ranks}",
            "--collectives",
            collectives,
            *(word for one in drills for word in ("--drill", one)),
        )
        command = proxied.torchrun(ranks, WORKLOADS / "batched_messages.py", str(steps))
        done = proxied.run(command, folder=folder, options=options, timeout_s=100)
        assert (done.status, done.output.count("right")) == (0, ranks), done.output[-3000:]
        recovered = [one["recovered"] for one in done.report["recoveries"]]
        assert all(recovered) and len(recovered) >= len(drills)


def test_two_ranks_that_exchange_messages_do_not_wait_for_a_third_after_a_recovery(
    collectives: str, folder: Path
) -> None:
    """It waits for one of them in another group, and comes to this one last.

    With our own calls the group has had messages only, by which all met: stood for, all meet for any message.
    """
    messages = ("--messages",) if collectives == "own" else ()
    command = proxied.torchrun(3, WORKLOADS / "crossed_groups.py", "6", *messages)
    options = (
        "--devices", "cuda:3", "--collectives", collectives, "--hang-timeout", "8",
        "--drill", "kill-server rank=1 step=3 call=3",
    )  # fmt: skip
    done = proxied.run(command, folder=folder, options=options, timeout_s=100)
    assert (done.status, done.output.count("right")) == (0, 3), done.output[-3000:]
    assert [one["fault"] for one in done.report["recoveries"]] == ["server-died"]


def test_a_gpu_that_has_no_room_for_a_server_and_its_successor_costs_no_bit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the one that is left is not there yet when the other one goes on: the program found none.

    Or there is not room enough to take its state over: then a replica has it, or a snapshot.
    """
    found = {}
    for mebibytes, drills in ((400, ()), (62, SUSPECT), (66, SUSPECT)):
        run = folder / str(mebibytes)
        run.mkdir()
        monkeypatch.setenv("SIMULATED_CUDA_SHARED", str(run))
        monkeypatch.setenv("SIMULATED_CUDA_BYTES", str(mebibytes << 20))
        command = proxied.torchrun(2, WORKLOADS / "full_gpu.py", "8")
        done = proxied.run(command, folder=run, options=("--devices", "cuda:2", *drills), timeout_s=100)
        assert done.status == 0, done.output[-3000:]
        print([(one["plan"], one["reason"]) for one in done.report["recoveries"]])
        assert all(one["recovered"] for one in done.report["recoveries"])
        assert len(done.report["recoveries"]) == bool(drills)
        found[mebibytes] = sorted(LOSS.findall(done.output))  # lines of two ranks may run together
    assert len(found[400]) == 2 * 8
    assert found[62] == found[66] == found[400]


def test_the_executors_tests_pass_on_it() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:xdist",
         str(TESTS / "device_server" / "test_executor.py")],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    print(done.stdout[-3000:])
    assert done.returncode == 0
    passed = int(done.stdout.splitlines()[-1].split(" passed")[0].split()[-1])
    assert passed > 100
