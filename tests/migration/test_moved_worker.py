"""A worker is dumped, ends, and is restored in place: its losses are those of an undisturbed run."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest
from migratable_run import MigratableRun, skip_without_criu
from proxied import WORKLOADS, left_behind, python, until

from understudy.recovery.base.errors import ExitStatus

pytestmark = pytest.mark.drawn(10)

BELONGINGS = WORKLOADS / "migration" / "belongings.py"

STEPS, LONG = 30, 150


@pytest.fixture(autouse=True)
def _criu() -> None:
    skip_without_criu()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Losses of the longest run that nothing happens to; shorter ones begin as it does."""
    skip_without_criu()
    with MigratableRun(tmp_path_factory.mktemp("undisturbed")) as run:
        run.train(LONG, LONG, migratable=False)
        run.finish()
        return run.losses()


def test_a_training_with_a_data_loader_goes_on_bit_for_bit_after_two_moves(
    tmp_path: Path, expected: list[list[str]]
) -> None:
    with MigratableRun(tmp_path / "moved") as run:
        run.train(STEPS, 10)
        run.await_step(10)
        pids = [run.rank().worker_pid]
        for limit in (20, STEPS):
            assert "its worker was moved in" in run.move()
            pids.append(run.rank().worker_pid)
            run.let(limit)
            run.await_step(limit)
        output, errors = run.finish()
        assert run.losses() == [expected[0][:STEPS]]
        assert len(set(pids)) == 3, "each time another process, as proxyd sees it"
        assert output.splitlines() == [f"rank 0: step {step}" for step in range(STEPS)]
        assert "rank 0: pid 2 done" in errors, "and the same one, as the worker sees it"
        assert not list(run.folder.glob("understudy-images-*"))
    assert left_behind() == []


def test_a_worker_is_moved_while_it_computes(tmp_path: Path, expected: list[list[str]]) -> None:
    with MigratableRun(tmp_path / "moved") as run:
        run.train(LONG, LONG)
        run.await_step(3)
        assert not (reply := run.move_at_once()).error, reply
        run.finish()
        assert run.losses() == expected


def test_a_device_server_that_dies_after_a_move_is_replaced_as_ever(
    tmp_path: Path, expected: list[list[str]]
) -> None:
    with MigratableRun(tmp_path / "moved") as run:
        run.train(STEPS, 10)
        run.await_step(10)
        run.move()
        assert run.recoveryctl("drill", "kill-server", "--rank", "0").returncode == 0
        until(lambda: run.rank().recoveries == 1, "a recovery")
        run.finish()
        assert run.losses() == [expected[0][:STEPS]]


def test_a_proxyd_that_took_over_moves_workers_too(tmp_path: Path, expected: list[list[str]]) -> None:
    with MigratableRun(tmp_path / "moved") as run:
        run.train(STEPS, 10)
        run.await_step(10)
        run.move()
        run.replace_proxyd()
        until(lambda: run.rank().state == "running", "it was adopted")
        run.move()
        run.finish()
        assert run.losses() == [expected[0][:STEPS]]


def test_a_worker_that_dies_after_a_move_ends_the_run_as_its_launcher_expects(tmp_path: Path) -> None:
    with MigratableRun(tmp_path / "moved") as run:
        run.train(STEPS, 5)
        run.await_step(5)
        run.move()
        order = ("drill", "kill-worker", "--rank", "0", "--even-if-it-ends-the-job")
        assert run.recoveryctl(*order).returncode == 0
        assert run.run is not None
        assert run.run.wait(60) == 128 + 9
    assert left_behind() == []


def test_a_worker_without_a_relay_is_refused_and_trains_on(tmp_path: Path) -> None:
    with MigratableRun(tmp_path / "run") as run:
        run.train(STEPS, 5, migratable=False)
        run.await_step(5)
        done = run.recoveryctl("migrate", "--rank", "0")
        assert done.returncode == ExitStatus.REFUSED
        assert "start the run with proxyrun --migratable" in done.stderr
        run.finish()


def test_a_rank_under_torchrun_is_moved_although_it_belongs_to_a_group(tmp_path: Path) -> None:
    with MigratableRun(tmp_path / "undisturbed", ranks=2) as run:
        run.train(STEPS, STEPS, migratable=False)
        run.finish()
        expected = run.losses()
    with MigratableRun(tmp_path / "moved", ranks=2) as run:
        run.train(STEPS, 10)
        run.await_step(10)
        assert run.recoveryctl("preflight").stdout == "nothing: 2 workers could be moved\n"
        run.move(1)
        run.finish()
        assert run.losses() == expected


def test_threads_files_memory_and_children_of_a_worker_come_along(tmp_path: Path) -> None:
    with MigratableRun(tmp_path / "run") as run:
        run.start(python(BELONGINGS, str(tmp_path)))
        until((tmp_path / "ready").exists, "a worker with its belongings")
        run.move()
        (tmp_path / "go").touch()
        assert run.finish()[0] == "all there True\n"


def test_what_cannot_be_dumped_refuses_the_move_and_the_worker_runs_on(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = (
            "import pathlib, socket, sys, time, torch\n"
            f"s = socket.create_connection(('127.0.0.1', {port}))\n"
            "x = torch.ones(2, device='cuda'); print(x.sum().item(), flush=True)\n"
            "folder = pathlib.Path(sys.argv[1]); (folder / 'ready').touch()\n"
            "while not (folder / 'go').exists(): time.sleep(0.01)\n"
            "print((x + 1).sum().item())"
        )
        with MigratableRun(tmp_path / "run") as run:
            run.start([*python("-c"), code, str(tmp_path)])
            until((tmp_path / "ready").exists, "a worker with a connection")
            done = run.recoveryctl("migrate", "--rank", "0")
            assert done.returncode == ExitStatus.REFUSED
            assert f"is a TCP connection to 127.0.0.1:{port}" in done.stderr
            (tmp_path / "go").touch()
            assert run.finish()[0] == "2.0\n4.0\n"


def test_a_disk_that_fills_up_amid_a_dump_refuses_the_move_and_the_worker_trains_on(
    tmp_path: Path, expected: list[list[str]]
) -> None:
    tiny = tmp_path / "tiny"
    tiny.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(tiny)]
    if subprocess.run(mounted, capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        with MigratableRun(tmp_path / "run") as run:
            run.train(STEPS, 10)
            run.await_step(10)
            worker = run.rank().worker_pid
            done = run.recoveryctl("migrate", "--rank", "0", "--images", str(tiny))
            assert (done.returncode, done.stdout) == (ExitStatus.REFUSED, "")
            said = " ".join(done.stderr.split())
            assert f"the worker of rank 0 was not moved: there is no room for its images in {tiny}" in said
            assert not list(tiny.iterdir())
            assert run.rank().worker_pid == worker
            run.finish()
            assert run.losses() == [expected[0][:STEPS]]
    finally:
        subprocess.run(["umount", "--lazy", str(tiny)], check=True)
