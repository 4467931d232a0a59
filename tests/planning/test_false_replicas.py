"""A buffer that is equal to a rank's state by chance, and is let go of, is no replica of it."""

from __future__ import annotations

from pathlib import Path

import proxied
import pytest

pytestmark = pytest.mark.drawn(2)

ROUNDS, STEPS = 15, 6


def told(ended: proxied.Ended) -> list[str]:
    return sorted(line for line in ended.output.splitlines() if line.startswith("rank "))


@pytest.mark.parametrize("call", [5, 6])
def test_a_rank_whose_state_others_had_by_chance_only_goes_back_by_its_snapshot(
    call: int, folder: Path
) -> None:
    """Replay reads what came without content; the job ended with that."""
    command = proxied.ranks(2, proxied.WORKLOADS / "gathered_state.py", str(ROUNDS))
    undisturbed = proxied.run(command, folder=folder)
    assert undisturbed.status == 0, undisturbed.output[-3000:]
    drill = ("--drill", f"kill-server rank=0 step={STEPS * (ROUNDS - 3) + 1} call={call}")
    killed = proxied.run(command, folder=folder, options=drill)
    assert killed.status == 0, killed.output[-3000:]
    assert told(killed) == told(undisturbed)
    assert len(told(killed)) == 2 * ROUNDS
    recoveries = killed.report["recoveries"]
    assert all(one["recovered"] for one in recoveries), recoveries
    print([(one["plan"], one["evidence"]) for one in recoveries])
