"""`make bench-migration`: what it reads off reports and answers, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import migration_cost
import pytest
from migration_ways import WAYS, sample_of_dump, samples_of
from training_run import RunFailed

TOLD = "rank 1: its worker was moved in 0.614 s (dump 0.210, checksums 0.052, restore 0.301; 98 MB of images)"


def recovery(**changed: Any) -> dict[str, Any]:
    parts = {"detect_s": 0.1, "restart_s": 0.2, "copy_s": 0.3, "communicators_s": 0.4, "replay_s": 0.5}
    return {"fault": "planned-move", "recovered": True, **parts, "total_s": 1.5, **changed}


def test_parts_of_a_move_are_those_of_the_report() -> None:
    (sample,) = samples_of({"recoveries": [recovery()]}, "planned-move", 1)
    assert sample["restart"] == 0.2 and sample["total"] == 1.5
    row = migration_cost.summary("a way", [sample, sample], "")
    assert row["fixed_s"] == pytest.approx(0.7) and row["shares"]["replay"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "found", [[], [recovery(recovered=False)], [recovery(fault="server-died")], [recovery(), recovery()]]
)
def test_a_run_in_which_something_else_happened_is_no_measurement(found: list[dict[str, Any]]) -> None:
    with pytest.raises(RunFailed, match="1 times planned-move was expected"):
        samples_of({"recoveries": found}, "planned-move", 1)


def test_parts_of_a_dump_are_those_of_the_answer() -> None:
    assert sample_of_dump(TOLD) == {"dump": 0.21, "ship": 0.052, "restore": 0.301, "total": 0.614}
    with pytest.raises(RunFailed):
        sample_of_dump("rank 1 was not moved")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_whole_of_it_runs_and_tells_what_is_not_measured(tmp_path: Path) -> None:
    output = tmp_path / "migration.json"
    assert migration_cost.main(["--quick", "--output", str(output)]) == 0
    results = {row["way"]: row for row in json.loads(output.read_text())["results"]}
    assert results.keys() == WAYS.keys()
    moved = results["worker moved to another host"]
    assert "missing" in moved or moved["count"] == 1
    for way in ("device gone, re-attached on this host", "planned move to another device of this host"):
        assert results[way]["count"] == 1 and 0 < results[way]["fixed_s"] <= results[way]["total_s"]
    assert results["without us: rank killed, restart from a checkpoint"]["total_s"] > 0
