"""A script's own streams: on a processor they keep the order of its calls, on a GPU they overlap as they do
natively."""

from __future__ import annotations

import re
from pathlib import Path

import proxied
import pytest
import simulated_device
from simulated_case import does

LOSS = re.compile(r"rank \d step \d 0x[0-9a-f.]+p[+-]\d+")
DELAYED = {"SIMULATED_CUDA_DELAY_US": "100"}


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("overlap", ["True", "True", "[]", "True"]),
        ("untold", ["[]", "True"]),
        ("commit_and_rewind", ["True"] * 5),
        ("aborted", ["True parked", "True True"]),
        ("two_halves", ["True"] * 2),
        ("unhurried", ["True True"] * 2),
        ("senseless", ["True"] * 2),
        ("memory", ["True"]),
    ],
)
def test_streams_of_a_simulated_gpu_keep_what_events_say_and_no_other_order(
    case: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated_device.put_in_place(monkeypatch, **DELAYED)
    done = does(case, "simulated_stream_cases.py")
    assert (done.returncode, done.stdout.splitlines()) == (0, said), done.stderr


def run(device: str, ranks: int, folder: Path, *drills: str, script: str) -> list[str]:
    folder.mkdir()
    options = ("--devices", f"{device}:{ranks}", *(word for drill in drills for word in ("--drill", drill)))
    command = proxied.torchrun(ranks, proxied.WORKLOADS / script)
    done = proxied.run(command, folder=folder, options=options, timeout_s=100)
    assert done.status == 0, done.output[-3000:]
    assert [one["recovered"] for one in done.report["recoveries"]] == [True] * len(drills), done.report
    return sorted(LOSS.findall(done.output))


@pytest.mark.parametrize(
    ("script", "ranks"), [("streams.py", 1), ("streams.py", 2), ("limited_gathers.py", 2)]
)
def test_a_training_with_streams_of_its_own_has_the_same_bits_everywhere_and_through_faults(
    script: str, ranks: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = f"kill-server rank={ranks - 1} step=4 call=40"
    expected = run("cpu", ranks, folder / "cpu", script=script)
    assert len(expected) == 8 * ranks
    assert run("cpu", ranks, folder / "cpu-killed", kill, script=script) == expected
    simulated_device.put_in_place(monkeypatch, **DELAYED)
    assert run("cuda", ranks, folder / "cuda", script=script) == expected
    suspect = "driver-suspect rank=0 step=6 call=20"
    assert run("cuda", ranks, folder / "cuda-killed", kill, suspect, script=script) == expected


def shard(device: str, folder: Path, *drills: str) -> list[str]:
    folder.mkdir()
    command = proxied.torchrun(
        2, proxied.WORKLOADS / "sharded_training.py", "--steps", "8", "--out", str(folder / "out")
    )
    options = ("--devices", f"{device}:2", *(word for drill in drills for word in ("--drill", drill)))
    done = proxied.run(command, folder=folder, options=options, timeout_s=100)
    assert done.status == 0, done.output[-3000:]
    assert [one["recovered"] for one in done.report["recoveries"]] == [True] * len(drills), done.report
    return [(folder / f"out.{rank}").read_text() for rank in range(2)]


def test_sharded_training_overlaps_on_a_gpu_and_has_the_bits_of_a_processor(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gathers and reductions are on four streams of its own, of a high priority."""
    expected = shard("cpu", folder / "cpu")
    assert [one.count("\n") for one in expected] == [8, 8]
    simulated_device.put_in_place(monkeypatch, **DELAYED)
    (counters := folder / "counters").mkdir()
    monkeypatch.setenv("SIMULATED_CUDA_COUNTERS", str(counters))
    drills = ("kill-server rank=1 step=4 call=150", "call-error rank=0 step=6 call=100")
    assert shard("cuda", folder / "cuda", *drills) == expected
    found = [one.overlapping for one in simulated_device.counters_in(counters).values()]
    print(f"kernels that began while others ran: {found}")
    assert sum(found) > 0
