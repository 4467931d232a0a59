"""Jobs on several hosts, with faults: ranks go on elsewhere, and losses are those of an undisturbed run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from host_cluster import SHARED_MEMORY, Cluster, HostRun, cluster, losses_of, report_of
from migratable_run import LOADED_GPT, MigratableRun, skip_without_criu
from native_reference import native_losses
from proxied import until
from training_run import Training

pytestmark = [pytest.mark.timeout(600), pytest.mark.drawn(10)]  # three hosts on one machine

STEPS = 40
LONGER, QUARTER_S = 200, 900
EACH = ["--log-every", "1"]
WAIT_S = 240
ASK_EVERY_S = 0.2
"""Whoever asks proxyds more often takes the processors away from what they have to do."""


@pytest.fixture(scope="module")
def undisturbed() -> list[list[str]]:
    """Losses of a native run, as bits."""
    return native_losses(Training("char_gpt.py", 2, STEPS))


@contextmanager
def migratable(folder: Path, *drills: str) -> Iterator[tuple[Cluster, list[HostRun]]]:
    """A training on hosts a, which leads, and b; c is spare."""
    skip_without_criu()
    with cluster({"a": 1, "b": 1, "c": 1}) as hosts:
        options = [word for drill in drills for word in ("--drill", drill)]
        runs = hosts.train(
            "ab", STEPS, folder / "losses", options=["--migratable"], first_options=options, arguments=EACH
        )
        yield hosts, runs


def wait(hosts: Cluster, runs: list[HostRun]) -> None:
    """All end well, and leave nothing."""
    statuses = [run.wait(WAIT_S) for run in runs]
    told = [line for run in runs for line in ("", *run.errors[-30:])]
    logs = [host.log.read_text()[-4000:] for host in hosts.hosts.values()]
    assert statuses == [0] * len(runs), "\n".join(["", *told, *logs])
    until(
        lambda: not any(host.status().ranks for host in hosts.hosts.values()), "all ranks have ended", 30,
        ASK_EVERY_S,
    )  # fmt: skip
    try:
        until(
            lambda: all(len(held) == 1 for held in held_by(hosts).values()), "nothing of others is left", 30
        )
    except AssertionError as problem:
        logs = [host.log.read_text()[-4000:] for host in hosts.hosts.values()]
        files = [str(file) for host in hosts.hosts.values() for file in host.path(SHARED_MEMORY).rglob("*")]
        raise AssertionError("\n".join([f"{problem}: {held_by(hosts)}", *files, *logs])) from problem


def held_by(hosts: Cluster) -> dict[str, list[str]]:
    """What lies in shared memory: its proxyd's directory, and those of hosts whose workers are there."""
    return {name: host.shared_memory() for name, host in hosts.hosts.items()}


def runs_at(hosts: Cluster, rank: int) -> str:
    """The host where a rank of the job that `a` leads runs, as it says itself; empty: nowhere."""
    for name, host in hosts.hosts.items():
        if any(one.rank == rank and not one.host for one in host.status().ranks):
            return name
    return ""


def await_at(hosts: Cluster, rank: int, host: str) -> None:
    """Until it runs there."""
    until(lambda: runs_at(hosts, rank) == host, f"rank {rank} runs at {host}", 180, ASK_EVERY_S)


@pytest.mark.long
def test_servers_on_either_host_are_killed_and_replaced(folder: Path, undisturbed: list[list[str]]) -> None:
    drills = ("kill-server rank=1 step=6 call=100", "kill-server rank=0 step=8 call=300",
              "call-error rank=1 step=10 call=20")  # fmt: skip
    with cluster({"a": 1, "b": 1}) as hosts:
        options = [word for drill in drills for word in ("--drill", drill)]
        report = folder / "report.json"
        runs = hosts.train("ab", STEPS, folder / "losses", first_options=[*options, "--report", str(report)])
        wait(hosts, runs)
        assert losses_of(folder / "losses", 2) == undisturbed
        told = [(one["fault"], one["rank"], one["recovered"]) for one in report_of(report)["recoveries"]]
        assert told == [("server-died", 1, True), ("server-died", 0, True), ("call-failed", 1, True)]


def test_rank_whose_device_is_gone_goes_on_at_a_spare_host(
    folder: Path, undisturbed: list[list[str]]
) -> None:
    drills = "device-gone rank=1 step=7 call=150", "kill-server rank=1 step=11 call=9"
    with migratable(folder, *drills) as (hosts, runs):
        await_at(hosts, 1, "c")
        wait(hosts, runs)
        assert losses_of(folder / "losses", 2) == undisturbed
        assert runs[0].steps() == STEPS


@pytest.mark.long
def test_rank_of_the_leading_host_goes_on_at_a_spare_host(folder: Path, undisturbed: list[list[str]]) -> None:
    with migratable(folder, "device-gone rank=0 step=7 call=150") as (hosts, runs):
        await_at(hosts, 0, "c")
        wait(hosts, runs)
        assert losses_of(folder / "losses", 2) == undisturbed
        assert runs[0].steps() == STEPS


def test_host_is_drained_and_its_rank_goes_to_another_and_back(
    folder: Path, undisturbed: list[list[str]]
) -> None:
    with migratable(folder) as (hosts, runs):
        until(lambda: runs[0].steps() >= 2, "the training runs", 120)
        done = hosts["b"].recoveryctl("drain", "b")
        assert done.returncode == 0, (done.stderr, hosts["a"].log.read_text()[-3000:])
        assert "rank 1 runs on cpu:0 of host c, was on b" in done.stdout
        assert runs_at(hosts, 1) == "c"
        back = hosts["b"].recoveryctl("drain", "cpu:0", "--undo")
        assert back.returncode == 0, back.stderr
        wait(hosts, runs)
        assert losses_of(folder / "losses", 2) == undisturbed


@pytest.mark.long
def test_host_that_the_data_network_does_not_reach_is_left_amid_a_collective(
    folder: Path, undisturbed: list[list[str]]
) -> None:
    with migratable(folder) as (hosts, runs):
        until(lambda: runs[0].steps() >= 3, "the training runs", 120)
        hosts.net.unplug_data("b")
        await_at(hosts, 1, "c")
        wait(hosts, runs)
        assert losses_of(folder / "losses", 2) == undisturbed


def test_leading_proxyd_is_killed_amid_a_recovery_and_its_successor_goes_on(
    folder: Path, undisturbed: list[list[str]]
) -> None:
    with migratable(folder, "device-gone rank=1 step=6 call=150") as (hosts, runs):
        until(
            lambda: '"event": "plan"' in hosts["a"].log.read_text().split("device-gone")[-1], "it plans", 120
        )
        hosts["a"].proxyd.kill()
        hosts["a"].start_proxyd()
        wait(hosts, runs)
        assert losses_of(folder / "losses", 2) == undisturbed


@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.long)])
def test_state_that_is_not_reached_on_its_host_comes_by_shared_storage_if_there_is_any(
    shared: bool, folder: Path, undisturbed: list[list[str]]
) -> None:
    storage = folder / "shared"
    storage.mkdir()
    with cluster({"a": 1, "b": 1}, *(["--shared-directory", str(storage)] if shared else [])) as hosts:
        report = folder / "report.json"
        options = ["--drill", "kill-server rank=1 step=14 call=150", "--report", str(report)]
        runs = hosts.train("ab", STEPS, folder / "losses", first_options=options, arguments=EACH)
        until(lambda: runs[0].steps() >= 7, "it is past its validation", 120)
        for place in hosts["a"].state_places():
            hosts.net.forbid("b", place)
        wait(hosts, runs)
        assert losses_of(folder / "losses", 2) == undisturbed
        (recovery,) = report_of(report)["recoveries"]
        log = hosts["a"].log.read_text()
        assert recovery["recovered"], recovery
        assert "shared storage is tried" in log
        if shared:
            assert recovery["plan"] == "restart-copy-replay", recovery
            assert "recovery round failed" not in log
            assert os.listdir(storage / "default") == []
        else:
            assert recovery["plan"] == "restore-snapshot-replay", recovery
            assert log.count("recovery round failed") == 2
            assert "rank 1 does not reach the state of rank 0" in recovery["reason"]


@pytest.mark.long
def test_state_that_a_rank_leaves_behind_comes_by_shared_storage_if_it_is_not_reached(
    folder: Path, undisturbed: list[list[str]]
) -> None:
    skip_without_criu()
    storage = folder / "shared"
    storage.mkdir()
    with cluster({"a": 1, "b": 1, "c": 1}, "--shared-directory", str(storage)) as hosts:
        runs = hosts.train("ab", STEPS, folder / "losses", options=["--migratable"], arguments=EACH)
        until(lambda: runs[0].steps() >= 7, "it is past its validation", 120)
        for place in hosts["b"].state_places():
            hosts.net.forbid("c", place)
        done = hosts["a"].recoveryctl("migrate", "--rank", "1", "--to", "c:cpu:0")
        assert done.returncode == 0, (done.stderr, hosts["a"].log.read_text()[-3000:])
        wait(hosts, runs)
        assert losses_of(folder / "losses", 2) == undisturbed
        log = hosts["a"].log.read_text()
        assert "shared storage is tried" in log and "recovery round failed" not in log
        assert os.listdir(storage / "default") == []


@pytest.mark.long
def test_data_link_is_cut_and_the_leading_proxyd_killed_at_once(
    folder: Path, undisturbed: list[list[str]]
) -> None:
    with migratable(folder) as (hosts, runs):
        until(lambda: runs[0].steps() >= 3, "the training runs", 120)
        hosts["a"].proxyd.kill()
        hosts.net.unplug_data("b")
        hosts["a"].start_proxyd()
        await_at(hosts, 1, "c")
        wait(hosts, runs)
        assert losses_of(folder / "losses", 2) == undisturbed


@pytest.mark.long
def test_etcd_is_away_while_a_rank_has_to_leave_its_host(folder: Path, undisturbed: list[list[str]]) -> None:
    with migratable(folder, "device-gone rank=1 step=12 call=150") as (hosts, runs):
        until(lambda: runs[0].steps() >= 3, "the training runs", 120)
        hosts.etcd.kill()
        await_at(hosts, 1, "c")
        hosts.etcd.start()
        wait(hosts, runs)
        assert losses_of(folder / "losses", 2) == undisturbed


@pytest.mark.long
@pytest.mark.timeout(QUARTER_S + 600)
def test_etcd_is_away_for_a_quarter_of_an_hour_in_mid_recovery(folder: Path) -> None:
    """Eight rounds of a minute were all that a recovery waited: then the job was given up."""
    native = native_losses(Training("char_gpt.py", 2, LONGER))
    with cluster({"a": 1, "b": 1}) as hosts:
        runs = hosts.train("ab", LONGER, folder / "losses", arguments=EACH)
        until(lambda: runs[0].steps() >= 3, "the training runs", 120)
        hosts.etcd.kill()
        until(lambda: "leads no more, for now" in hosts["a"].log.read_text(), "its lease has ended", 60)
        (rank,) = hosts["b"].status().ranks
        os.kill(rank.server_pid, signal.SIGKILL)
        began = time.monotonic()
        until(lambda: waits(hosts), "the recovery waits, and says so", 60, ASK_EVERY_S)
        until(lambda: time.monotonic() > began + QUARTER_S, "time is up", QUARTER_S + 60, 10.0)
        assert waits(hosts)
        hosts.etcd.start()
        wait(hosts, runs)
        assert losses_of(folder / "losses", 2) == native
        assert runs[0].steps() == LONGER


def waits(hosts: Cluster) -> bool:
    told = " ".join(hosts["a"].recoveryctl("status").stdout.split())
    return "a recovery waits: this host does not lead the job for the moment" in told


def test_link_between_proxyds_is_cut_and_healed_while_a_recovery_needs_it(
    folder: Path, undisturbed: list[list[str]]
) -> None:
    with cluster({"a": 1, "b": 1}) as hosts:
        drills = ["--drill", "kill-server rank=0 step=14 call=150"]
        runs = hosts.train("ab", STEPS, folder / "losses", first_options=drills, arguments=EACH)
        until(lambda: runs[0].steps() >= 7, "it is past its validation", 120)
        hosts.net.cut("b")
        until(lambda: '"kind": "server-died"' in hosts["a"].log.read_text(), "the fault comes", 60)
        hosts.net.heal("b")
        wait(hosts, runs)
        assert losses_of(folder / "losses", 2) == undisturbed


@pytest.mark.long
def test_training_goes_on_undisturbed_while_the_link_between_proxyds_is_cut(folder: Path) -> None:
    """What the leader has heard last, that all wait for a collective, is no evidence that it hangs."""
    report, cuts, apart = folder / "report.json", 6, 12
    with cluster({"a": 1, "b": 1}) as hosts:
        steps = 20 + cuts * 2 * apart
        runs = hosts.train(
            "ab", steps, folder / "losses", first_options=["--report", str(report)], arguments=EACH
        )
        until(lambda: runs[0].steps() >= 7, "it is past its validation", 120)
        for number in range(cuts):
            for change in (hosts.net.cut, hosts.net.heal):
                before = runs[0].steps()
                change("b")
                until(lambda: runs[0].steps() >= before + apart, f"steps after cut {number}", 120)  # noqa: B023
        wait(hosts, runs)
        assert report_of(report)["recoveries"] == []


@pytest.mark.long
def test_rank_with_data_loaders_goes_on_at_a_spare_host_when_its_device_is_gone(folder: Path) -> None:
    skip_without_criu()
    with MigratableRun(folder / "undisturbed", ranks=2) as run:
        run.train(STEPS, STEPS, migratable=False)
        run.finish()
        undisturbed = run.losses()
    (folder / "limit").write_text(str(STEPS))
    with cluster({"a": 1, "b": 1, "c": 1}) as hosts:
        words = [str(STEPS), str(folder / "losses"), str(folder / "limit")]
        drill = "device-gone rank=1 step=17 call=40"
        runs = hosts.start_ranks("ab", LOADED_GPT, words, "--drill", drill)
        await_at(hosts, 1, "c")
        wait(hosts, runs)
        for rank in (0, 1):
            assert (folder / f"losses.{rank}").read_text().split() == undisturbed[rank]
        assert [line for line in runs[1].lines if "step" in line] == [
            f"rank 1: step {step}" for step in range(STEPS)
        ]


def test_job_ends_with_a_sentence_when_a_host_is_lost(folder: Path) -> None:
    with cluster({"a": 1, "b": 1, "c": 1}) as hosts:
        runs = hosts.train("ab", 100_000, folder / "losses", arguments=EACH)
        until(lambda: runs[0].steps() >= 3, "the training runs", 120)
        hosts.net.cut_data("b")
        hosts.net.cut("b")
        assert runs[0].wait(WAIT_S) != 0
        assert any("host b is lost, and with it the worker of rank 1" in line for line in runs[0].errors)
        hosts.net.heal("b")
        hosts.net.heal_data("b")
        runs[1].process.terminate()
        assert runs[1].wait(WAIT_S) != 0


def goes_on(run: HostRun, before: int) -> bool:
    return run.steps() > before


def moves_in_turns(hosts: Cluster, runs: list[HostRun], count: int) -> list[list[int]]:
    """Rank 1 goes to c and back to b; answers how many descriptors proxyds hold after every second move."""
    held = []
    for move in range(count):
        before = runs[0].steps()
        done = hosts["a"].recoveryctl("migrate", "--rank", "1", "--to", f"{'cb'[move % 2]}:cpu:0")
        assert done.returncode == 0, (move, done.stderr, hosts["a"].log.read_text()[-3000:])
        until(partial(goes_on, runs[0], before), "the training goes on", 60)
        if move % 2:
            held.append([count_held(host.proxyd.pid) for host in hosts.hosts.values()])
    return held


def count_held(pid: int) -> int:
    """Descriptors of a proxyd."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_rank_goes_to_another_host_and_back_thirty_times_and_nothing_grows(folder: Path) -> None:
    skip_without_criu()
    count = 30
    with cluster({"a": 1, "b": 1, "c": 1}) as hosts:
        steps = 20 * count
        runs = hosts.train("ab", steps, folder / "losses", options=["--migratable"], arguments=EACH)
        until(lambda: runs[0].steps() >= 7, "it is past its validation", 120)
        held = moves_in_turns(hosts, runs, 2)
        first = [resident_mb(host.proxyd.pid) for host in hosts.hosts.values()]
        held += moves_in_turns(hosts, runs, count - 2)
        last = [resident_mb(host.proxyd.pid) for host in hosts.hosts.values()]
        print(f"descriptors {held}, resident MB {first} -> {last}, {runs[0].steps()} of {steps} steps")
        assert all(now <= then + 6 for now, then in zip(held[-1], held[0], strict=True)), held
        assert all(now <= then + 40 for now, then in zip(last, first, strict=True)), (first, last)
        wait(hosts, runs)
        native = native_losses(Training("char_gpt.py", 2, steps))
        assert losses_of(folder / "losses", 2) == native
