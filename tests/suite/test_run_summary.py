"""What a run says at its end: what was skipped, for want of what, and which files took too long."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import durations
import pytest
import quick
import skipped
import suite_report
from durations import FullRun

NO_CRIU = "no worker can be moved here: this machine has no CRIU that is recent enough: recoveryctl doctor"


@pytest.mark.parametrize(
    ("reason", "wanted"),
    [
        (NO_CRIU, "CRIU"),
        ("no worker can be moved here: CRIU needs root here: recoveryctl doctor", "root"),
        ("PyTorch finds no GPU here", "a GPU"),
        ("this PyTorch is a CPU build, which has no way to a driver", "a GPU"),
        ("needs two GPUs, PyTorch finds 1 here", "two GPUs"),
        ("no etcd on this machine, and Debian's etcd-server cannot be had: there is no apt-get", "etcd"),
        ("g++ has no ThreadSanitizer", "ThreadSanitizer"),
        ("this kernel has no device-mapper, or dmsetup is not installed", "the kernel's device-mapper"),
        ("only root can mount a small file system", "root"),
        ("a small file system cannot be mounted here", "rights to mount"),
        ("no uring here: [Errno 38] Function not implemented", "the storage engine uring"),
        ("this processor has no avx512", "avx512"),
        ("strace is not installed here", "strace"),
        ("instructions cannot be counted here: valgrind is not installed", "valgrind"),
        ("transformers and lightning not installed: pip install .[test]", "transformers and lightning"),
        ("root may write everywhere", ""),
        ("there is a GPU: the bench would run", ""),
        ("the baseline is PyTorch 2.12.0's, this is 2.13.0", ""),
    ],
)
def test_a_reason_is_put_down_to_what_is_missing(reason: str, wanted: str) -> None:
    assert skipped.want(reason) == wanted


def test_the_last_line_counts_wants_first_and_tells_other_reasons_as_they_are() -> None:
    reasons = ["an odd\nreason", "PyTorch finds no GPU here", NO_CRIU, NO_CRIU, "it is late"]
    assert skipped.line(reasons) == (
        "skipped for want of: CRIU (2), a GPU (1); skipped as well: an odd reason (1), it is late (1)"
    )
    assert skipped.line(["root may write everywhere"]) == "skipped: root may write everywhere (1)"


def test_a_run_that_skipped_nothing_says_nothing() -> None:
    assert skipped.line([]) == ""


@pytest.mark.parametrize(
    "longrepr",
    [("tests/x.py", 7, "Skipped: why"), ["tests/x.py", 7, "Skipped: why"], "why"],  # xdist makes it a list
)
def test_the_reason_of_a_report_is_found(longrepr: object) -> None:
    assert skipped.reason_of(SimpleNamespace(longrepr=longrepr)) == "why"


# ------------------------------------------------------------------ budgets
BUDGETS = {"tests/test_a.py": 10, "tests/test_b.py": 1}


def test_a_file_may_take_twice_its_budget_and_five_seconds() -> None:
    assert durations.complaints(BUDGETS, BUDGETS, {"tests/test_a.py": 25.0, "tests/test_b.py": 7.0}) == []
    assert durations.complaints(BUDGETS, BUDGETS, {"tests/test_a.py": 25.1}) == [
        "tests/test_a.py took 25 s in the last full run, and its budget is 10 s"
    ]


def test_files_and_budgets_are_the_same() -> None:
    files = ["tests/test_a.py", "tests/test_c.py"]
    assert durations.complaints(files, BUDGETS, {"tests/test_b.py": 100.0}) == [
        "tests/test_c.py has no budget in tests/durations.json",
        "tests/durations.json has a budget for tests/test_b.py, which is gone",
    ]


def test_a_new_budget_is_what_the_run_took_unless_it_skipped_tests_of_the_file() -> None:
    run = FullRun(files={"a": 2.1, "b": 0.0, "c": 3.5, "d": 9.2}, skipping=["c", "d"])
    before = {"a": 50, "c": 60, "d": 5, "gone": 7, "not run": 8}
    assert durations.new_budgets(["a", "b", "c", "d", "not run", "new"], before, run) == {
        "a": 3, "b": 1, "c": 60, "d": 10, "new": 1, "not run": 8,
    }  # fmt: skip


def test_a_file_of_which_a_run_has_a_share_keeps_the_budget_of_all_its_tests() -> None:
    run = FullRun(files={"a": 2.1, "b": 2.1, "c": 90.0})
    found = durations.new_budgets("abc", {"a": 50, "b": 50, "c": 50}, run, {"a", "c"})
    assert found == {"a": 50, "b": 3, "c": 90}
    drawn = durations.files_drawn_from()
    assert "tests/scripts/test_odd_programs.py" in drawn and "tests/planning/test_planner.py" not in drawn


def test_heavy_files_go_first_and_their_tests_stay_in_order() -> None:
    names = ["light::1", "heavy::2", "light::2", "heavy::1", "unknown::1", "as light::1", "heavy::3"]
    items = [cast(pytest.Item, SimpleNamespace(nodeid=name)) for name in names]
    ordered = durations.in_order(items, {"light": 3, "heavy": 7, "as light": 3})
    assert [item.nodeid for item in ordered] == [
        "heavy::2", "heavy::1", "heavy::3", "light::1", "light::2", "as light::1", "unknown::1",
    ]  # fmt: skip


def write(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps(content) if not isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("content", ["{", "[]", {"fils": {}}])
def test_a_run_that_cannot_be_read_is_one_sentence(
    content: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(durations, "TAKEN", write(tmp_path, "taken.json", content))
    monkeypatch.setattr(durations, "BUDGETS", write(tmp_path, "budgets.json", {}))
    assert durations.main(["--check"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("durations: there is no full run that can be read") and said.count("\n") == 1
    assert suite_report.main([str(durations.TAKEN)] * 2) == 2
    assert "is no build/durations.json" in capsys.readouterr().err


# ------------------------------------------------------------------ the report
def test_the_report_shows_both_runs(tmp_path: Path) -> None:
    machine: dict[str, str | int | float] = {
        "date": "2026-01-02", "commit": "abc+", "cores": 2, "cpu": "Z80", "memory_bytes": 24 << 30,
    }  # fmt: skip
    files = {"tests/deploy/test_deploy_slurm.py": 40.0, "tests/planning/test_planner.py": 1.0}
    cold = FullRun(machine, 2, 100.0, 150.0, 7, 1, {"CRIU": 3}, files)
    warm = FullRun(machine, 2, 60.0, 60.0, 8, 0, {}, {name: seconds / 2 for name, seconds in files.items()})
    for name, run in (("cold", cold), ("warm", warm)):
        run.write(tmp_path / f"{name}.json")
    page = tmp_path / "docs" / "suite.md"
    arguments = [str(tmp_path / "cold.json"), str(tmp_path / "warm.json"), "--output", str(page)]
    assert suite_report.main(arguments) == 0
    lines = page.read_text().splitlines()
    assert "| processor | 2 × Z80 | 2 × Z80 |" in lines
    assert "| wall clock | 100 s (1.7 min) | 60 s (1.0 min) |" in lines
    assert "| of all cores | 75% | 50% |" in lines
    assert "| deploy | 40 | 20 |" in lines and "| planning | 1 | 0 |" in lines
    assert "| `tests/deploy/test_deploy_slurm.py` | 40 | 20 |" in lines
    assert "| CRIU | 3 | 0 |" in lines


def test_a_quick_run_has_the_mission_and_then_what_costs_least() -> None:
    budgets = {**dict.fromkeys(quick.MISSION, 40), "a": 9, "b": 1, "c": 5, "d": 3}
    files = [*budgets, "without a budget"]
    room = 40 * len(quick.MISSION)
    assert quick.chosen(files, budgets, 1) == set(quick.MISSION)
    assert quick.chosen(files, budgets, room + 9) == {*quick.MISSION, "b", "c", "d"}
    assert quick.chosen(files, budgets, room + 18) == set(budgets)
