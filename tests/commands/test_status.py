"""What `recoveryctl status` shows a person, in terminals of any width, of two ranks and of a thousand."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import test_proxyd_recovery
from running_node import Node

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.errors import BadInput, Failure, NobodyAnswers
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.commands import status as status_command
from understudy.recovery.run import asking
from understudy.recovery.state.pace import StepClock
from understudy.recovery.text.status_text import COLUMNS, rank_lines, status_lines
from understudy.recovery.text.tables import make_console, ranks_table, status_json
from understudy.recovery.text.view import MOST_ROWS, numbers, view_of

variables = test_proxyd_recovery.variables  # the fixture

NOW_MS = 1_800_000_000_000
LAST = pb.Recovery(
    id="r-7f3a9c", fault="server-died", rank=1, plan="restart-copy-replay", recovered=True, total_s=0.7734,
    at_ms=NOW_MS - 31_000,
)  # fmt: skip


def rank(number: int, job: str = "brave-otter-k3f9", **more: Any) -> pb.RankStatus:
    known = {
        "device": f"cpu:{number}", "state": "running", "step": 1204, "step_s": 0.0123, "log_bytes": 1 << 20,
        "worker_pid": 100 + number, "server_pid": 900 + number,
    }  # fmt: skip
    return pb.RankStatus(job=job, rank=number, **(known | more))


def status(*ranks: pb.RankStatus, **more: Any) -> pb.Status:
    devices = [pb.Device(spec=one.device, state="leased", rank=one.rank, job=one.job) for one in ranks]
    jobs = [pb.JobStatus(name=name) for name in dict.fromkeys(one.job for one in ranks)]
    node = pb.Node(pid=4711, torch_version="2.13.0", devices=devices, spares=1)
    return pb.Status(**({"node": node, "ranks": ranks, "jobs": jobs} | more))


def lines(found: pb.Status, width: int = 80) -> list[str]:
    return [line for line, _ in status_lines(view_of(found, NOW_MS), width)]


def bad(found: pb.Status, width: int = 80) -> list[str]:
    return [line for line, trouble in status_lines(view_of(found, NOW_MS), width) if trouble]


# ------------------------------------------------------------------ a small job
def test_a_job_of_two_ranks_is_seven_columns_at_eighty() -> None:
    job = pb.JobStatus(name="brave-otter-k3f9", faults=2, moves=1, validations=3, last=LAST)
    shown = lines(status(rank(0, persisted_step=1200), rank(1), jobs=[job]))
    assert shown == [
        "proxyd 4711, PyTorch 2.13.0: 2 of 2 devices in use, 1 warm spare",
        "",
        "job brave-otter-k3f9: 2 ranks, step 1,204, 12.3 ms a step",
        "  2 faults recovered from, 1 move, 3 validations; last: server-died on rank 1,",
        "    recovered in 0.77 s, 31.0 s ago (r-7f3a9c)",
        "ranks  state    device   step   a step      log  saved",
        "0      running  cpu:0   1,204  12.3 ms  1.0 MiB  disk 1,200",
        "1      running  cpu:1   1,204  12.3 ms  1.0 MiB  -",
    ]


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("ranks", [2, 1000])
def test_no_line_is_longer_than_the_terminal(width: int, ranks: int) -> None:
    found = status(
        *(rank(number, host=f"node-{number // 8}", state="recovering" if number % 99 == 7 else "running",
               note="its pre-images were given up, " * 9 if number == 3 else "") for number in range(ranks))
    )  # fmt: skip
    shown = lines(found, width)
    assert max(map(len, shown)) <= width
    assert any(line.split() == list(" ".join(COLUMNS).split()) for line in shown)


@pytest.mark.parametrize("width", [1, 20, 40])
def test_a_terminal_that_is_too_narrow_shows_fewer_columns(width: int) -> None:
    shown = lines(status(rank(0), rank(1)), width)
    heading = shown[next(i for i, line in enumerate(shown) if line.startswith("0")) - 1]
    assert heading.split()[0] == "ranks" and "saved" not in heading
    assert width < 20 or max(map(len, shown)) <= width


# ------------------------------------------------------------------ a large one
def test_of_a_thousand_ranks_those_of_a_host_share_a_row_and_the_odd_ones_have_their_own() -> None:
    ranks = [rank(number, host=f"node-{number // 8}", device=f"cuda:{number % 8}") for number in range(1000)]
    ranks[17].state, ranks[33].step, ranks[41].note = "recovering", 1190, "no snapshot"
    view = view_of(status(*ranks), NOW_MS)
    rows = {numbers(row.ranks): row for row in view.jobs[0].rows}
    assert len(rows) == 125 + 3
    assert rows["0-7"].host == "node-0" and not rows["0-7"].odd
    assert rows["17"].odd and rows["17"].state == "recovering"
    assert rows["33"].steps == (1190, 1190)
    assert rows["16, 18-23"].devices == ("cuda:0", *(f"cuda:{n}" for n in range(2, 8)))
    assert bad(status(*ranks))[-1] == "rank 41: no snapshot"


def test_up_to_sixteen_ranks_have_a_row_each() -> None:
    assert len(view_of(status(*map(rank, range(MOST_ROWS))), NOW_MS).jobs[0].rows) == MOST_ROWS
    assert len(view_of(status(*map(rank, range(MOST_ROWS + 1))), NOW_MS).jobs[0].rows) == 1


def test_ranks_are_told_in_runs() -> None:
    assert numbers([9, 0, 1, 2, 7]) == "0-2, 7, 9"
    shuffled = random.Random(3).sample(range(1000), 1000)
    assert numbers(shuffled) == "0-999" and numbers([]) == ""


# ------------------------------------------------------------------ trouble
def test_only_trouble_stands_out() -> None:
    assert bad(status(rank(0, migratable="no (descriptor 0 is a terminal)"))) == []
    assert len(bad(status(rank(0, state="lost")))) == 1
    given_up = pb.JobStatus(name="brave-otter-k3f9", given_up=1, last=LAST)
    assert bad(status(rank(0), jobs=[given_up]))[0].startswith("  no fault so far, 1 NOT")


def test_a_rank_that_takes_much_longer_than_usual_is_told_of_with_its_age() -> None:
    assert bad(status(rank(0, step_age_s=9))) == []
    assert bad(status(rank(0, step_age_s=45)))[-1] == ("rank 0: in its minibatch for 45 s, usually 0.012 s")
    assert bad(status(rank(0, step_age_s=45, step_s=10))) == [], "an evaluation of a slow program"


def test_what_is_of_the_job_is_told_once_for_all_its_ranks() -> None:
    ours = [rank(n, heir="c", replies_different=3, persist_choice="every 9 steps") for n in (0, 1)]
    shown = "\n".join(lines(status(*ours), 200))
    for sentence in (
        "host c leads it on if this one is lost", "3 replayed values differ from what the program was given",
        "snapshots go to storage every 9 steps",
    ):  # fmt: skip
        assert shown.count(sentence) == 1
    assert "host b leads it" in "\n".join(lines(status(rank(0, leader="b"))))
    told = "\n".join(lines(status(rank(0, not_replayable="buffer 3", not_validated="no optimizer step"))))
    assert "replay would give other numbers: buffer 3" in told and "not validated" not in told
    assert "not validated: no optimizer step" in "\n".join(
        lines(status(rank(0, not_validated="no optimizer step")))
    )


def test_devices_that_no_rank_has_are_named_with_what_is_wrong() -> None:
    devices = [
        pb.Device(spec="cpu:0", state="leased"), pb.Device(spec="cpu:1", state="idle", server_pid=7),
        pb.Device(spec="cpu:2", state="failed", note="fenced by a drill"),
    ]  # fmt: skip
    found = pb.Status(node=pb.Node(devices=devices))
    assert lines(found)[1:] == [
        "no job runs", "", "cpu:1 idle, server 7", "cpu:2 failed: fenced by a drill"
    ]  # fmt: skip
    assert bad(found) == ["cpu:2 failed: fenced by a drill"]


def test_a_note_cannot_command_a_terminal() -> None:
    (line,) = bad(status(rank(0, note="\x1b[2J gone")))[-1:]
    assert line == "rank 0: ?[2J gone"


# ------------------------------------------------------------------ one rank, all numbers, for programs
def test_one_rank_is_told_in_full() -> None:
    found = rank(
        3, host="node-2", snapshots=2, snapshot_s=0.2, persisted_step=1100, note="no room", step_age_s=2
    )
    shown = [line for line, _ in rank_lines(found)]
    assert shown[0] == "rank 3 of job brave-otter-k3f9: running on cpu:3 at node-2"
    assert "  on disk         step 1,100" in shown and "  rank 3: no room" in shown
    assert "  minibatch       1,204 (), for 2.00 s, usually 12.3 ms" in shown


def test_every_number_of_every_rank_is_still_to_be_had() -> None:
    out = io.StringIO()
    console = make_console()
    console.file, console.width = out, 240
    console.print(ranks_table([rank(0), rank(1)]))
    assert "shadow" in out.getvalue() and "1.0 MiB" in out.getvalue()


def test_programs_get_the_names_of_the_protocol() -> None:
    job = pb.JobStatus(name="j", faults=1, last=LAST)
    told = json.loads(json.dumps(status_json(status(rank(0, replies_different=3), jobs=[job]))))
    assert told["ranks"][0]["replies_different"] == 3
    assert told["jobs"][0]["last"]["id"] == "r-7f3a9c" and told["jobs"][0]["faults"] == 1
    assert status_json(status(rank(0)))["jobs"][0]["last"] is None


def test_a_recovery_that_is_under_way_is_shown_with_its_stage_and_what_it_waits_for() -> None:
    job = pb.JobStatus(name="j", stage="awaiting", stage_s=2.25, under_way_s=3.5, waits_for="host b")
    told = status(rank(0, job="j"), jobs=[job])
    notes = [note.text for note in view_of(told, NOW_MS).jobs[0].notes]
    assert notes == [
        "its ranks go back to a commit: awaiting for 2.2 s, 3.5 s in all", "a recovery waits: host b",
    ]  # fmt: skip
    (told_of_it,) = status_json(told)["jobs"]
    assert (told_of_it["stage"], told_of_it["under_way_s"]) == ("awaiting", 3.5)


def test_a_rank_is_asked_for_by_its_job_where_several_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {Path("/a"): status(rank(0)), Path("/b"): status(rank(0, job="other"))}
    monkeypatch.setattr(status_command, "all_status", lambda socket: found)
    with pytest.raises(Failure, match=r"several jobs have a rank 0: .*\(brave-otter-k3f9, other\)"):
        status_command.status(rank=0)
    with pytest.raises(Failure, match="there is no rank 7; there are: 0"):
        status_command.status(rank=7)
    with pytest.raises(BadInput, match="leave out RANK"):
        status_command.status(rank=7, watch=True)
    status_command.status(rank=0, job="other")


# ------------------------------------------------------------------ pace
def test_a_pace_is_the_median_of_minibatches_however_seldom_one_looks() -> None:
    clock = StepClock()
    assert (clock.step_s, clock.age_s(5)) == (0.0, 0.0)
    for look in range(20):
        clock.look(3 * look, int(look * 0.3e9))
    assert clock.step_s == pytest.approx(0.1)
    clock.look(2, int(6e9))  # gone back to
    assert clock.step_s == pytest.approx(0.1) and clock.age_s(int(7e9)) == pytest.approx(1)


# ------------------------------------------------------------------ the command
@pytest.mark.drawn(2)
def test_status_of_a_running_job_where_there_is_no_terminal(
    variables: dict[str, str], tmp_path: Path
) -> None:
    """A pipe that is closed, an encoding without dashes, a watcher that is read line by line."""
    with Node(tmp_path, variables) as node:
        node.train(steps=60, limit=20)
        node.await_step(20)
        command = [*module_command("recovery.recoveryctl"), "status", "--socket", str(node.socket)]
        plain = subprocess.run(
            [*command, "--wide"],
            env=os.environ | {"PYTHONIOENCODING": "ascii"},
            capture_output=True,
            timeout=60,
        )
        assert (plain.returncode, plain.stderr) == (0, b""), plain
        assert b"2 ranks, step 2" in plain.stdout and b"?" not in plain.stdout
        closed = subprocess.run(["bash", "-c", '"$@" | head -1', "-", *command, "--watch"],
                                capture_output=True, text=True, timeout=60)  # fmt: skip
        assert closed.stderr == "" and "2 ranks, step 2" in closed.stdout
        shown = node.recoveryctl("status", "1")
        assert shown.startswith("rank 1 of job ") and "usually" in shown


def test_a_proxyd_that_hangs_keeps_nobody_from_seeing_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("UNDERSTUDY_SOCKET", raising=False)
    paths = [Path("/hangs"), Path("/answers")]
    monkeypatch.setattr(asking, "_answering", lambda: paths)

    def answer(path: Path) -> pb.Status:
        if path == Path("/hangs"):
            raise NobodyAnswers(f"proxyd at {path} did not answer")
        return status(rank(0))

    monkeypatch.setattr(asking, "get_status", answer)
    assert list(asking.all_status(None)) == [Path("/answers")]
    assert capsys.readouterr().err == "recoveryctl: proxyd at /hangs did not answer\n"
    del paths[1]
    with pytest.raises(NobodyAnswers):
        asking.all_status(None)


def test_a_socket_at_which_nobody_listens_is_not_passed_over(tmp_path: Path) -> None:
    with pytest.raises(NobodyAnswers):
        asking.all_status(tmp_path / "nobody")
