"""A script's own streams: on a processor they keep the order of its calls, on a GPU they overlap as they do
natively."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path

import proxied
import pytest
import simulated_device
from simulated_case import does

pytestmark = pytest.mark.drawn(16)

LOSS = re.compile(r"rank \d step \d 0x[0-9a-f.]+p[+-]\d+")


@pytest.fixture(autouse=True)
def delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated GPU takes its time, so that streams do overlap."""
    monkeypatch.setenv("SIMULATED_CUDA_DELAY_US", "100")


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("overlap", ["True", "True", "[]", "True"]),
        ("untold", ["[]", "True"]),
        ("aborted", ["True parked", "True True"]),
        ("two_halves", ["True"] * 2),
        ("unhurried", ["True True"] * 2),
        ("behind", ["True"]),
        ("memory", ["True"]),
    ],
)
def test_streams_of_a_simulated_gpu_keep_what_events_and_collectives_say_and_no_other_order(
    case: str, said: list[str], collectives: str, simulated_gpus: None
) -> None:
    done = does(case, "simulated_stream_cases.py", collectives)
    assert (done.returncode, done.stdout.splitlines()) == (0, said), done.stderr


@pytest.mark.parametrize(("case", "said"), [("commit_and_rewind", ["True"] * 5), ("senseless", ["True"] * 2)])
def test_commits_and_records_that_make_no_sense_are_of_all_streams(
    case: str, said: list[str], simulated_gpus: None
) -> None:
    done = does(case, "simulated_stream_cases.py")
    assert (done.returncode, done.stdout.splitlines()) == (0, said), done.stderr


def run(device: str, script: str, ranks: int, *options: str) -> list[str]:
    """Its losses; `options`: of proxyrun."""
    command = proxied.torchrun(ranks, proxied.WORKLOADS / script)
    devices = ("--devices", f"{device}:{ranks}")
    with tempfile.TemporaryDirectory(prefix="understudy-test-", dir="/tmp") as folder:
        done = proxied.run(command, folder=Path(folder), options=(*devices, *options), timeout_s=100)
    assert done.status == 0, done.output[-3000:]
    drills = options.count("--drill")
    assert [one["recovered"] for one in done.report["recoveries"]] == [True] * drills, done.report
    return sorted(LOSS.findall(done.output))


@functools.cache
def on_processors(script: str, ranks: int) -> list[str]:
    expected = run("cpu", script, ranks)
    assert len(expected) == 8 * ranks
    assert run("cpu", script, ranks, "--drill", kill(ranks)) == expected
    return expected


def kill(ranks: int) -> str:
    return f"kill-server rank={ranks - 1} step=4 call=40"


def has_the_same_bits_on_gpus(
    monkeypatch: pytest.MonkeyPatch, script: str, ranks: int, *options: str
) -> None:
    expected = on_processors(script, ranks)
    simulated_device.put_in_place(monkeypatch)
    assert run("cuda", script, ranks, *options) == expected
    drills = ("--drill", kill(ranks), "--drill", "driver-suspect rank=0 step=6 call=20")
    assert run("cuda", script, ranks, *options, *drills) == expected


def test_a_training_with_streams_of_its_own_has_the_same_bits_everywhere_and_through_faults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_the_same_bits_on_gpus(monkeypatch, "streams.py", 1)


@pytest.mark.parametrize("script", ["streams.py", "limited_gathers.py"])
def test_two_ranks_with_streams_of_their_own_have_the_same_bits_everywhere_and_through_faults(
    script: str, collectives: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_the_same_bits_on_gpus(monkeypatch, script, 2, "--collectives", collectives)


def shard(device: str, folder: Path, *options: str) -> list[str]:
    """What each rank writes; `options`: of proxyrun."""
    folder.mkdir()
    command = proxied.torchrun(
        2, proxied.WORKLOADS / "sharded_training.py", "--steps", "8", "--out", str(folder / "out")
    )
    options = ("--devices", f"{device}:2", *options)
    done = proxied.run(command, folder=folder, options=options, timeout_s=100)
    assert done.status == 0, done.output[-3000:]
    drills = options.count("--drill")
    assert [one["recovered"] for one in done.report["recoveries"]] == [True] * drills, done.report
    return [(folder / f"out.{rank}").read_text() for rank in range(2)]


def test_sharded_training_overlaps_on_a_gpu_and_has_the_bits_of_a_processor(
    collectives: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gathers and reductions are on four streams of its own, of a high priority."""
    expected = shard("cpu", folder / "cpu")
    assert [one.count("\n") for one in expected] == [8, 8]
    (counters := folder / "counters").mkdir()
    simulated_device.put_in_place(monkeypatch, SIMULATED_CUDA_COUNTERS=str(counters))
    drills = ("kill-server rank=1 step=4 call=150", "call-error rank=0 step=6 call=100")
    words = [word for drill in drills for word in ("--drill", drill)]
    assert shard("cuda", folder / "cuda", "--collectives", collectives, *words) == expected
    found = [one.overlapping for one in simulated_device.counters_in(counters).values()]
    print(f"kernels that began while others ran: {found}")
    assert sum(found) > 0
