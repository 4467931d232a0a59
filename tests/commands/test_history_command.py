"""What `recoveryctl history` shows of a file of events."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import proxied
import pytest
from made_up_events import T0, made_up, written
from running_proxyd import running_proxyd

from understudy.recovery.base.errors import BadInput, Failure
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.commands.history import history as command
from understudy.recovery.commands.history import seconds_of, table, with_durations
from understudy.recovery.history import recorder
from understudy.recovery.history.recorder import (
    Event,
    History,
    read,
)
from understudy.recovery.text.tables import duration

ID = re.compile(r"r-[a-z2-9]{6}")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command looks."""
    monkeypatch.setenv(recorder.VARIABLE, str(tmp_path / "state" / "history.jsonl"))
    monkeypatch.setenv("COLUMNS", "80")
    return recorder.history_file()


STORY = (
    Event("start", "brave-otter-k3f9", "job", "by process 4711", at_ms=T0),
    Event("drill", "brave-otter-k3f9", "kill-server", "fired", "", 1, 12, at_ms=T0 + 9000),
    Event(
        "recovery", "brave-otter-k3f9", "silent-corruption", "recovered", "r-7f3a9c", 1, 12, 0.773, T0 + 9773
    ),
    Event("start", "nightly", "job", "by process 4800", at_ms=T0 + 10_000),
    Event(
        "recovery", "nightly", "server-died", "given up", "r-abcdef", 0, 123456, 75.0, T0 + 20_000,
        {"reason": "no replica has what the rank had: " + "all of it " * 12},
    ),
    Event("adoption", "nightly", "proxyd 99", "2 ranks of proxyd 98", seconds=2.3, at_ms=T0 + 30_000),
    Event(
        "end", "nightly", "job", "not in order: rank 0; 120 steps, 1 recovery, 3 validations",
        at_ms=T0 + 8 * 10**6,
    ),
    Event("party", "nightly", "x", "\x1b[2Jcake\nfor all", at_ms=T0 + 8 * 10**6, more={"host": ["?"]}),
)  # fmt: skip


@pytest.mark.parametrize("width", [20, 80, 120, 200])
def test_the_table_can_be_read_at_any_width(width: int) -> None:
    lines = [line for line, _ in table(with_durations(STORY), width)]
    assert all(len(line) <= max(width, 80) for line in lines), "\n".join(lines)
    text = " ".join(" ".join(lines).split())
    told = ("1 12 0.77 s recovered r-7f3a9c", "123456 1m 15s given up r-abcdef", "all of it all of it")
    for words in (*told, "2h 13m", "party (unknown)", "?[2Jcake for all"):
        assert words in text
    assert ("2023-11-" in text) == (width >= 100)
    assert text.isprintable()


def test_what_somebody_has_to_know_of_is_marked() -> None:
    bad = [line for line, bad in table(STORY, 200) if bad]
    assert [line.split()[2:4] for line in bad if line.startswith("2023")] == [
        ["nightly", "server-died"], ["nightly", "end"],
    ]  # fmt: skip


def test_hosts_are_told_where_there_are_several() -> None:
    here, there = made_up(1, host="a"), made_up(2, host="b")
    assert not any(", on" in line for line, _ in table([here], 200))
    assert [line.rpartition(", on ")[2] for line, _ in table([here, there], 200)][1:] == ["a", "b"]


def test_the_newest_are_shown_last_and_as_json_as_they_are(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(path, *STORY)
    command(as_json=True)
    assert capsys.readouterr().out == path.read_text()
    command(last=2, as_json=True)
    assert capsys.readouterr().out.splitlines() == path.read_text().splitlines()[-2:]
    command(last=2)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"the last 2 of {len(STORY)} events"
    assert said[1].split() == ["when", "job", "what", "rank", "step", "took", "outcome"]


def test_events_are_chosen_by_job_kind_and_time(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(path, *STORY, replace(STORY[0], job="nightly-2"), replace(made_up(1), at_ms=recorder.now_ms()))

    def chosen(**options: Any) -> list[tuple[str, str]]:
        command(as_json=True, **options)
        return [(line["job"], line["kind"]) for line in map(json.loads, capsys.readouterr().out.splitlines())]

    assert {job for job, _ in chosen(job="nightly")} == {"nightly"}, "though another begins so"
    assert {job for job, _ in chosen(job="brave")} == {"brave-otter-k3f9"}
    assert chosen(job="nightly", kind="recovery") == [("nightly", "recovery")]
    assert chosen(kind="party") == [("nightly", "party")]
    assert chosen(since="1h") == [("job-1", "recovery")]
    assert chosen(job="nobody") == []


def test_lines_that_make_no_sense_are_told_of(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(path, *STORY)
    path.write_bytes(b"what?\n" + path.read_bytes())
    command()
    assert capsys.readouterr().err == f"{path}: lines that make no sense, left out: 1\n"


def test_a_file_that_is_far_too_long_is_read_from_its_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [made_up(number) for number in range(100)]
    written(path, *events)
    monkeypatch.setattr(recorder, "LARGEST", 1000)
    found = read(path)
    assert 5 < len(found.events) < 20 and found == History(tuple(events[-len(found.events) :]))


@pytest.mark.parametrize("text", ["", "2", "h", "-2h", "2y", "2 hours", "1e3h", "٣h", "9" * 20 + "d"])
def test_what_is_no_time_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadInput, match="2h"):
        seconds_of(text)


def test_times_are_read_and_told() -> None:
    assert [seconds_of(text) for text in ("90s", "1.5m", "2h", "7 d", "1w")] == [90, 90, 7200, 604800, 604800]
    told = {0: "0.00 s", 0.773: "0.77 s", 12.34: "12.3 s", 59.96: "1m 00s", 3599.6: "1h 00m", 2e5: "2d 07h"}
    assert {seconds: duration(seconds) for seconds in told} == told


def test_mistakes_are_one_sentence(path: Path) -> None:
    written(path, *STORY)
    with pytest.raises(BadInput, match=r"'recover' is no kind of event: there are adoption, .*, party, "):
        command(kind="recover")
    path.unlink()
    path.mkdir()
    with pytest.raises(Failure, match=r"the history .*history\.jsonl cannot be read: it is no regular file"):
        command()


def test_an_empty_history_says_where_it_was_looked_for_and_is_no_error(path: Path) -> None:
    def said(*arguments: str) -> str:
        done = subprocess.run(
            [*module_command("recovery.recoveryctl"), "history", *arguments],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        return done.stdout + done.stderr

    assert said() == f"there is no history yet: no proxyd has written to {path}\n"
    written(path, *STORY)
    none = f"none of the {len(STORY)} events in the history {path} fits --job j --since 2h\n"
    assert said("--job", "j", "--since", "2h", "--json") == none


@pytest.mark.drawn(2)
def test_a_recovery_has_one_name_in_the_log_the_report_and_the_history(path: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running_proxyd(tmp_path / "s", 1, log=log) as proxyd:
        drills = ("--drill", "kill-server rank=0 step=2 call=4", "--drill", "bit-flip rank=0 step=99 call=1")
        options = ("--socket", str(proxyd.socket), "--job", "tiny", *drills)
        ended = proxied.run(proxied.python(proxied.WORKLOADS / "tiny.py"), folder=tmp_path, options=options)
    (recovery,) = ended.report["recoveries"]
    assert ID.fullmatch(recovery["id"])
    logged = [
        json.JSONDecoder().raw_decode(line)[0]
        for line in log.read_text().splitlines()
        if line.startswith("{")
    ]
    assert [line["id"] for line in logged if line["event"] == "recovery"] == [recovery["id"]]
    found = read(path)
    assert not found.nonsense and {event.job for event in found.events} == {"tiny"}
    assert [(event.kind, event.what, event.outcome.partition(";")[0]) for event in found.events] == [
        ("start", "job", found.events[0].outcome),
        ("drill", "kill-server", "fired"),
        ("recovery", "server-died", "recovered"),
        ("drill", "bit-flip", "never fired"),
        ("end", "job", "in order"),
    ]
    told = found.events[2]
    assert (told.id, told.at_ms, told.more["plan"]) == (recovery["id"], recovery["at_ms"], recovery["plan"])
    assert found.events[-1].more["steps"] == 5 and found.events[-1].more["recoveries"] == 1
