"""A host loses its power amid a training: its rank comes back from its image, and no loss changes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from host_cluster import EXAMPLES, Host, cluster, losses_of, report_of
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
    power_on,
    train_until_there_is_an_image,
)
from migratable_run import LOADED_GPT, MigratableRun, skip_without_criu
from native_reference import native_losses
from proxied import WORKLOADS, run, torchrun, until
from training_run import Training

from understudy.recovery.spanning.leader.cpu_images import FOLDER

pytestmark = pytest.mark.timeout(600)  # three hosts on one machine


def _is_left_to_proxyd(host: Host) -> bool:
    return len(host.shared_memory()) == 1


@pytest.mark.drawn(8)
def test_power_of_a_host_fails_and_its_rank_comes_back_from_its_image_on_a_spare_host(folder: Path) -> None:
    skip_without_criu()
    native = native_losses(Training("char_gpt.py", 2, STEPS))
    with cluster({"a": 1, "b": 1, "c": 1}, *keeping_images(folder)) as hosts:
        report = folder / "report.json"
        runs = train_until_there_is_an_image(hosts, folder, "--report", str(report))
        let_it_go_on(folder)
        power_off(hosts, "b")
        print(f"image of step {image_step(hosts)}, power off at step {runs[0].steps()}")
        status = runs[0].wait(WAIT_S)
        assert status == 0, account(hosts, runs[0])
        until(lambda: not hosts["c"].status().ranks, "the other rank has ended, too", 60)
        told = hosts["a"].log.read_text().splitlines()
        print(
            *(line for line in told if "CPU images were taken" in line or "a rank came back" in line),
            sep="\n",
        )
        assert losses_of(folder / "losses", 2) == native
        found = report_of(report)["recoveries"]
        assert [(one["fault"], one["rank"], one["recovered"]) for one in found] == [("host-lost", 1, True)]
        assert found[0]["plan"] == "restore-snapshot-replay"
        for name in "ac":  # but for what its proxyd itself keeps there
            until(partial(_is_left_to_proxyd, hosts[name]), f"nothing is left on {name}", 60)
        assert not list((folder / "store" / FOLDER).glob("[ac]/*/*/rank-*"))  # the job is over


@pytest.mark.long
def test_host_that_was_only_cut_off_has_its_copy_of_the_rank_ended_when_it_is_back(folder: Path) -> None:
    """The rank comes to the leading host, with data loaders, an open file and its output."""
    skip_without_criu()
    losses, limit, steps = folder / "losses", folder / "limit", 200
    with MigratableRun(folder / "undisturbed", ranks=2) as run:
        run.train(steps, steps, migratable=False)
        run.finish()
        undisturbed = run.losses()
    with cluster({"a": 2, "b": 1}, *keeping_images(folder)) as hosts:
        let(limit, "12")
        runs = hosts.start_ranks("ab", LOADED_GPT, [str(steps), str(losses), str(limit)])
        far = go_on_until_there_is_an_image(hosts, limit) + 8
        let(limit, str(far))
        until(lambda: len(lines(folder / "losses.1")) == far, "the training has gone on", 60)
        print(f"image of step {image_step(hosts)} of {far}")
        hosts.net.cut("b")
        hosts.net.cut_data("b")
        let(limit, str(steps))
        assert runs[0].wait(WAIT_S) == 0, account(hosts, runs[0])
        until(lambda: not hosts["a"].status().ranks, "the other rank has ended, too", 60)
        for rank in (0, 1):
            assert lines(folder / f"losses.{rank}") == undisturbed[rank]
        printed = [path for path in (folder / "store" / FOLDER).iterdir() if path.is_file()]
        assert sorted(path.suffix for path in printed) == [".stderr", ".stdout"]
        found = {path.suffix: lines(path) for path in printed}
        numbers = [int(line.removeprefix("rank 1: step ")) for line in found[".stdout"]]
        assert numbers == list(range(numbers[0], steps)) and 0 < numbers[0] <= far, numbers
        assert any("rank 1: pid" in line for line in found[".stderr"])
        hosts.net.heal("b")
        hosts.net.heal_data("b")
        assert runs[1].wait(WAIT_S) != 0
        until(lambda: not hosts["b"].status().ranks, "its copy has ended", 60)
        assert len(hosts["a"].shared_memory()) == len(hosts["b"].shared_memory()) == 1


@pytest.mark.long
def test_proxyd_of_the_host_to_which_a_rank_came_is_killed_and_its_successor_passes_all_output_on(
    folder: Path,
) -> None:
    skip_without_criu()
    limit, steps = folder / "limit", 200
    with cluster({"a": 1, "b": 1, "c": 1}, *keeping_images(folder)) as hosts:
        let(limit, "12")
        runs = hosts.start_ranks("ab", LOADED_GPT, [str(steps), str(folder / "losses"), str(limit)])
        far = go_on_until_there_is_an_image(hosts, limit) + 8
        let(limit, str(far))
        until(lambda: len(lines(folder / "losses.1")) == far, "the training has gone on", 60)
        power_off(hosts, "b")
        let(limit, str(far + 8))
        until(
            lambda: len(lines(folder / "losses.1")) == far + 8, "the rank is back and past its loss", 120, 0.2
        )
        hosts["c"].proxyd.kill()
        hosts["c"].start_proxyd()
        let(limit, str(steps))
        ended = runs[0].wait(WAIT_S)
        assert ended == 0, account(hosts, runs[0])
        until(lambda: not hosts["c"].status().ranks, "the other rank has ended, too", 60)
        (printed,) = (folder / "store" / FOLDER).glob("spanning.rank-1.*.stdout")
        until(
            lambda: lines(printed)[-1:] == [f"rank 1: step {steps - 1}"], "all that it printed is there", 30
        )
        numbers = [int(line.removeprefix("rank 1: step ")) for line in lines(printed)]
        assert numbers == list(range(numbers[0], steps)) and numbers[0] <= far, numbers
        assert len(hosts["c"].shared_memory()) == 1


@pytest.mark.long
@pytest.mark.parametrize("when", ["before the loss", "while the rank is brought back"])
def test_rank_comes_back_though_proxyd_of_the_leading_host_is_started_anew(when: str, folder: Path) -> None:
    """From the image that the former one has taken: the training stands, so that there is no newer one."""
    skip_without_criu()
    native = native_losses(Training("char_gpt.py", 2, STEPS))
    with cluster({"a": 1, "b": 1, "c": 1}, *keeping_images(folder)) as hosts:
        a, report = hosts["a"], folder / "report.json"
        runs = train_until_there_is_an_image(hosts, folder, "--report", str(report))
        if when == "before the loss":
            a.proxyd.kill()
            a.start_proxyd()
            until(lambda: image_step(hosts) > 0, "its successor knows the image", 60, 0.2)
        power_off(hosts, "b")
        if when != "before the loss":
            until(lambda: "a host of a job is given up" in a.log.read_text(), "it is given up", 120, 0.01)
            a.proxyd.kill()
            a.start_proxyd()
        let_it_go_on(folder)
        status = runs[0].wait(WAIT_S)
        assert status == 0, account(hosts, runs[0])
        until(lambda: not hosts["c"].status().ranks, "the other rank has ended, too", 60)
        assert losses_of(folder / "losses", 2) == native
        found = report_of(report)["recoveries"]
        assert ("host-lost", 1, True) in [(one["fault"], one["rank"], one["recovered"]) for one in found]


@pytest.mark.long
def test_rank_comes_back_again_when_the_host_to_which_it_came_is_lost_too(folder: Path) -> None:
    """Back to the first one, which has power again, and a new proxyd."""
    skip_without_criu()
    native = native_losses(Training("char_gpt.py", 2, STEPS))
    with cluster({"a": 1, "b": 1, "c": 1}, *keeping_images(folder)) as hosts:
        runs = train_until_there_is_an_image(hosts, folder)
        let_it_go_on(folder)
        power_off(hosts, "b")
        before = runs[0].steps()
        until(lambda: any(one.rank == 1 for one in hosts["c"].status().ranks), "it is at c", 120, 0.2)
        power_on(hosts, "b")
        until(lambda: runs[0].steps() > before, "the training goes on", 120, 0.2)
        power_off(hosts, "c")
        assert runs[0].wait(WAIT_S) == 0, account(hosts, runs[0])
        until(lambda: not hosts["b"].status().ranks, "the other rank has ended, too", 60)
        assert losses_of(folder / "losses", 2) == native


@pytest.mark.long
def test_all_ranks_of_a_host_come_back_though_each_spare_host_has_room_for_one(folder: Path) -> None:
    skip_without_criu()
    native = native_losses(Training("char_gpt.py", 4, STEPS))
    with cluster({"a": 2, "b": 2, "c": 1, "d": 1}, *keeping_images(folder)) as hosts:
        words = ["--steps", str(STEPS), "--losses", str(folder / "losses"), "--log-every", "1"]
        runs = hosts.start_ranks("ab", EXAMPLES / "char_gpt.py", words, each=2)
        until(lambda: image_step(hosts, 2) > 0 and image_step(hosts, 3) > 0, "there are images", 180, 0.2)
        power_off(hosts, "b")
        ended = runs[0].wait(WAIT_S)
        assert ended == 0, account(hosts, runs[0])
        until(lambda: not any(hosts[name].status().ranks for name in "cd"), "the others have ended, too", 60)
        assert losses_of(folder / "losses", 4) == native
        came = [hosts[name].log.read_text().count('"event": "a worker arrived"') for name in "cd"]
        assert came == [1, 1]


@pytest.mark.long
def test_without_another_device_the_job_ends_and_its_last_sentence_says_so(folder: Path) -> None:
    skip_without_criu()
    with cluster({"a": 1, "b": 1}, *keeping_images(folder)) as hosts:
        runs = train_until_there_is_an_image(hosts, folder, steps=100_000)
        let_it_go_on(folder, 100_000)
        power_off(hosts, "b")
        assert runs[0].wait(WAIT_S) != 0
        last = next(
            line for line in runs[0].errors if "host b is lost, and with it the worker of rank 1" in line
        )
        assert "no other host of the cluster has a free device for it" in last
        assert "is on storage" in last and "recoveryctl snapshots export" in last


@pytest.mark.long
def test_sharded_state_that_no_other_rank_holds_survives_a_killed_server_a_move_and_a_lost_host(
    folder: Path,
) -> None:
    skip_without_criu()
    script, limit, steps = WORKLOADS / "sharded_training.py", folder / "limit", 200
    words = ["--steps", str(steps), "--out"]
    ended = run(
        torchrun(2, script, *words, str(folder / "undisturbed")),
        folder=folder,
        options=("--devices", "cpu:2"),
    )
    assert ended.status == 0, ended.output[-3000:]
    out = folder / "moved"
    with cluster({"a": 1, "b": 1, "c": 1}, *keeping_images(folder)) as hosts:
        let(limit, "12")
        drill = ("--drill", "kill-server rank=1 step=5 call=60")
        words += [str(out), "--limit", str(limit)]
        runs = hosts.start_ranks("ab", script, words, *drill, "--report", str(folder / "report.json"))
        until(
            lambda: len(lines(folder / "moved.1")) == 12, "a server was killed, and the training went on", 120
        )
        moved = hosts["a"].recoveryctl("migrate", "--rank", "1", "--to", "c")
        assert moved.returncode == 0, moved.stderr
        far = go_on_until_there_is_an_image(hosts, limit) + 8
        let(limit, str(far))
        until(lambda: len(lines(folder / "moved.1")) == far, "the training has gone on", 60)
        power_off(hosts, "c")
        let(limit, str(steps))
        assert runs[0].wait(WAIT_S) == 0, account(hosts, runs[0])
        until(lambda: not hosts["b"].status().ranks, "the other rank has ended, too", 60)
    for rank in (0, 1):
        assert lines(folder / f"moved.{rank}") == lines(folder / f"undisturbed.{rank}")
    found = report_of(folder / "report.json")["recoveries"]
    assert [one["fault"] for one in found] == ["server-died", "planned-move", "host-lost"]
    assert all(one["recovered"] for one in found)
