"""docs/reports/performance.md: what it says of numbers that are there, and of those that are not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import performance_page as page

PARTS = ("detect_s", "restart_s", "copy_s", "communicators_s", "replay_s", "total_s")
MACHINE = {
    "date": "2026-01-01", "commit": "abc", "cores": 2, "cpu": "a processor", "torch": "2", "load_before": 0.1,
    "load_after": 1.0, "effort": {"rounds": 3, "share": 1 / 3},
}  # fmt: skip


def a_recovery(milliseconds: int) -> dict[str, float]:
    return {part: milliseconds / 1000 for part in PARTS} | {"total_s": 6 * milliseconds / 1000}


def recoveries(fault: str, *milliseconds: int) -> dict[str, Any]:
    found = [a_recovery(each) for each in milliseconds]
    middle = found[len(found) // 2]
    return {
        "fault": fault, "count": len(found), "all": found, **middle,
        "without_replay_s": middle["total_s"] - middle["replay_s"],
    }  # fmt: skip


def a_step(pinned: bool, used: dict[str, Any]) -> dict[str, Any]:
    return {
        "script": "launch_bound_mlp.py", "ranks": 1, "one_core": pinned, "native_s": 0.002,
        "proxied_s": 0.001,
        "ratio": 0.5, "native_runs_s": [0.002, 0.002], "proxied_runs_s": [0.001, 0.0015],
        "calls_per_step": 28,
        "log_bytes_per_step": 2200, "used_per_step": used,
    }  # fmt: skip


@pytest.fixture
def results() -> dict[str, Any]:
    def sides(worker: float, server: float, control: float) -> dict[str, dict[str, float]]:
        each = {"worker": worker, "server": server, "control": control}
        return {side: {"cpu_s": us / 1e6, "sleeps": 0.25, "preemptions": 0.0} for side, us in each.items()}

    used = {"native": sides(400, 0, 0), "proxied": sides(300, 90, 10)}
    return MACHINE | {
        "step_times": [a_step(True, used), a_step(False, {"native": {}, "proxied": {}})],
        "recoveries": [recoveries("kill-server", 4, 5, 6)],
        "alone": recoveries("kill-server", 1, 2, 3),
        "control": {
            "meeting_ranks": 64, "meeting_s": 0.125, "meetings_s": [0.1, 0.125, 0.2], "telling_ranks": 1024,
            "told_cpu_s": 0.25, "all_told_cpu_s": [0.2, 0.25, 0.3],
        },
    }  # fmt: skip


def line(text: str, begin: str) -> list[str]:
    """The cells of the row that begins so."""
    (found,) = [one for one in text.splitlines() if one.startswith(f"| {begin}")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_page_has_each_median_with_its_spread_beside_its_aim(results: dict[str, Any]) -> None:
    text = page.render(results, None)
    assert line(text, "launch-bound, all on one core")[1:] == ["0.500", "0.500 to 0.750", "≤ 1.20"]
    assert line(text, "… sleeps")[1:] == ["0.25", "", "≤ 0.15"]
    assert line(text, "server killed, 2 ranks")[1:] == ["25.0 ms", "20.0 to 30.0", "≤ 25 ms"]
    assert line(text, "server killed, one rank")[1:] == ["10.0 ms", "5.0 to 15.0", "≤ 10 ms"]
    assert line(text, "rendezvous of 64")[1:] == ["0.125 s", "0.100 to 0.200", "≤ 0.15 s"]
    assert line(text, "one failed collective told by 1,024")[1:3] == ["0.25 s", "0.20 to 0.30"]
    assert line(text, "`launch_bound_mlp.py`, one core")[4:7] == ["1.000", "300, 90, 10", "400"]
    assert line(text, "`launch_bound_mlp.py`, 1 rank")[4:8] == ["–", "–", "–", "–"]
    assert line(text, "kill-server, 1 rank, 3 times")[1] == "2.0 (1.0 to 3.0)"


def test_what_was_not_measured_is_said_to_be_so(results: dict[str, Any], tmp_path: Path) -> None:
    page.write(results, tmp_path / "none.json", tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert [line(text, f"{begin}, {size} MB")[1] for begin, size in (
        ("until durable", 16), ("until durable", 500), ("until read back", 500)
    )] == [page.NOT_MEASURED] * 3  # fmt: skip


def test_shares_of_storage_are_of_rounds_and_not_of_medians(results: dict[str, Any], tmp_path: Path) -> None:
    def rows(ours: list[float]) -> list[dict[str, Any]]:
        def row(way: str, *seconds: float) -> dict[str, Any]:
            return {"bytes": 16_000_000, "way": way, "turns": [{"durable_s": one} for one in seconds]}

        return [row("raw loop", 1.0, 2.0, 3.0), row("understudy", *ours)]

    kept = tmp_path / "snapshots.json"
    kept.write_text(json.dumps(
        {"machine": MACHINE, "file_system": "ext4", "saved": rows([4.0, 2.0, 6.0]), "restored": []}
    ))  # fmt: skip
    page.write(results, kept, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert line(text, "until durable, 16 MB")[1:] == ["50 %", "25 to 100 %", "≥ 90 %"]
    assert "ext4" in text
