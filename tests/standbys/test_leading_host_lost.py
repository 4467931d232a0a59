"""The host that leads a job is lost, alone or with another: a standby leads on, and no loss changes."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from host_cluster import EXAMPLES, Cluster, HostRun, cluster, losses_of, report_of
from host_power import (
    STEPS,
    WAIT_S,
    account,
    go_on_until_there_is_an_image,
    image_step,
    keeping_images,
    let,
    let_it_go_on,
    lines,
    power_off,
    train_until_there_is_an_image,
)
from migratable_run import LOADED_GPT, MigratableRun, skip_without_criu
from native_reference import native_losses
from proxied import until
from training_run import Training

from understudy.recovery.spanning.leader.cpu_images import FOLDER

pytestmark = pytest.mark.timeout(900)  # three hosts on one machine


def train(hosts: Cluster, names: str, folder: Path, steps: int, report: str = "") -> list[HostRun]:
    """char_gpt with a rank on each; `report`: of which host."""
    words = ["--steps", str(steps), "--losses", str(folder / "losses"), "--log-every", "1"]
    more = {report: ["--report", str(folder / "report.json")]} if report else {}
    return hosts.start_ranks(names, EXAMPLES / "char_gpt.py", words, options_of=more)


def undisturbed(folder: Path, ranks: int, steps: int) -> list[list[str]]:
    return native_losses(Training("char_gpt.py", ranks, steps))


def step(hosts: Cluster, leader: str) -> int:
    return min((one.step for one in hosts[leader].status().ranks), default=0)


def leaders(hosts: Cluster, name: str) -> set[tuple[str, str]]:
    """Who leads, and who would, as that host knows it."""
    return {(one.leader, one.heir) for one in hosts[name].status().ranks}


def goes_on(hosts: Cluster, leader: str, steps: int) -> None:
    before = step(hosts, leader)
    until(lambda: step(hosts, leader) >= before + steps, "the training goes on", 120, 0.2)


@pytest.mark.drawn(3)
def test_power_of_the_leading_host_fails_and_its_standby_leads_the_job_on_with_its_rank_back(
    folder: Path,
) -> None:
    skip_without_criu()
    native = undisturbed(folder, 2, STEPS)
    with cluster({"a": 1, "b": 1, "c": 1}, *keeping_images(folder)) as hosts:
        report = {"b": ["--report", str(folder / "report.json")]}
        runs = train_until_there_is_an_image(hosts, folder, rank=0, options_of=report)
        until(lambda: leaders(hosts, "a") == {("", "b")}, "a standby is named", 60, 0.2)
        assert leaders(hosts, "b") == {("a", "")}
        let_it_go_on(folder)
        power_off(hosts, "a")
        print("power off")
        assert runs[1].wait(WAIT_S) == 0, account(hosts, runs[1], "b")
        until(lambda: not hosts["c"].status().ranks, "the other rank has ended, too", 60)
        told = hosts["b"].log.read_text().splitlines()
        print(*(line for line in told if "a rank came back" in line or "leads" in line), sep="\n")
        assert losses_of(folder / "losses", 2) == native
        found = report_of(folder / "report.json")
        [recovery] = found["recoveries"]
        print(recovery)
        assert (recovery["fault"], recovery["rank"], recovery["recovered"]) == ("host-lost", 0, True)
        assert recovery["plan"] == "restore-snapshot-replay"
        [adoption] = found["adoptions"]
        assert (adoption["former_host"], adoption["host"], adoption["ranks"]) == ("a", "b", 1)
        until(
            lambda: len(hosts["b"].shared_memory()) == len(hosts["c"].shared_memory()) == 1,
            "nothing of another host is left", 30,
        )  # fmt: skip
        assert not list((folder / "store" / FOLDER / "b").glob("*"))  # the job is over


@pytest.mark.long
@pytest.mark.parametrize("lost", ["a and b", "a and c", "a, then b amid its recovery"])
def test_the_leading_host_and_another_lose_their_power_and_both_ranks_come_back(
    lost: str, folder: Path
) -> None:
    """Standbys are b and c: the one that is left has images of both, and leads the job on."""
    skip_without_criu()
    native = undisturbed(folder, 3, STEPS)
    left = "b" if "c" in lost.split() else "c"
    with cluster({"a": 1, "b": 1, "c": 1, "d": 2}, *keeping_images(folder)) as hosts:
        report = {left: ["--report", str(folder / "report.json")]}
        runs = train_until_there_is_an_image(hosts, folder, rank=0, options_of=report, names="abc")
        until(lambda: leaders(hosts, "a") == {("", "b, c")}, "two standbys are named", 60, 0.2)
        let_it_go_on(folder)
        power_off(hosts, "a")
        if "then" in lost:
            leads = '"event": "leads a job on"'
            until(lambda: leads in hosts["b"].log.read_text(), "the first standby leads", 120, 0.02)
        power_off(hosts, "c" if left == "b" else "b")
        print("power off")
        run = runs["abc".index(left)]
        assert run.wait(WAIT_S) == 0, account(hosts, run, left)
        until(lambda: not hosts["d"].status().ranks, "the other ranks have ended, too", 60)
        told = hosts[left].log.read_text().splitlines()
        print(*(line for line in told if "a rank came back" in line or "leads" in line), sep="\n")
        assert losses_of(folder / "losses", 3) == native
        found = report_of(folder / "report.json")
        print(found["recoveries"])
        assert {one["fault"] for one in found["recoveries"]} == {"host-lost"}
        adoption = found["adoptions"][-1]
        former = "b" if "then" in lost else "a"
        assert (adoption["former_host"], adoption["host"], adoption["ranks"]) == (former, left, 1)


@pytest.mark.long
def test_a_standby_whose_proxyd_was_started_anew_leads_on_with_the_images_that_it_had(folder: Path) -> None:
    """The training stands, so that it gets no newer ones."""
    skip_without_criu()
    native = undisturbed(folder, 2, STEPS)
    with cluster({"a": 1, "b": 1, "c": 1}, *keeping_images(folder)) as hosts:
        runs = train_until_there_is_an_image(hosts, folder, rank=0)
        until(lambda: leaders(hosts, "a") == {("", "b")}, "a standby is named", 60, 0.2)
        hosts["b"].proxyd.kill()
        hosts["b"].start_proxyd()
        follows = '"event": "follows"'
        before = hosts["a"].log.read_text().count(follows)
        until(lambda: hosts["a"].log.read_text().count(follows) > before, "it is followed", 60, 0.2)
        power_off(hosts, "a")
        let_it_go_on(folder)
        assert runs[1].wait(WAIT_S) == 0, account(hosts, runs[1], "b")
        until(lambda: not hosts["c"].status().ranks, "the other rank has ended, too", 60)
        assert losses_of(folder / "losses", 2) == native


@pytest.mark.long
def test_leadership_passes_twice_and_a_guest_that_leads_ends_the_job_with_its_last_rank(folder: Path) -> None:
    skip_without_criu()
    steps = 250
    native = undisturbed(folder, 2, steps)
    with cluster({"a": 1, "b": 1, "c": 2}, *keeping_images(folder)) as hosts:
        train(hosts, "ab", folder, steps)
        until(lambda: image_step(hosts, 0) > 0, "there is an image of the leader's own rank", 120, 0.2)
        power_off(hosts, "a")
        until(lambda: any(one.rank == 0 for one in hosts["c"].status().ranks), "it is at c", 120, 0.2)
        until(lambda: image_step(hosts, 1, "b") > 0, "there is an image of the new leader's rank", 120, 0.2)
        goes_on(hosts, "b", 3)
        print(f"power off of the second at step {step(hosts, 'b')}")
        power_off(hosts, "b")
        until(lambda: len(hosts["c"].status().ranks) == 2, "both are at c", 120, 0.2)
        until(lambda: not hosts["c"].status().ranks, "both have ended", WAIT_S, 0.2)
        told = hosts["c"].log.read_text()
        assert losses_of(folder / "losses", 2) == native, told[-8000:]
        until(lambda: '"event": "job closed"' in hosts["c"].log.read_text(), "the job has ended", 60)
        assert len(hosts["c"].shared_memory()) == 1


@pytest.mark.long
def test_leading_host_that_was_only_cut_off_has_its_rank_ended_when_it_is_back(folder: Path) -> None:
    """With data loaders, an open file and its output; nothing is written twice."""
    skip_without_criu()
    losses, limit, steps = folder / "losses", folder / "limit", 200
    with MigratableRun(folder / "undisturbed", ranks=2) as run:
        run.train(steps, steps, migratable=False)
        run.finish()
        native = run.losses()
    with cluster({"a": 1, "b": 1, "c": 1}, *keeping_images(folder)) as hosts:
        let(limit, "12")
        runs = hosts.start_ranks("ab", LOADED_GPT, [str(steps), str(losses), str(limit)])
        far = go_on_until_there_is_an_image(hosts, limit, 0) + 8
        let(limit, str(far))
        until(lambda: len(lines(folder / "losses.0")) == far, "the training has gone on", 60)
        hosts.net.cut("a")
        hosts.net.cut_data("a")
        let(limit, str(steps))
        assert runs[1].wait(WAIT_S) == 0, account(hosts, runs[1], "b")
        until(lambda: not hosts["c"].status().ranks, "the other rank has ended, too", 60)
        hosts.net.heal("a")
        hosts.net.heal_data("a")
        assert runs[0].wait(WAIT_S) != 0
        until(lambda: not hosts["a"].status().ranks, "its copy has ended", 60)
        for rank in (0, 1):
            assert lines(folder / f"losses.{rank}") == native[rank]
        assert all(len(hosts[name].shared_memory()) == 1 for name in "abc")


@pytest.mark.long
def test_a_third_host_follows_the_standby_and_a_server_that_dies_meanwhile_is_replaced(folder: Path) -> None:
    skip_without_criu()
    native = undisturbed(folder, 3, STEPS)
    with cluster({"a": 1, "b": 1, "c": 1, "d": 1}, *keeping_images(folder)) as hosts:
        runs = train(hosts, "abc", folder, STEPS)
        until(lambda: image_step(hosts, 0) > 0, "there is an image of the leader's own rank", 180, 0.2)
        goes_on(hosts, "a", 3)
        server = next(one.server_pid for one in hosts["c"].status().ranks if one.rank == 2)
        power_off(hosts, "a")
        os.kill(server, signal.SIGKILL)
        assert runs[1].wait(WAIT_S) == 0, account(hosts, runs[1], "b")
        assert runs[2].wait(60) == 0, account(hosts, runs[2], "c")
        until(lambda: not hosts["d"].status().ranks, "the other rank has ended, too", 60)
        assert losses_of(folder / "losses", 3) == native


@pytest.mark.long
def test_leading_host_without_a_rank_is_lost_and_the_others_only_wait(folder: Path) -> None:
    skip_without_criu()
    steps = 150
    native = undisturbed(folder, 2, steps)
    with cluster({"a": 1, "b": 1, "c": 1}, *keeping_images(folder)) as hosts:
        runs = train(hosts, "ab", folder, steps, report="b")
        until(lambda: step(hosts, "a") > 5, "it trains", 120, 0.2)
        moved = hosts["a"].recoveryctl("migrate", "--rank", "0", "--to", "c")
        assert moved.returncode == 0, moved.stdout + moved.stderr
        log = hosts["a"].log
        before = log.read_text().count("CPU images were taken")
        until(
            lambda: log.read_text().count("CPU images were taken") > before + 1, "there are images", 120, 0.2
        )
        power_off(hosts, "a")
        assert runs[1].wait(WAIT_S) == 0, account(hosts, runs[1], "b")
        until(lambda: not hosts["c"].status().ranks, "the other rank has ended, too", 60)
        assert losses_of(folder / "losses", 2) == native
        [adoption] = report_of(folder / "report.json")["adoptions"]
        assert (adoption["former_host"], adoption["ranks"]) == ("a", 1)


@pytest.mark.long
def test_torchrun_goes_on_though_the_host_of_its_own_store_is_lost(folder: Path) -> None:
    """At its end it asks that store, until TCP gives the connection up: docs/operate/lost-hosts.md."""
    skip_without_criu()
    native = undisturbed(folder, 2, STEPS)
    with cluster({"a": 1, "b": 1, "c": 1}, *keeping_images(folder)) as hosts:
        runs = hosts.train(
            "ab", STEPS, folder / "losses", options=["--migratable"], arguments=["--log-every", "1"]
        )
        until(lambda: image_step(hosts, 0) > 0, "there is an image of the leader's own rank", 120, 0.2)
        give_up_early = [*hosts["b"].inside(), "sysctl", "-q", "-w", "net.ipv4.tcp_retries2=5"]
        assert subprocess.run(give_up_early, check=False).returncode == 0
        power_off(hosts, "a")
        ended = runs[1].wait(WAIT_S)
        assert ended == 0, account(hosts, runs[1], "b")
        until(lambda: not hosts["c"].status().ranks, "the other rank has ended, too", 60)
        assert losses_of(folder / "losses", 2) == native
