"""Every rung of the ladder, for a rank of the host that leads its job, and for one of another host.

The agent of the one is told in its own process, that of the other by the link between hosts; the recovery and
what it wants done are the same.  Not among them: `restore-stored-replay`, to which no job on several hosts
comes back (docs/guarantees.md), and `end-with-peer` and `give-up`, which tell no device server anything.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from host_cluster import Cluster, cluster
from proxied import WORKLOADS, until

pytestmark = [pytest.mark.timeout(300), pytest.mark.drawn(2)]

SCRIPT = WORKLOADS / "optimizer_steps.py"
FIRST, APART = 60, 20
"""Minibatches: the first one struck, and from one to the next.  By then replicas are known (again)."""
IN_STEP = 3
"""Kills inside the optimizer step: one may find the other rank inside its own, with no way forward."""
RUNGS = {
    "call-error": "rewind-in-place",
    "kill-server": "restart-copy-replay",
    "driver-suspect": "stash-restart-restore",
}
"""What strikes outside the optimizer step -> what it leads to."""
AT_ONCE = 3
"""Deaths of all servers: of some, one rank may be back before the other one's death is noticed."""
STEPS = FIRST + APART * (IN_STEP + len(RUNGS) + AT_ONCE + 1)
WAIT_S = 120


def trained(hosts: Cluster, folder: Path, job: str, drills: Sequence[str] = ()) -> tuple[list[str], Any]:
    """A job with rank 0 on host a, which leads, and rank 1 on b: what both wrote, and the report."""
    report, out = folder / f"{job}.json", folder / job
    commands = hosts.torchrun("ab", SCRIPT, "--steps", str(STEPS), "--out", str(out))
    options = ["--job", job, "--hosts", "2"]
    words = [word for drill in drills for word in ("--drill", drill)]
    leads = hosts["a"].start(commands[0], *options, "--report", str(report), *words)
    until(lambda: f'"{job}"' in hosts["a"].log.read_text(), "host a has opened the job", 60)
    follows = hosts["b"].start(commands[1], *options)
    statuses = [run.wait(WAIT_S) for run in (leads, follows)]
    logs = [host.log.read_text()[-3000:] for host in hosts.hosts.values()]
    assert statuses == [0, 0], "\n".join([*leads.errors[-20:], *follows.errors[-20:], *logs])
    return [out.with_suffix(f".{rank}").read_text() for rank in (0, 1)], json.loads(report.read_text())


@pytest.mark.parametrize("rank", [0, 1], ids=["of-the-leading-host", "of-another-host"])
def test_a_rank_comes_back_by_every_rung_and_no_bit_differs(tmp_path: Path, rank: int) -> None:
    with cluster({"a": 1, "b": 1}, "--optimizer-preimages", "off", "--spares", "2") as hosts:
        undisturbed, plain = trained(hosts, tmp_path, "undisturbed")
        calls = plain["calls_per_step"]
        points = [("kill-server", calls - 2 - back) for back in range(IN_STEP)]
        points += [(fault, 2) for fault in (*RUNGS, *["kill-all-servers"] * AT_ONCE)]
        drills = [
            f"{fault} rank={rank} step={FIRST + APART * place} call={call}"
            for place, (fault, call) in enumerate(points)
        ]
        written, report = trained(hosts, tmp_path, "struck", drills)
    assert written == undisturbed
    assert all(fault["fired"] for fault in report["faults"])
    told = [one for one in report["recoveries"] if one["rank"] == rank]
    plans = Counter(one["plan"] for one in told)
    print(
        plans,
        *[(one["rank"], one["fault"], one["plan"], one["reason"]) for one in report["recoveries"]],
        sep="\n",
    )
    assert all(one["recovered"] for one in report["recoveries"])
    assert {*RUNGS.values(), "roll-forward", "restore-snapshot-replay"} <= plans.keys()
