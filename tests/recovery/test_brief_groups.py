"""Process groups that come and go within a minibatch, and device servers that die around them."""

from __future__ import annotations

import re
from pathlib import Path

import proxied

STEPS = 30
FIRST = 6
KILLS = 8


def numbers(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d: \[.*", output))


def test_servers_that_die_around_a_group_made_for_one_minibatch_change_no_bit(tmp_path: Path) -> None:
    """A rank that was past the group's collectives and one that was before them seemed to be at one cut."""
    command = proxied.ranks(2, proxied.WORKLOADS / "brief_groups.py", str(STEPS))
    undisturbed = proxied.run(command, folder=tmp_path)
    assert undisturbed.status == 0, undisturbed.output[-3000:]
    calls = undisturbed.report["calls_per_step"]
    drills = [
        f"kill-server rank=1 step={FIRST + 2 * i} call={1 + i * (calls - 1) // KILLS}" for i in range(KILLS)
    ]
    options = tuple(word for drill in drills for word in ("--drill", drill))
    struck = proxied.run(command, folder=tmp_path, options=options)
    assert struck.status == 0, struck.output[-3000:]
    assert len(numbers(undisturbed.output)) == 2
    assert numbers(struck.output) == numbers(undisturbed.output)
    recoveries = struck.report["recoveries"]
    assert len(recoveries) == KILLS
    assert all(recovery["recovered"] for recovery in recoveries)
