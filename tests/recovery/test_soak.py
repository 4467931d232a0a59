"""A short soak: random faults in one training, some during a recovery, change no bit and leave nothing."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "sweep"))

from soak import soak
from soak_faults import DURING_RECOVERY, RANKS, WEIGHTS, minibatches, schedule
from soak_report import as_markdown, percentile

from understudy.recovery.drills.fault_table import BY_NAME

SEED = 20261121
FAULTS = 10
QUICK = {kind: WEIGHTS[kind] for kind in ("kill-server", "call-error", "sticky-error", "driver-suspect")}
"""Those that are noticed at once."""


@pytest.mark.drawn(3)
def test_ten_random_faults_in_one_training_change_no_bit_and_leave_nothing_behind(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    done = soak(FAULTS, SEED, tmp_path, QUICK, tmp_path / "log")
    assert done.problems == []
    assert sum(scheduled for scheduled, _ in done.struck.values()) >= 8
    assert len(done.recoveries) >= 8
    report = as_markdown(done, {"date": "", "commit": "", "cores": 2, "cpu": "", "torch": ""})
    assert "identical" in report and all(f"| {kind} |" in report for kind in done.struck)


def test_a_soak_is_the_same_again_with_its_seed_and_strikes_where_there_is_something() -> None:
    first, again = (schedule(random.Random(SEED), 200, 50, WEIGHTS) for _ in range(2))
    assert first == again
    assert {drill.kind for drill in first} == set(WEIGHTS) <= set(BY_NAME)
    assert set(DURING_RECOVERY) <= set(WEIGHTS)
    assert {drill.rank for drill in first} == set(range(RANKS))
    assert all(1 <= drill.call <= 50 and drill.step < minibatches(200) for drill in first)
    assert len({drill.step for drill in first}) == 200, "no two in one minibatch: they might hide each other"


def test_percentiles_are_of_what_was_measured() -> None:
    values = [float(n) for n in range(1, 102)]
    assert [percentile(values, p) for p in (50, 90, 100)] == [51.0, 91.0, 101.0]
    assert percentile([7.0], 99) == 7.0
