"""proxyd dies while its jobs run: device servers go on, and a proxyd that is started again adopts them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import proxied
import pytest
import test_proxyd_recovery
from proxied import until
from running_node import LONG_S, Node, runtime_directories
from test_proxyd_recovery import expected, understudy_processes
from test_training import EXAMPLES
from training_run import RunFailed

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.machine.processes import start_ticks
from understudy.recovery.takeover import journal

pytestmark = pytest.mark.drawn(16)

variables = test_proxyd_recovery.variables  # the fixture


@pytest.fixture
def node(variables: dict[str, str], tmp_path: Path) -> Iterator[Node]:
    """With the default options."""
    with Node(tmp_path, variables) as node:
        yield node


# ------------------------------------------------------------------ nothing else happens
@pytest.mark.long  # others here kill proxyd in smaller trainings
@pytest.mark.parametrize("example", ["digits_convnet"])
def test_a_training_whose_proxyd_is_killed_has_the_same_losses(example: str, tmp_path: Path) -> None:
    training = EXAMPLES[example](2, 240, 0.1)
    unfaulted = training.run(tmp_path / "unfaulted", proxied=True)
    drills = ("kill-proxyd rank=0 step=10 call=30", "kill-server rank=1 step=220 call=30")
    faulted = training.run(tmp_path / "faulted", proxied=True, drills=drills)
    assert faulted.losses == unfaulted.losses
    (adoption,) = faulted.report["adoptions"]
    assert adoption["ranks"] == 2
    assert [recovery["plan"] for recovery in faulted.report["recoveries"]] == ["restart-copy-replay"]
    assert all(fault["fired"] for fault in faulted.report["faults"])
    assert proxied.left_behind() == []


def test_ranks_go_on_without_proxyd_and_are_adopted_and_recovered_as_before(node: Node) -> None:
    node.train(steps=300, limit=20)
    node.await_step(20)
    former, servers = node.proxyd.pid, node.servers()
    node.kill()
    node.let(120)
    node.await_step(120)  # a hundred steps without a proxyd
    (job,) = the_journal().parent.glob("*/")
    stray = job / "rank-0-9"  # a log that was being made
    stray.mkdir()
    node.restart()
    assert not stray.exists()
    status = node.status()
    assert [(rank.state, rank.step) for rank in status.ranks] == [("running", 121)] * 2
    assert node.servers() == servers
    (adoption,) = status.adoptions
    assert (adoption.former_pid, adoption.pid, adoption.ranks) == (former, node.proxyd.pid, 2)
    assert f"proxyd (pid {former}) died, and another one (pid {node.proxyd.pid}) adopted" in node.recoveryctl(
        "status"
    )
    assert "restart-copy-replay in" in node.recoveryctl("drill", "kill-server", "--rank", "1")
    report = node.finish()
    assert [recovery["rank"] for recovery in report["recoveries"]] == [1]
    assert len(report["adoptions"]) == 1 and report["steps"] == 300


def test_a_run_of_which_a_log_is_gone_when_proxyd_comes_back_ends_with_a_sentence(node: Node) -> None:
    """Nobody finds what that rank waits for, and neither it nor its peer would ever go on."""
    node.train(steps=300, limit=20)
    node.await_step(20)
    node.kill()
    gone = next(log for log in the_journal().parent.glob("*/rank-1*/control"))
    gone.unlink()
    node.restart()
    node.let(300)
    assert node.run is not None
    _, errors = node.run.communicate(timeout=60)
    assert node.run.returncode != 0
    assert "rank 1 was ended when proxyd was started anew: cannot open" in errors, errors


def test_a_proxyd_killed_again_and_again_is_adopted_from_each_time(node: Node) -> None:
    node.train(steps=100, limit=10)
    for round_ in range(1, 4):
        node.await_step(10 * round_)
        node.kill()
        node.restart()
        node.let(10 * (round_ + 1))
        assert len(node.status().adoptions) == round_
    assert len(node.finish()["adoptions"]) == 3


def test_a_drill_that_kills_proxyd_tells_of_its_successor(variables: dict[str, str], tmp_path: Path) -> None:
    drills = ["kill-proxyd rank=0 step=4 call=2", "kill-proxyd rank=1 step=8 call=3"]
    flags = [word for drill in drills for word in ("--drill", drill)]
    steps = 2000  # it is to last until there is another proxyd
    done, report = test_proxyd_recovery.proxyrun(
        variables, tmp_path, "--devices", "cpu:2", *flags, steps=steps
    )
    assert done.returncode == 0, done.stderr
    values = [part.split("\n")[:-1] for part in done.stdout.split("\0")]
    assert values == [expected(rank, 2, steps) for rank in (0, 1)]
    assert len(report["adoptions"]) == 2
    assert done.stderr.count("was ended by SIGKILL; starting it again") == 2
    assert done.stderr.count("adopted the job") == 2


def test_a_drill_that_is_due_while_there_is_no_proxyd_is_done_by_the_next(node: Node) -> None:
    node.train(60, 10, "--drill", "kill-all-servers rank=1 step=15 call=3")
    node.await_step(10)
    node.kill()
    node.let(20)
    until(lambda: node.logs()[1].drills()[0][3], "the drill")
    node.restart()
    report = node.finish()
    assert {recovery["fault"] for recovery in report["recoveries"]} == {"server-died"}
    assert len(report["adoptions"]) == 1 and report["faults"][0]["fired"]


def test_a_drill_ordered_online_waits_for_the_successor_and_tells_of_it(node: Node) -> None:
    node.train(steps=40, limit=20)
    node.await_step(20)
    command = [*module_command("recovery.recoveryctl"), "drill", "kill-proxyd", "--socket", str(node.socket)]
    drill = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert node.proxyd.process.wait(LONG_S) == -signal.SIGKILL
    node.restart()
    told, _ = drill.communicate(timeout=LONG_S)
    assert drill.returncode == 0 and f"another one (pid {node.proxyd.pid}) adopted the job" in told
    assert len(node.finish()["adoptions"]) == 1


def test_the_spawner_may_die_and_no_rank_notices(node: Node) -> None:
    node.train(steps=60, limit=20)
    node.await_step(20)
    children = Path(f"/proc/{node.proxyd.pid}/task/{node.proxyd.pid}/children").read_text().split()
    (spawner,) = [int(pid) for pid in children]
    os.kill(spawner, signal.SIGKILL)
    until(lambda: "another one is started" in node.said(), "proxyd noticed")
    node.let(40)
    node.await_step(40)
    assert "restart-copy-replay in" in node.recoveryctl("drill", "kill-server", "--rank", "0")
    assert len(node.finish()["recoveries"]) == 1


# ------------------------------------------------------------------ something happens meanwhile
@pytest.mark.parametrize(
    ("number", "victims"),
    [(signal.SIGKILL, (1,)), (signal.SIGKILL, (0, 1)), (signal.SIGSTOP, (0,)), (signal.SIGSTOP, (0, 1))],
)
def test_what_befalls_servers_while_proxyd_is_away_is_recovered_when_it_is_back(
    node: Node, number: signal.Signals, victims: tuple[int, ...]
) -> None:
    node.train(steps=60, limit=20)
    node.await_step(20)
    servers = node.servers()
    node.kill()
    for victim in victims:
        os.kill(servers[victim], number)
    node.let(30)
    node.restart()
    node.await_step(30)
    report = node.finish()
    assert report["adoptions"][0]["servers_lost"] == len(victims)
    assert {recovery["rank"] for recovery in report["recoveries"]} == set(victims)
    assert all(recovery["recovered"] for recovery in report["recoveries"])


def test_snapshots_outlive_proxyd(variables: dict[str, str], tmp_path: Path) -> None:
    # so that replicas are known and not shadowed
    with Node(tmp_path, variables | {"AWAIT_FLOOR": "1"}) as node:
        node.train(steps=40, limit=20)
        until(lambda: all(log.floor_commit >= 20 for log in node.logs()), "step 20")
        servers = node.servers()
        node.kill()
        for server in servers:
            os.kill(server, signal.SIGKILL)
        node.restart()
        report = node.finish()
        assert {recovery["plan"] for recovery in report["recoveries"]} == {"restore-snapshot-replay"}


def test_a_call_that_fails_while_proxyd_is_away_is_recovered_when_it_is_back(
    variables: dict[str, str], tmp_path: Path
) -> None:
    with Node(tmp_path, variables) as node:
        node.train(steps=60, limit=20)
        node.await_step(20)
        node.logs()[1].add_drill(3, 25, 4)  # call-error
        node.kill()
        node.let(60)
        until(lambda: node.logs()[1].drills()[0][3] == 1, "the call has failed")
        node.restart()
        report = node.finish()
        assert [(r["fault"], r["plan"]) for r in report["recoveries"]] == [("call-failed", "rewind-in-place")]


def test_ranks_that_meet_while_proxyd_is_replaced_notice_nothing(node: Node) -> None:
    node.train(steps=60, limit=0)
    until(lambda: node.said().count('"session opened"') == 2, "two sessions")
    waiting, late = node.logs()
    until(lambda: waiting.tail_index == 7 and waiting.cursor_index >= 6, "rank 0 waits for its peer")
    assert late.tail_index == 0
    node.kill()
    node.restart()
    asked_again = node.open_again(1)
    assert (asked_again.error, asked_again.log_directory) == ("", node.rank_status(1).log_directory)
    assert "holds: a device serves one worker" in node.open_again(0).error  # it has begun to use its own
    node.let(20)
    node.await_step(20)
    assert node.finish()["recoveries"] == []


WAITS = """
import os, time
open({here!r}, "w")
while not os.path.exists({go!r}):
    time.sleep(0.01)
"""


def test_a_worker_that_comes_while_proxyd_is_away_waits_for_it(
    variables: dict[str, str], tmp_path: Path
) -> None:
    go = tmp_path / "go"
    script = tmp_path / "late.py"
    text = (proxied.WORKLOADS / "tiny.py").read_text()
    script.write_text(WAITS.format(here=f"{go}.here", go=str(go)) + text)
    with Node(tmp_path, variables) as node:
        command = [
            *module_command("recovery.proxyrun"),
            "--socket",
            str(node.socket),
            sys.executable,
            str(script),
        ]
        run = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
        until(Path(f"{go}.here").exists, "the script has begun")
        node.kill()
        go.touch()
        node.restart()
        output, _ = run.communicate(timeout=LONG_S)
        assert run.returncode == 0 and output.endswith("done\n")


def test_a_proxyd_killed_at_random_moments_of_recoveries_changes_no_value(
    variables: dict[str, str], tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    with Node(tmp_path, variables) as node:
        node.train(steps=400, limit=20)
        for round_ in range(1, 7):
            node.await_step(20 * round_)
            node.let(20 * round_ + 20)
            with contextlib.suppress(ProcessLookupError):  # one that is just being replaced
                os.kill(chance.choice(node.servers()), signal.SIGKILL)
            time.sleep(chance.choice((0.0, 0.02, 0.1, 0.3)) * chance.random())  # the moment is what is tried
            node.kill()
            node.restart()
        report = node.finish()
        assert len(report["adoptions"]) == 6
        assert all(recovery["recovered"] for recovery in report["recoveries"])
        print("redone:", [adoption["recovery_redone"] for adoption in report["adoptions"]])


def test_a_device_server_does_not_do_what_a_dead_proxyd_has_asked_for() -> None:
    from understudy.proxy_server.device_server import DeviceService
    from understudy.proxy_server.rendezvous_store import RendezvousGate

    class Gone:
        """The context of a request whose sender has died before it was its turn: no test can time that."""

        def is_active(self) -> bool:
            return False

    service = DeviceService.__new__(DeviceService)
    service.__dict__.update(
        _newest=3, _steering=threading.Lock(), _gate=RendezvousGate(), _parked=False, executor=None
    )
    for reply in (
        service.Park(pb.ParkRequest(generation=4), Gone()),
        service.Rewind(pb.RewindRequest(generation=4), Gone()),
        service.Resume(pb.ResumeRequest(generation=4), Gone()),
    ):
        assert "whoever asked for this has died" in reply.error
    assert service.__dict__["_newest"] == 3


# ------------------------------------------------------------------ the end
def test_a_proxyd_that_adopted_and_is_told_to_stop_leaves_nothing(node: Node) -> None:
    node.train(steps=60, limit=20)
    node.await_step(20)
    node.kill()
    node.restart()
    assert node.proxyd.stop() == 0
    node.let(60)
    assert node.run is not None
    _, errors = node.run.communicate(timeout=LONG_S + 30)
    assert node.run.returncode != 0 and "proxyd was stopped" in errors


def test_ranks_end_in_order_without_proxyd_and_nothing_is_left_after_the_grace(
    variables: dict[str, str], tmp_path: Path
) -> None:
    node = Node(tmp_path, variables, "--adoption-grace", "1")
    node.train(steps=60, limit=20)
    node.await_step(20)
    node.kill()
    node.let(60)
    assert node.run is not None
    launcher = node.run.pid
    until(lambda: b"\0worker\0" not in commands(variables), "the workers have ended")
    os.kill(launcher, signal.SIGKILL)  # it would wait for a proxyd to report
    node.run.communicate()
    until(lambda: not understudy_processes(variables["TEST_MARKER"]), "no process is left")
    until(lambda: not runtime_directories(), "no shared memory is left", 10)


def commands(variables: dict[str, str]) -> bytes:
    lines = []
    for pid in understudy_processes(variables["TEST_MARKER"]):
        try:
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes())
        except OSError:
            continue
    return b"\n".join(lines)


def test_workers_whose_servers_and_proxyd_are_gone_say_so_after_the_grace(
    variables: dict[str, str], tmp_path: Path
) -> None:
    with Node(tmp_path, variables, "--adoption-grace", "2") as node:
        node.train(steps=60, limit=20)
        node.await_step(20)
        servers = node.servers()
        node.kill()
        for server in servers:
            os.kill(server, signal.SIGKILL)
        node.let(60)
        until(lambda: b"\0worker\0" not in commands(variables), "the workers have ended")
        node.restart()  # so that there is a report, and somebody who cleans up
        assert node.run is not None
        _, errors = node.run.communicate(timeout=LONG_S)
        assert node.run.returncode != 0
        assert "is gone, and no other has come in 2 s" in errors


# ------------------------------------------------------------------ journals
def the_journal() -> Path:
    (runtime,) = runtime_directories()
    return runtime / "journal"


def test_a_damaged_journal_is_told_of_and_harms_nobody(variables: dict[str, str], tmp_path: Path) -> None:
    """Every kind of damage is refused alike: tests/proxyd/test_journal.py."""
    with Node(tmp_path, variables, "--adoption-grace", "1") as node:
        node.train(steps=60, limit=20)
        node.await_step(20)
        node.kill()
        content = the_journal().read_bytes()
        the_journal().write_bytes(content[: len(content) // 2])
        node.restart()
        assert node.said().count("its journal is unusable") == 1
        assert not node.status().ranks
        node.let(60)
        assert node.run is not None
        output, errors = node.run.communicate(timeout=LONG_S)  # its ranks end in order, without a proxyd
        values = [part.split("\n")[:-1] for part in output.split("\0")]
        assert values == [expected(rank, 2, 60) for rank in (0, 1)]
        assert "there is no job" in errors
        until(lambda: len(runtime_directories()) == 1, "the servers have removed what was damaged", 20)


def test_a_journal_that_names_foreign_processes_harms_none(node: Node) -> None:
    node.train(steps=60, limit=20)
    node.await_step(20)
    node.kill()
    victim = subprocess.Popen(["sleep", "600"])
    try:
        content = journal.read(the_journal().parent)
        foreign = pb.Process(pid=victim.pid, start_ticks=start_ticks(victim.pid))
        content.jobs[0].sessions[1].server.process.CopyFrom(foreign)
        content.servers.add(process=foreign, socket="server-0-1.sock", device="cpu:0")
        content.servers.add(process=foreign, socket=content.jobs[0].sessions[0].server.socket, device="cpu:0")
        journal.write(the_journal().parent, content)
        node.restart()
        node.let(30)
        node.await_step(30)
        assert victim.poll() is None
        report = node.finish()
        assert [recovery["rank"] for recovery in report["recoveries"]] == [1]
    finally:
        victim.kill()
        victim.wait()


def test_a_proxyd_with_other_devices_does_not_adopt_and_says_why(node: Node) -> None:
    node.train(steps=60, limit=20)
    node.await_step(20)
    node.kill()
    sentence = r"left job [\w-]+ running on --devices cpu:2: start with the same to adopt it"
    with pytest.raises(RunFailed, match=f"ended with status 2: .*{sentence}"):
        node.start(ranks=1)
    node.restart()
    assert len(node.finish()["adoptions"]) == 1
