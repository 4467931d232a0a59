"""Snapshots on storage of a job on several hosts: each writes its ranks' parts, and a set is all of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import proxied
import pytest
import torch
from host_cluster import Cluster, HostRun, cluster
from migratable_run import skip_without_criu
from proxied import until
from test_snapshot_export import assert_same
from training_run import execute_natively

from understudy.recovery.base.own_modules import module_command
from understudy.recovery.snapshots.restore.checking import problems_of
from understudy.recovery.snapshots.stores.catalogue import StoredSet, read_catalogue

SCRIPT = proxied.WORKLOADS / "resumable.py"
EVERY = 20
MORE = 15
SLOWLY = ["--layers", "16"]
"""So that a native run gets there in seconds, too."""
WAIT_S = 240


def train(hosts: Cluster, names: str, steps: int, folder: Path, **more: Any) -> list[HostRun]:
    more["arguments"] = [*SLOWLY, *more.get("arguments", ())]
    return hosts.train(names, steps, folder / "losses", script=SCRIPT, **more)


def sets(store: Path) -> list[StoredSet]:
    return list(read_catalogue(store).sets) if store.exists() else []


def persisted_step(hosts: Cluster, name: str = "a") -> int:
    return min((rank.persisted_step for rank in hosts[name].status().ranks), default=0)


def native(folder: Path, name: str, steps: int, ranks: int = 2) -> Path:
    """The same training without us; the state at its end."""
    words = ["--steps", str(steps), "--save", str(folder / name), "--losses", str(folder / f"{name}.losses")]
    words += SLOWLY
    execute_natively(proxied.torchrun(ranks, SCRIPT, *words), timeout_s=120)
    return folder / name


def export(*words: str, at: Path) -> int:
    """By that command of recoveryctl; the step that it says."""
    done = subprocess.run(
        [*module_command("recovery.recoveryctl"), *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    about = json.loads((at / "snapshot.json").read_text())
    assert about["omitted"] == [] and about["one_for_all_ranks"]
    return int(about["step"])


def assert_bits(exported: Path, state: Path) -> None:
    wanted = torch.load(state)
    assert_same(dict(torch.load(exported / "model.pt")), dict(wanted["model"]))
    assert_same(torch.load(exported / "optimizer.pt"), wanted["optimizer"])


def end(runs: list[HostRun]) -> None:
    for run in runs:
        run.process.terminate()
    for run in runs:
        run.wait(WAIT_S)


def told(run: HostRun, beginning: str) -> str:
    """The end of the first line of its errors in which that is said."""
    return next((line.partition(beginning)[2] for line in run.errors if beginning in line), "")


@pytest.mark.long
@pytest.mark.timeout(480)
def test_a_host_is_lost_and_the_training_goes_on_from_the_set_that_its_end_names(folder: Path) -> None:
    store = folder / "store"
    options = ("--persist", str(store), "--persist-every", f"{EVERY}steps")
    with cluster({"a": 1, "b": 1, "c": 1}, *options) as hosts:
        runs = train(hosts, "ab", 1_000_000, folder)
        until(lambda: persisted_step(hosts) > 0, "a durable set", 120)
        until(lambda: persisted_step(hosts, "b") > 0, "b knows of one", 30)
        hosts.net.cut_data("b")
        hosts.net.cut("b")
        assert runs[0].wait(WAIT_S) != 0
        sentence = told(runs[0], "host b is lost, and with it the worker of rank 1")
        found = re.search(r"step (\d+) is on storage, .* `recoveryctl (.*?)`", sentence)
        assert found is not None, runs[0].errors[-30:]
        step = int(found[1])
        hosts.net.heal("b")
        hosts.net.heal_data("b")
        end(runs[1:])

        stored = next(one for one in sets(store) if one.complete)
        assert (stored.step, set(stored.parts)) == (step, {0, 1}) and step % EVERY == 0
        assert problems_of(stored) == []
        words = [str(folder / "exported") if word == "OUT" else word for word in found[2].split()]
        assert export(*words, at=folder / "exported") == step
        assert_bits(folder / "exported", native(folder, "then", step))

        again = train(hosts, "ac", step + MORE, folder, arguments=["--resume", str(folder / "exported")])
        assert [run.wait(WAIT_S) for run in again] == [0, 0], [run.errors[-20:] for run in again]
        native(folder, "later", step + MORE)
        undisturbed = (folder / "later.losses").read_text().split()
        assert (folder / "losses").read_text().split() == undisturbed[-MORE:]


@pytest.mark.long
def test_members_of_a_leading_host_that_is_lost_name_the_set_too(folder: Path) -> None:
    store = folder / "store"
    options = ("--persist", str(store), "--persist-every", f"{EVERY}steps")
    with cluster({"a": 1, "b": 1, "c": 1}, *options) as hosts:
        runs = train(hosts, "ab", 1_000_000, folder)
        until(lambda: persisted_step(hosts, "b") > 0, "b knows of a durable set", 120)
        hosts.net.cut_data("a")
        hosts.net.cut("a")
        assert runs[1].wait(WAIT_S) != 0
        sentence = told(runs[1], "host a leads job spanning no more: it is lost")
        assert f"`recoveryctl snapshots export {store} OUT --job spanning`" in sentence, runs[1].errors[-30:]
        found = re.search(r"step (\d+) is on storage", sentence)
        hosts.net.heal("a")
        hosts.net.heal_data("a")
        end(runs[:1])
    assert found is not None
    assert int(found[1]) in {one.step for one in sets(store) if one.complete}


@pytest.mark.long
def test_parts_on_disks_of_each_host_are_a_set_once_they_lie_in_one_directory(folder: Path) -> None:
    options = ("--persist", "/run/store", "--persist-every", f"{EVERY}steps")
    with cluster({"a": 1, "b": 1}, *options) as hosts:
        runs = train(hosts, "ab", 1_000_000, folder)
        until(lambda: persisted_step(hosts) > 0, "a durable set", 120)
        reached = persisted_step(hosts)
        end(runs)
        for name, rank in (("a", 0), ("b", 1)):
            found = sets(hosts[name].path("/run/store"))
            assert found and all(set(one.parts) == {rank} for one in found)
            shutil.copytree(hosts[name].path("/run/store"), folder / "together", dirs_exist_ok=True)
    newest = next(one for one in sets(folder / "together") if one.complete)
    assert newest.step >= reached and problems_of(newest) == []
    step = export(
        "snapshots", "export", str(folder / "together"), str(folder / "exported"), at=folder / "exported"
    )
    assert_bits(folder / "exported", native(folder, "then", step))


def newer_set(hosts: Cluster, after: str) -> None:
    """Becomes durable: of a step that no rank has begun by now."""
    begun = max(rank.step for rank in hosts["a"].status().ranks)
    until(lambda: persisted_step(hosts) > begun, f"a newer set after {after}", 60)


@pytest.mark.long
@pytest.mark.timeout(480)
def test_sets_become_complete_again_when_a_rank_has_moved_and_a_member_has_died_and_a_link_was_cut(
    folder: Path,
) -> None:
    skip_without_criu()
    store = folder / "store"
    options = ("--persist", str(store), "--persist-every", f"{EVERY}steps")
    with cluster({"a": 1, "b": 1, "c": 1}, *options) as hosts:
        runs = train(hosts, "ab", 1_000_000, folder, options=["--migratable"])
        until(lambda: persisted_step(hosts) > 0, "a durable set", 120)

        hosts.net.cut("b")
        until(lambda: "a host of a job is not reached" in hosts["a"].log.read_text(), "it is missed", 60)
        hosts.net.heal("b")
        newer_set(hosts, "the link was cut")

        done = hosts["a"].recoveryctl("migrate", "--rank", "1", "--to", "c:cpu:0")
        assert done.returncode == 0, done.stderr
        newer_set(hosts, "rank 1 has moved")

        hosts["c"].proxyd.kill()
        hosts["c"].start_proxyd()
        newer_set(hosts, "the proxyd of its host died")

        hosts["a"].proxyd.kill()
        hosts["a"].start_proxyd()
        until(lambda: len(hosts["a"].status().ranks) == 2, "both ranks are known again", 60)
        newer_set(hosts, "the leading proxyd died")
        reached = persisted_step(hosts)
        end(runs)
    newest = next(one for one in sets(store) if one.complete)
    assert newest.step >= reached and problems_of(newest) == []
    step = export("snapshots", "export", str(store), str(folder / "exported"), at=folder / "exported")
    assert step == newest.step
    assert_bits(folder / "exported", native(folder, "then", step))


@pytest.mark.long
def test_rank_of_a_job_of_one_host_writes_on_where_it_has_moved_to(folder: Path) -> None:
    skip_without_criu()
    store = folder / "store"
    options = ("--persist", str(store), "--persist-every", f"{EVERY}steps")
    with cluster({"a": 1, "b": 1}, *options) as hosts:
        runs = train(hosts, "a", 1_000_000, folder, options=["--migratable"])
        until(lambda: persisted_step(hosts) > 0, "a durable set", 120)
        done = hosts["a"].recoveryctl("migrate", "--rank", "0", "--to", "b:cpu:0")
        assert done.returncode == 0, done.stderr
        newer_set(hosts, "its rank has moved")
        reached = persisted_step(hosts)
        end(runs)
    newest = next(one for one in sets(store) if one.complete)
    assert newest.step >= reached and problems_of(newest) == []
    step = export("snapshots", "export", str(store), str(folder / "exported"), at=folder / "exported")
    assert_bits(folder / "exported", native(folder, "then", step, ranks=1))
