"""What is remembered of jobs that have ended, in a file that nobody may come to harm by."""

from __future__ import annotations

import fcntl
import os
import random
import re
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import proxied
import pytest
from made_up_events import T0, made_up, written
from structlog.testing import capture_logs

from understudy.protos import control_pb2 as pb
from understudy.recovery.commands.history import table, with_durations
from understudy.recovery.drills.spec import Drill
from understudy.recovery.history import recorder
from understudy.recovery.history.recorder import (
    Event,
    FileRecorder,
    History,
    Kind,
    Recorder,
    append,
    older,
    parse,
    read,
)
from understudy.recovery.state.counts import Ended, ScheduledDrill
from understudy.recovery.state.jobs import DRILL_FIRED, Job
from understudy.recovery.state.journaled_job import restored_job

END = b'{"at_ms": 1, "kind": "end", '
ID = re.compile(r"r-[a-z2-9]{6}")


class Kept(Recorder):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, event: Event) -> None:
        self.events.append(event)


# ------------------------------------------------------------------ lines
def test_an_event_is_what_is_read_from_its_line() -> None:
    event = made_up(7, plan="restart-copy-replay", reason="ünï\u2028\n", transfer=None, drills=["a"])
    assert parse(event.line().encode()) == event
    assert "\n" not in event.line()
    bare = Event(Kind.END, "j", at_ms=T0)
    assert bare.line() == f'{{"at_ms": {T0}, "kind": "end", "job": "j"}}'


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{", b"[]", b"1", b"null", b'"x"', b"\xff\xfe", b"\0" * 100, b"[" * 16000, b'{"a":' * 3000,
        b'{"at_ms": 1}', b'{"kind": "end"}', b'{"at_ms": "1", "kind": "end"}',
        b'{"at_ms": true, "kind": "end"}', b'{"at_ms": -1, "kind": "end"}', b'{"at_ms": 1e3, "kind": "end"}',
        b'{"at_ms": 99999999999999, "kind": "end"}', b'{"at_ms": 1, "kind": 2}', b'{"at_ms": 1, "kind": ""}',
        b'{"at_ms": 1, "kind": "\\u001b[31m"}', b'{"at_ms": 1, "kind": "end"} {}',
        END + b'"job": null}', END + b'"rank": "0"}', END + b'"rank": -1}', END + b'"step": 1.5}',
        END + b'"seconds": NaN}', END + b'"seconds": 1e999}', END + b'"step": ' + b"9" * 5000 + b"}",
        END + b'"more": Infinity}', END + b'"more": "' + b"x" * (16 << 10) + b'"}',
    ],
)  # fmt: skip
def test_a_line_that_makes_no_sense_is_left_out_and_counted(line: bytes, tmp_path: Path) -> None:
    assert parse(line) is None
    path = written(tmp_path / "h", made_up(1))
    with path.open("ab") as file:
        file.write(line + b"\n")
    written(path, made_up(2))
    found = read(path)
    assert [event.step for event in found.events] == [1, 2]
    assert found.nonsense == (1 if line else 0)


def test_whatever_bytes_a_file_holds_they_can_be_read_and_shown(seed: int, tmp_path: Path) -> None:
    chance, path = random.Random(seed), tmp_path / "h"
    whole = written(path, *(made_up(i, host="a", reason="x" * i) for i in range(20))).read_bytes()
    for _ in range(200):
        spoilt = bytearray(whole)
        for _ in range(chance.randrange(1, 30)):
            spoilt[chance.randrange(len(spoilt))] = chance.randrange(256)
        path.write_bytes(spoilt)
        found = read(path)
        for width in (1, 80):
            lines = [line for line, _ in table(with_durations(found.events), width)]
            assert all(line.isprintable() for line in lines)


def test_texts_are_cut_so_that_a_line_has_its_bounds() -> None:
    assert len(made_up(1, reason="x" * 10**6).line()) < 2000
    many = made_up(1, **{f"text_{i}": "\u20ac" * 10**4 for i in range(50)})
    assert len(many.line()) < recorder.LONGEST_LINE
    assert parse(many.line().encode()) == replace(many, more={})


# ------------------------------------------------------------------ writing
def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "a" / "b" / "h", made_up(1))
    modes = [stat.S_IMODE(one.stat().st_mode) for one in (path, path.parent, path.parent.parent)]
    assert modes == [0o600, 0o700, 0o700]
    path.chmod(0o644)
    written(path, made_up(2))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_line_cut_at_any_byte_costs_no_other_one(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    events = [made_up(number, reason="why " * chance.randrange(20)) for number in range(4)]
    path = written(tmp_path / "h", *events)
    whole = path.read_bytes()
    begin = whole[:-1].rindex(b"\n") + 1
    for end in range(begin, len(whole)):
        path.write_bytes(whole[:end])
        kept = events if end == len(whole) - 1 else events[:-1]  # all but the end of the line is there
        assert read(path) == History(tuple(kept)), end
        after = made_up(9)
        written(path, after)
        found = read(path)
        assert found == History((*kept, after), 0 if end in (begin, len(whole) - 1) else 1), end


def test_a_full_file_is_renamed_and_there_are_two_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "LARGEST", 2000)
    path = tmp_path / "h"
    for number in range(100):
        written(path, made_up(number))
        found = [event.step for event in read(path).events]
        assert found == list(range(number + 1))[-len(found) :]
        assert len(found) > min(number, 5)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["h", "h.1"]
    assert all(file.stat().st_size < 2000 for file in tmp_path.iterdir())


APPENDING = """
import itertools, os, sys, time
from pathlib import Path
from understudy.recovery.history import recorder
path, first = Path(sys.argv[1]), int(sys.argv[2])
names = itertools.count()
recorder.LARGEST = 3000
recorder.older = lambda path: path.with_name(f"full-{os.getpid()}-{next(names)}")  # all are kept
(path.parent / f"ready-{first}").touch()
while not (path.parent / "go").exists():
    time.sleep(0.001)
for number in range(first, first + 400):
    recorder.append(path, recorder.Event("end", "j", step=number, more={"text": "x" * (number % 200)}).line())
"""


def test_two_processes_that_append_while_files_are_renamed_lose_and_tear_nothing(tmp_path: Path) -> None:
    path = tmp_path / "h"
    processes = [
        subprocess.Popen([sys.executable, "-P", "-c", APPENDING, str(path), str(first)])
        for first in (0, 1000)
    ]
    proxied.until(lambda: len([*tmp_path.glob("ready-*")]) == 2, "both have started")
    (tmp_path / "go").touch()
    while any(process.poll() is None for process in processes):
        assert read(path).nonsense == 0
    assert [process.wait() for process in processes] == [0, 0]
    files = [path, *tmp_path.glob("full-*")]
    assert len({file.name.split("-")[1] for file in files[1:]}) == 2, "both have renamed"
    found = [read(file) for file in files]
    assert all(file.stat().st_size < 3000 for file in files)
    assert not any(one.nonsense for one in found)
    steps = sorted(event.step or 0 for one in found for event in one.events)
    assert steps == [*range(400), *range(1000, 1400)]


def test_a_file_that_is_renamed_while_it_is_read_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "h", made_up(1), made_up(2))
    real = os.open

    def renaming(name: Any, flags: int, *mode: int) -> int:
        handle = real(name, flags, *mode)
        if name == path:
            path.rename(older(path))
        return handle

    monkeypatch.setattr(os, "open", renaming)
    assert [event.step for event in read(path).events] == [1, 2]


def test_a_disk_that_fills_up_amid_a_line_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "h", made_up(1))
    before, real = path.read_bytes(), os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda handle, content: real(handle, content[:10]))
        with pytest.raises(OSError, match="No space left"):
            append(path, made_up(2).line())
    assert path.read_bytes() == before
    written(path, made_up(3))
    assert [event.step for event in read(path).events] == [1, 3]


@pytest.mark.parametrize("what", ["link", "pipe", "directory"])
def test_nothing_but_a_file_of_ours_is_written_to(what: str, tmp_path: Path) -> None:
    path, aim = tmp_path / "h", tmp_path / "aim"
    aim.touch()
    match what:
        case "link":
            path.symlink_to(aim)
        case "pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
    with pytest.raises(OSError):
        append(path, made_up(1).line())
    assert aim.read_bytes() == b""
    if what != "link":
        with pytest.raises(OSError):
            read(path)


def test_whoever_keeps_the_file_locked_is_not_waited_for_for_ever(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "h", made_up(1))
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="kept it locked"):
            append(path, made_up(2).line(), lock_s=0.05)
    written(path, made_up(3))
    assert len(read(path).events) == 2


def test_a_history_that_cannot_be_written_is_one_warning_until_it_can(tmp_path: Path) -> None:
    in_the_way = tmp_path / "state"
    in_the_way.touch()  # root may write everywhere, but no directory is below a file
    file_recorder = FileRecorder(in_the_way / "history.jsonl")
    with capture_logs() as said:
        for number in range(5):
            file_recorder.add(made_up(number))
        file_recorder.settle(10)
    assert [(entry["log_level"], entry["problem"]) for entry in said] == [("warning", "Not a directory")]
    in_the_way.unlink()
    file_recorder.add(made_up(7))
    file_recorder.settle(10)
    (event,) = read(in_the_way / "history.jsonl").events
    assert event.step == 7 and event.more["proxyd"] == os.getpid()


def test_nobody_waits_for_storage_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_WAITING", 10)
    path = tmp_path / "h"
    path.touch()
    with path.open() as other, capture_logs() as said:
        fcntl.flock(other, fcntl.LOCK_EX)
        file_recorder, began = FileRecorder(path), time.monotonic()
        for number in range(20):
            file_recorder.add(made_up(number))
        file_recorder.settle(0.05)
        assert time.monotonic() - began < 2
    assert [entry["problem"] for entry in said] == ["10 lines wait to be written"]
    file_recorder.settle(10)
    assert 10 <= len(read(path).events) <= 11


# ------------------------------------------------------------------ where
def test_where_it_is_follows_the_first_variable_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {
        "UNDERSTUDY_HISTORY": ("/x/own.jsonl", "/x/own.jsonl"),
        "STATE_DIRECTORY": ("/var/lib/a:/var/lib/b", "/var/lib/a/history.jsonl"),
        "XDG_STATE_HOME": ("/state", "/state/understudy/history.jsonl"),
        "HOME": (str(tmp_path), f"{tmp_path}/.local/state/understudy/history.jsonl"),
        "XDG_RUNTIME_DIR": ("/run/user/7", "/run/user/7/understudy/history.jsonl"),
        "UNDERSTUDY_SOCKET": ("", f"/tmp/understudy-{os.getuid()}/history.jsonl"),
    }
    for name, (value, _) in variables.items():
        monkeypatch.setenv(name, value)
    for name, (_, expected) in variables.items():
        assert recorder.history_file() == Path(expected)
        monkeypatch.delenv(name)


@pytest.mark.parametrize("home", ["", "relative", "/no/such/home", "/dev/null", "/proc"])
def test_a_home_that_is_of_no_use_is_passed_over(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UNDERSTUDY_HISTORY", "STATE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    monkeypatch.setenv("UNDERSTUDY_SOCKET", "/run/x/proxyd.sock")
    monkeypatch.setenv("HOME", home)
    if home == "/proc":  # where even root makes nothing; what access() says of it is the kernel's business
        monkeypatch.setattr(os, "access", lambda *_: False)
    assert recorder.history_file() == Path("/run/x/history.jsonl")


def test_none_is_kept_where_the_file_is_dev_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(recorder.VARIABLE, "/dev/null")
    assert type(recorder.recorder()) is Recorder
    monkeypatch.setenv(recorder.VARIABLE, "/tmp/h")
    assert isinstance(recorder.recorder(), FileRecorder)


# ------------------------------------------------------------------ what is told
def test_a_recovery_gets_a_name_that_it_keeps_through_the_journal() -> None:
    kept = Kept()
    job = Job("j", None, [], history=kept)
    before = recorder.now_ms()
    job.note_recovery(pb.Recovery(fault="server-died", rank=1, step=5, total_s=0.5, recovered=True))
    (recovery,) = job.recoveries
    assert ID.fullmatch(recovery.id) and before <= recovery.at_ms <= recorder.now_ms()
    (event,) = kept.events
    assert (event.kind, event.what, event.outcome) == ("recovery", "server-died", "recovered")
    assert (event.id, event.rank, event.step, event.seconds) == (recovery.id, 1, 5, 0.5)
    adopted = restored_job(pb.JournaledJob(name="j", recoveries=[recovery]))
    assert adopted.recoveries[0].id == recovery.id


def test_a_drill_is_told_before_the_recovery_from_it_also_if_nobody_has_looked_since() -> None:
    kept = Kept()
    job = Job("j", None, [ScheduledDrill(Drill("kill-server", 0, 2, 4), slot=0)], history=kept)
    log = SimpleNamespace(drills=lambda: [(1, 2, 4, DRILL_FIRED)], step=2)
    session: Any = SimpleNamespace(rank=0, active=True, log=log)
    job.sessions[0] = session
    job.note_recovery(pb.Recovery(fault="server-died", recovered=True))
    assert [(event.kind, event.what) for event in kept.events] == [
        ("drill", "kill-server"),
        ("recovery", "server-died"),
    ]


@pytest.mark.parametrize(
    ("recovery", "kind", "outcome"),
    [
        (pb.Recovery(fault="server-died"), "recovery", "given up"),
        (pb.Recovery(fault="collective-failed", plan="end-with-peer"), "recovery", "ended with its peer"),
        (pb.Recovery(fault="planned-move", recovered=True), "move", "moved"),
        (pb.Recovery(fault="rehearsal", recovered=True), "drill", "recovered"),
    ],
)
def test_faults_moves_and_drills_are_told_apart(recovery: pb.Recovery, kind: str, outcome: str) -> None:
    kept = Kept()
    job = Job("j", None, [], history=kept)
    job.note_recovery(recovery)
    assert [(event.kind, event.outcome) for event in kept.events] == [(kind, outcome)]


def test_the_end_of_a_job_counts_what_it_went_through_and_names_what_never_came() -> None:
    kept = Kept()
    never_fires = [ScheduledDrill(Drill("kill-server", 0, 99, 1))]
    job = Job("j", None, never_fires, validations=3, history=kept)
    job.recoveries = [
        pb.Recovery(fault="server-died", recovered=True), pb.Recovery(fault="server-hung"),
        pb.Recovery(fault="planned-move", recovered=True),
        pb.Recovery(fault="collective-failed", plan="end-with-peer"),
    ]  # fmt: skip
    job.ended = [
        Ended(rank, clean, 120, 0, 0, 0, 0, (), pb.RankStatus()) for rank, clean in ((0, True), (1, False))
    ]
    job.note_end("its launcher has ended", job.report())
    never, end = kept.events
    assert (never.kind, never.what, never.step, never.outcome) == ("drill", "kill-server", 99, "never fired")
    assert end.outcome == "not in order: rank 1; 120 steps, 2 recoveries, 1 move, 3 validations"
    assert (end.more["given_up"], end.more["why"]) == (1, "its launcher has ended")


def test_a_job_that_is_in_nobodys_history_goes_on_all_the_same() -> None:
    job = Job("j", None, [])
    job.note_recovery(pb.Recovery())
    job.note_end("why", job.report())
    assert len(job.recoveries) == 1
