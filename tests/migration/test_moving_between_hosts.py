"""A worker goes from host to host while it runs; whoever watches its relay sees one worker."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from migratable_run import skip_without_criu
from moving_hosts import LOADING, Counted, MovingHost, check_output, moving_hosts, nothing_left
from proxied import until

pytestmark = pytest.mark.drawn(16)


@pytest.fixture
def folder(folder: Path) -> Path:
    """That of all tests."""
    skip_without_criu()
    return folder


@pytest.fixture
def images(folder: Path) -> Path:
    """A directory for them, that a test fills."""
    (made := folder / "images").mkdir()
    return made


@contextmanager
def counting_at_a(folder: Path) -> Iterator[tuple[Counted, MovingHost, MovingHost]]:
    """A worker, its host, and another host."""
    with moving_hosts(folder, "a", "b") as (a, b):
        worker = Counted(a, folder)
        worker.await_lines()
        yield worker, a, b


def end(worker: Counted) -> None:
    """It must come to its end as if it had never moved."""
    (worker.folder / "end").touch()
    assert worker.wait() == 7, worker.errors()
    check_output(worker)


def end_unseen(worker: Counted) -> None:
    """The same where whoever started its relay has been killed, so nobody waits for that."""
    (worker.folder / "end").touch()
    until(lambda: worker.lines()[-1] == "done" and worker.errors().endswith("\n"), "its end")
    check_output(worker)


def moved(worker: Counted, source: MovingHost, to: MovingHost) -> dict[str, Any]:
    done = worker.send(source, to)
    assert "error" not in done, done
    return done


# ------------------------------------------------------------------ there and back
def test_a_worker_moves_to_another_host_and_ends_there_as_its_launcher_expects(folder: Path) -> None:
    with counting_at_a(folder) as (worker, a, b):
        done = moved(worker, a, b)
        assert done["bytes"] > 0
        assert done["total_s"] > done["dump_s"] + done["ship_s"] + done["restore_s"] > 0
        worker.await_lines()
        assert b.order("events")["events"] == [["arrived", 0, "of the lead's"]]
        assert len(a.processes()) == 2, "only the relay and its init are left there"
        end(worker)
        nothing_left(a, b)
        until(lambda: b.order("events")["events"][1:] == [["left", 0, "ended"]], "b knows")


def test_a_worker_moves_to_and_fro_and_nothing_grows(folder: Path) -> None:
    with moving_hosts(folder, "a", "b") as (a, b):
        worker = Counted(a, folder, 0, "200")
        worker.await_lines()
        open_files = []
        for source, to in [(a, b), (b, a)] * 3:
            moved(worker, source, to)
            worker.await_lines()
            open_files.append((a.order("files")["descriptors"], b.order("files")["descriptors"]))
        assert open_files[1] == open_files[3] == open_files[5]
        assert not b.processes()
        end(worker)
        nothing_left(a, b)


def test_of_two_workers_that_are_sent_to_one_device_at_once_the_other_goes_on_where_it_was(
    folder: Path,
) -> None:
    with moving_hosts(folder, "a", "b", b={"DEVICES": "1"}) as (a, b), ThreadPoolExecutor() as pool:
        workers = [Counted(a, folder, rank) for rank in (0, 1)]
        for worker in workers:
            worker.await_lines()
        sent = [pool.submit(worker.send, a, b) for worker in workers]
        refused = [one.result().get("error", "") for one in sent]
        assert sorted(error != "" for error in refused) == [False, True], refused
        assert "host b: it has no free device" in "".join(refused)
        for worker in workers:
            worker.await_lines()
        assert len(b.order("events")["events"]) == 1
        end(workers[0])
        assert workers[1].wait() == 7
        check_output(workers[1])
        nothing_left(a, b)


@pytest.mark.parametrize(("ahead_a", "ahead_b"), [("0", "1000000"), ("1000000", "0")])
def test_the_clocks_of_a_worker_go_on_whatever_the_hosts_clocks_are(
    ahead_a: str, ahead_b: str, folder: Path
) -> None:
    a_has, b_has = {"CLOCK_AHEAD_S": ahead_a}, {"CLOCK_AHEAD_S": ahead_b}
    with moving_hosts(folder, "a", "b", a=a_has, b=b_has) as (a, b):
        worker = Counted(a, folder)
        worker.await_lines()
        for source, to in [(a, b), (b, a), (a, b)]:
            moved(worker, source, to)
            worker.await_lines()
        end(worker)
        nothing_left(a, b)


def test_a_worker_goes_on_to_a_third_host_and_then_home(folder: Path) -> None:
    with moving_hosts(folder, "a", "b", "c") as (a, b, c):
        worker = Counted(a, folder)
        worker.await_lines()
        for source, to in [(a, b), (b, c), (c, a), (a, c), (c, b)]:
            moved(worker, source, to)
            worker.await_lines()
        assert [how for *_, how in b.order("events")["events"]] == [
            "of the lead's", "moved to c", "of the lead's",
        ]  # fmt: skip
        end(worker)
        nothing_left(a, b, c)


def test_a_data_loader_with_processes_of_its_own_moves_along(folder: Path) -> None:
    with moving_hosts(folder, "a", "b") as (a, b):
        worker = Counted(a, folder, script=LOADING)
        worker.await_lines()
        for source, to in [(a, b), (b, a), (a, b)]:
            moved(worker, source, to)
            worker.await_lines()
        end(worker)
        nothing_left(a, b)


def test_two_workers_of_one_host_move_at_once(folder: Path) -> None:
    with moving_hosts(folder, "a", "b") as (a, b), ThreadPoolExecutor() as pool:
        workers = [Counted(a, folder, rank) for rank in (0, 1)]
        for worker in workers:
            worker.await_lines()
        for source, to in ((a, b), (b, a), (a, b)):
            for done in list(pool.map(lambda worker, s=source, t=to: worker.send(s, t), workers)):
                assert "error" not in done, done
        (folder / "end").touch()
        for worker in workers:
            assert worker.wait() == 7
            check_output(worker)
        nothing_left(a, b)


# ------------------------------------------------------------------ signals and ends
def test_signals_reach_a_worker_that_is_away_each_of_them_once(folder: Path) -> None:
    with counting_at_a(folder) as (worker, a, b):
        for sent, (source, to) in enumerate([(a, b), (b, a), (a, b)], 1):
            moved(worker, source, to)
            worker.signal(signal.SIGUSR1)
            worker.await_signals(sent)
        worker.await_lines()
        assert worker.lines().count("signal") == 3
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 5
        assert worker.lines()[-1] == "leaves"
        nothing_left(a, b)


@pytest.mark.parametrize("then", ["go on", "kill"])
def test_a_signal_that_comes_while_a_worker_is_stopped_reaches_it_wherever_it_goes_on(
    then: str, folder: Path
) -> None:
    with moving_hosts(folder, "a", "b") as (a, b), ThreadPoolExecutor() as pool:
        worker = Counted(a, folder)
        worker.await_lines()
        b.order("trap", FinishMove="wait")
        sending = pool.submit(worker.send, a, b)
        until(lambda: b.order("waits")["waits"] or sending.done(), "it is stopped, and there")
        assert not sending.done(), sending.result()
        worker.signal(signal.SIGUSR1)
        if then == "kill":
            b.kill()
        else:
            b.order("go on")
        assert ("error" in sending.result()) == (then == "kill")
        worker.await_signals(1)
        worker.await_lines()
        assert worker.lines().count("signal") == 1
        end(worker)
        nothing_left(a)


def test_a_worker_that_is_killed_elsewhere_takes_its_relay_along(folder: Path) -> None:
    with counting_at_a(folder) as (worker, a, b):
        moved(worker, a, b)
        os.kill(int(b.order("pid", relay=worker.relay)["pid"]), signal.SIGKILL)
        assert worker.wait() == -signal.SIGKILL
        nothing_left(a, b)


def test_a_relay_that_is_killed_ends_its_worker_elsewhere(folder: Path) -> None:
    with counting_at_a(folder) as (worker, a, b):
        moved(worker, a, b)
        worker.signal(signal.SIGKILL)
        worker.wait()
        nothing_left(a, b)
        until(lambda: b.order("events")["events"][1:] == [["left", 0, "dropped"]], "b knows")


def test_a_relay_that_is_killed_while_its_proxyd_is_dead_ends_its_worker_elsewhere(folder: Path) -> None:
    with moving_hosts(folder, "a", "b", b={"UNFOLLOWED_S": "0.5"}) as (a, b):
        worker = Counted(a, folder)
        worker.await_lines()
        moved(worker, a, b)
        a.kill()
        for pid in a.processes():
            os.kill(pid, signal.SIGKILL)
        until(lambda: not a.processes(), "its relay is gone")
        a.run("rm", "-r", worker.relay)  # as its launcher does
        notes = folder / "notes.0"
        before = notes.read_text().count("\n")
        until(lambda: notes.read_text().count("\n") > before + 100, "it goes on while nobody answers")
        a.start_again()
        nothing_left(a, b)
        assert b.order("events")["events"][1:] == [["left", 0, "dropped"]]


def test_a_host_that_is_stopped_in_order_ends_workers_of_others_and_their_relays(folder: Path) -> None:
    with counting_at_a(folder) as (worker, a, b):
        moved(worker, a, b)
        worker.await_lines()
        b.process.terminate()
        assert worker.wait() == -signal.SIGKILL
        assert worker.errors() == "proxyrun: host b has ended it\n"
        b.process.wait()
        nothing_left(a)
        assert not b.processes()


def test_a_host_that_is_stopped_in_order_ends_its_workers_elsewhere(folder: Path) -> None:
    with counting_at_a(folder) as (worker, a, b):
        moved(worker, a, b)
        worker.await_lines()
        a.process.terminate()
        nothing_left(b)
        a.process.wait()
        assert worker.errors() == "proxyrun: proxyd was stopped\n"
        assert not a.processes()


# ------------------------------------------------------------------ moves that fail
def test_a_worker_stays_where_the_other_host_cannot_take_it(folder: Path) -> None:
    with counting_at_a(folder) as (worker, a, b):
        cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
            ({"kernel": "Linux 3.10 x86_64"}, {}, "an older one, 3.10"),
            ({"kernel": "Linux 9.9 riscv64"}, {}, "and here is Linux 9.9 riscv64"),
            ({"features": []}, {}, "lacks"),
            ({}, {"torch_version": "1.13"}, "and here is 1.13"),
            ({}, {"criu": None}, "no CRIU"),
        ]
        for machine, here, words in cases:
            b.order("lacks", machine=machine, here=here)
            done = worker.send(a, b)
            assert words in done["error"], done
            assert done["error"].startswith("the worker of rank 0 was not moved: host b: ")
            b.order("lacks", machine={}, here={})
            worker.await_lines()
        moved(worker, a, b)
        end(worker)
        nothing_left(a, b)


def test_a_full_disk_at_the_destination_is_told_and_the_worker_goes_on(folder: Path, images: Path) -> None:
    with moving_hosts(folder, "a", "b", b={"IMAGES": str(images)}) as (a, b):
        worker = Counted(a, folder, 0, "100")
        worker.await_lines()
        b.run("mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(images))
        done = worker.send(a, b)
        assert f"{images} has 80 MiB left" in done["error"], done
        b.run("mount", "-o", "remount,size=1g", str(images))
        b.run("mount", "-o", "remount,size=70m", "/dev/shm")
        done = worker.send(a, b)
        assert "/dev/shm" in done["error"] and "left" in done["error"], done
        b.run("mount", "-o", "remount,size=1g", "/dev/shm")
        b.order("trap", part="fill")
        done = worker.send(a, b)
        assert f"{images} is full" in done["error"], done
        b.run("rm", f"{images}/filler")
        worker.await_lines()
        moved(worker, a, b)
        end(worker)
        nothing_left(a, b)


def test_a_full_disk_at_the_source_is_told_before_anything_is_stopped(folder: Path, images: Path) -> None:
    with moving_hosts(folder, "a", "b", a={"IMAGES": str(images)}) as (a, b):
        worker = Counted(a, folder, 0, "100")
        worker.await_lines()
        a.run("mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(images))
        assert f"{images} has 80 MiB left, and its images may need" in worker.send(a, b)["error"]
        end(worker)


def test_a_worker_with_a_file_that_only_its_host_has_stays_there(folder: Path) -> None:
    with moving_hosts(folder, "a", "b") as (a, b):
        worker = Counted(a, folder, 0, "1", "/dev/shm/only-here")
        worker.await_lines()
        error = worker.send(a, b)["error"]
        assert "only-here" in error
        worker.await_lines()
        end(worker)
        nothing_left(a, b)


def test_a_worker_that_has_locked_a_file_for_itself_is_not_stopped(folder: Path) -> None:
    with moving_hosts(folder, "a", "b") as (a, b):
        worker = Counted(a, folder, 0, "1", f"{folder}/locked")
        worker.await_lines()
        assert f"holds {folder}/locked locked for itself" in worker.send(a, b)["error"]
        end(worker)


@pytest.mark.parametrize(
    ("trap", "words"),
    [
        ({"part": "damage"}, "has not the content that it was sent with"),
        ({"part": "kill"}, "does not answer"),
        ({"FinishMove": "kill"}, "does not answer"),
        ({"FinishMove": "kill after"}, "does not answer"),
    ],
    ids=["damaged chunk", "killed before READY", "killed after READY", "killed after RESTORED"],
)
def test_a_move_that_breaks_off_leaves_the_worker_where_it_was(
    trap: dict[str, str], words: str, folder: Path
) -> None:
    with counting_at_a(folder) as (worker, a, b):
        b.order("trap", **trap)
        assert words in worker.send(a, b)["error"]
        assert a.order("where", relay=worker.relay)["state"] == "running"
        worker.await_lines()
        until(lambda: not b.processes(), "no copy is left")
        if b.process.poll() is not None:
            b.start_again()
        moved(worker, a, b)
        end(worker)
        nothing_left(a, b)


# ------------------------------------------------------------------ proxyds that die
def test_a_worker_whose_proxyd_dies_while_it_is_stopped_goes_on_by_itself(folder: Path) -> None:
    with moving_hosts(folder, "a", "b", b={"DECISION_S": "1"}) as (a, b):
        worker = Counted(a, folder)
        worker.await_lines()
        b.order("trap", ReceiveWorker="hang")
        with ThreadPoolExecutor() as pool:
            sending = pool.submit(worker.send, a, b, patience_s=5.0)
            until(lambda: sending.done() or place(worker) == "dumped", "it is stopped")
            assert not sending.done(), sending.result()
            a.kill()
            sending.exception()
        before = len(worker.lines())
        until(lambda: len(worker.lines()) > before + 10, "it counts on")
        end_unseen(worker)
        nothing_left(b)


def test_a_source_whose_proxyd_dies_in_doubt_has_one_worker_in_the_end(folder: Path) -> None:
    with counting_at_a(folder) as (worker, a, b):
        b.order("trap", StartWorker="hang")
        with ThreadPoolExecutor() as pool:
            sending = pool.submit(worker.send, a, b)
            until(lambda: sending.done() or place(worker) == "released", "it may run there")
            assert not sending.done(), sending.result()
            a.kill()
            sending.exception()
        stands = len(worker.lines())
        a.start_again()
        until(lambda: len(worker.lines()) > stands + 10, "it goes on, over there")
        assert place(worker) == "remote"
        end_unseen(worker)
        nothing_left(a, b)


@pytest.mark.parametrize(("trap", "where"), [("kill", "running"), ("kill after", "remote")])
def test_a_destination_that_dies_when_it_is_to_start_the_worker_has_it_or_has_not(
    trap: str, where: str, folder: Path
) -> None:
    with counting_at_a(folder) as (worker, a, b):
        b.order("trap", StartWorker=trap)
        with ThreadPoolExecutor() as pool:
            sending = pool.submit(worker.send, a, b)
            until(lambda: sending.done() or b.process.poll() is not None, "it has been killed")
            assert not sending.done(), sending.result()
            assert place(worker) == "released"
            b.start_again()
            assert ("error" in sending.result()) == (where == "running")
        worker.await_lines()
        assert place(worker) == where
        end(worker)
        nothing_left(a, b)


def test_workers_elsewhere_outlive_the_proxyds_of_both_hosts(folder: Path) -> None:
    with counting_at_a(folder) as (worker, a, b):
        moved(worker, a, b)
        worker.await_lines()
        b.kill()
        b.start_again()
        worker.await_lines()
        moved(worker, b, a)
        worker.await_lines()
        moved(worker, a, b)
        a.kill()
        a.start_again()
        worker.await_lines()
        end_unseen(worker)
        nothing_left(a, b)


# ------------------------------------------------------------------ the network
def test_output_is_complete_although_the_link_was_cut_meanwhile(folder: Path) -> None:
    with counting_at_a(folder) as (worker, a, b):
        moved(worker, a, b)
        worker.await_lines()
        a.cut()
        notes = folder / "notes.0"
        before = notes.read_text().count("\n")
        until(lambda: notes.read_text().count("\n") > before + 300, "it goes on over there")
        a.heal()
        end(worker)
        nothing_left(a, b)


def test_a_host_that_is_lost_for_good_ends_the_relay_with_a_sentence(folder: Path) -> None:
    with counting_at_a(folder) as (worker, a, b):
        moved(worker, a, b)
        b.cut()
        a.order("lost", host="b", sentence="host b is lost, and the worker of rank 0 with it")
        assert worker.wait() == -signal.SIGKILL
        assert worker.errors() == "proxyrun: host b is lost, and the worker of rank 0 with it\n"


def test_a_host_that_was_only_cut_off_ends_the_worker_once_it_is_back(folder: Path) -> None:
    with moving_hosts(folder, "a", "b") as (a, b):
        worker = Counted(a, folder)
        worker.await_lines()
        moved(worker, a, b)
        b.cut()
        a.order("lost", host="b", sentence="host b is lost")
        assert worker.wait() == -signal.SIGKILL
        assert b.processes()
        a.order("back", host="b")
        b.heal()
        nothing_left(a, b)


@pytest.mark.parametrize("moves", [1, 2], ids=["at home", "elsewhere"])
def test_a_worker_that_may_run_on_a_host_that_is_lost_goes_on_nowhere(folder: Path, moves: int) -> None:
    with moving_hosts(folder, "a", "b", "c") as hosts:
        worker = Counted(hosts[0], folder)
        worker.await_lines()
        for source, to in pairwise(hosts[:moves]):
            moved(worker, source, to)
        source, to = hosts[moves - 1 : moves + 1]
        to.order("trap", StartWorker="kill")
        with ThreadPoolExecutor() as pool:
            sending = pool.submit(worker.send, source, to)
            assert to.process.wait(30) == -signal.SIGKILL
            stands = (folder / "notes.0").read_text()
            source.order("lost", host=to.name, sentence=f"host {to.name} is lost")
            assert worker.wait() == -signal.SIGKILL
            assert "may run there" in str(sending.result()["error"])
        assert f"host {to.name} is lost; the worker was on its way there" in worker.errors()
        assert (folder / "notes.0").read_text() == stands


def place(worker: Counted) -> str:
    """As its init sees it."""
    asked = worker.home.run(
        sys.executable, "-P", "-c",
        "import sys; from understudy.recovery.migration.relay.orders import ask_init; "
        "print(ask_init(sys.argv[1], {'do': 'where'})['state'])", f"{worker.relay}/s",
    )  # fmt: skip
    return asked.strip()
