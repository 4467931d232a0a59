"""Former runs of a job go once the present one has a complete set; never what somebody needs."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import proxied
import pytest
from mirrors import JOB, Stores
from proxied import until
from running_proxyd import running_proxyd
from training_run import installed

from understudy.recovery.base.errors import BadInput
from understudy.recovery.config.proxyd_settings import settings_of
from understudy.recovery.snapshots import Store
from understudy.recovery.snapshots.stores.catalogue import StoredSet, read_catalogue
from understudy.recovery.snapshots.stores.layout import in_use, store_path
from understudy.recovery.snapshots.stores.old_runs import remove_old_runs
from understudy.recovery.snapshots.writing.writer import RunStores


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Four runs, each with a complete set, the newest last."""
    stores = Stores(tmp_path)
    for run in ("a", "b", "c", "d"):
        stores.put(1, run=run)
    return tmp_path / JOB


def runs(job: Path) -> list[str]:
    return sorted(path.name for path in job.iterdir())


def test_the_newest_runs_stay(job: Path) -> None:
    assert remove_old_runs(job, "d", 3) == ["a"]
    assert runs(job) == ["b", "c", "d"]
    assert remove_old_runs(job, "d", 1) == ["b", "c"]
    assert runs(job) == ["d"]


def test_nothing_goes_while_the_present_run_has_no_complete_set(job: Path) -> None:
    path = store_path(job / "d", 1, 0)
    path.unlink()
    assert remove_old_runs(job, "d", 1) == []
    assert runs(job) == ["a", "b", "c", "d"]


def test_where_hosts_have_storage_of_their_own_the_parts_that_are_here_count(job: Path) -> None:
    for run in ("a", "b", "c", "d"):
        store_path(job / run, 1, 0).unlink()
    assert remove_old_runs(job, "d", 2) == []
    assert remove_old_runs(job, "d", 2, parts_on_other_hosts=True) == ["a", "b"]


def test_where_storage_is_shared_a_run_that_lacks_parts_is_not_kept_for_a_whole_one(job: Path) -> None:
    store_path(job / "c", 1, 0).unlink()
    assert remove_old_runs(job, "d", 2, parts_on_other_hosts=True) == ["a", "c"]
    assert runs(job) == ["b", "d"]


def test_a_run_that_is_read_or_written_stays(job: Path) -> None:
    with in_use(job / "a"), Store.open(store_path(job / "b", 0, 0)):
        assert remove_old_runs(job, "d", 1) == ["c"]
    assert runs(job) == ["a", "b", "d"]
    stores = RunStores(job / "a", range(2), 2, 3)
    assert remove_old_runs(job, "d", 1) == ["b"]
    stores.close()
    assert remove_old_runs(job, "d", 1) == ["a"]


def test_a_run_with_a_store_that_cannot_be_read_is_left_to_a_person(job: Path) -> None:
    with open(store_path(job / "a", 0, 0), "r+b") as file:
        file.write(bytes(8192))
    assert remove_old_runs(job, "d", 1) == ["b", "c"]
    assert runs(job) == ["a", "d"]


def test_a_former_run_without_a_complete_set_is_no_reason_to_let_go_of_one_that_has(job: Path) -> None:
    for run in ("b", "c"):
        store_path(job / run, 1, 0).unlink()
    assert remove_old_runs(job, "d", 2) == ["b", "c"]
    assert runs(job) == ["a", "d"]


def test_what_is_no_store_stays_with_its_directory_and_links_are_not_followed(
    job: Path, tmp_path: Path
) -> None:
    (job / "a" / "notes.txt").write_text("mine")
    (job / "mine").mkdir()
    elsewhere = tmp_path / "elsewhere"
    (job / "b").rename(elsewhere)
    (job / "b").symlink_to(elsewhere)
    assert remove_old_runs(job, "d", 1) == ["a", "c"]
    assert os.listdir(job / "a") == ["notes.txt"]
    assert runs(job) == ["a", "b", "d", "mine"] and store_path(elsewhere, 0, 0).exists()


def test_less_than_the_present_run_cannot_be_kept(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--keep-runs 0 is not possible"):
        settings_of(["--devices", "cpu:1", "--persist", str(tmp_path), "--keep-runs", "0"])


@pytest.mark.drawn(3)
def test_a_run_that_torchrun_started_again_replaces_the_former_once_it_has_a_complete_set(
    tmp_path: Path,
) -> None:
    store, socket = tmp_path / "store", tmp_path / "socket"
    torchrun = proxied.torchrun(1, proxied.WORKLOADS / "restarting.py", str(tmp_path))
    torchrun[2:2] = ["--max-restarts", "1"]
    persist = ("--persist", str(store), "--persist-every", "1", "--keep-runs", "1")
    with running_proxyd(socket, 1, persist) as proxyd:
        command = [*installed("proxyrun"), "--socket", str(socket), *torchrun]
        run = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            seen: set[str] = set()

            def another_run_alone() -> bool:
                assert run.poll() is None and proxyd.process.poll() is None
                held = {one.run for one in complete_sets(store)}
                return len(held) == 1 and not held & seen

            until(another_run_alone, "a complete snapshot")
            seen |= {one.run for one in complete_sets(store)}
            (tmp_path / "0").touch()  # the first attempt fails
            until(another_run_alone, "a complete snapshot of the second attempt, and none of the first")
            (tmp_path / "end").touch()
            assert run.wait(60) == 0
        finally:
            run.terminate()
            run.wait(60)
    (kept,) = runs(next(store.iterdir()))
    assert {kept} == {one.run for one in complete_sets(store)} and kept not in seen


def complete_sets(store: Path) -> list[StoredSet]:
    """Of what is there at this moment."""
    with contextlib.suppress(FileNotFoundError):  # a run is being removed
        return [one for one in read_catalogue(store).sets if one.complete]
    return []
