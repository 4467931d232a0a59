"""torchrun's own recovery: workers that fail are started again and resume from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import proxied
from training_run import execute_natively, installed

SCRIPT = proxied.WORKLOADS / "elastic.py"


def command(out: Path, *options: str) -> list[str]:
    torchrun = [*installed("torchrun"), "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    return [*torchrun, str(SCRIPT), "--out", str(out / "run.x"), *options]


def steps(out: Path) -> list[list[list[str]]]:
    """Per rank a row for each step: its number, torchrun's attempt, the loss."""
    return [
        [line.split() for line in (out / f"run.{rank}").read_text().splitlines()] for rank in range(2)
    ]  # fmt: skip


def test_a_worker_that_raises_is_started_again_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    """A device server of the second attempt dies as well; no bit differs from a native run without that."""
    folders = {name: tmp_path / name for name in ("native", "killed")}
    for folder in folders.values():
        folder.mkdir()
    execute_natively(command(folders["native"], "--device", "cpu", "--fail-at", "0"), 120)
    expected = [[(step, loss) for step, _, loss in rows] for rows in steps(folders["native"])]
    # The second attempt begins with minibatch 1 again; the first has no fifth one.
    drill = ("--drill", "kill-server rank=1 step=5 call=12")
    ended = proxied.run(command(folders["killed"]), folder=tmp_path, options=drill)
    assert ended.status == 0, ended.output[-4000:]
    assert "this worker fails once" in ended.output
    got = steps(folders["killed"])
    assert [[(step, loss) for step, _, loss in rows] for rows in got] == expected
    assert [int(attempt) for _, attempt, _ in got[0]] == [0] * 3 + [1] * 6
    recovered = [r for r in ended.report["recoveries"] if r["fault"] == "server-died" and r["recovered"]]
    assert len(recovered) == 1
