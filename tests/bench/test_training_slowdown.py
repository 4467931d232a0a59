"""What training_slowdown.py makes of runs, and that all of it runs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adam_gpt import Trainee
from baseline_training import BASELINES, Taker, run, state_of, step
from persist_ways import one_rank
from places import ROOT
from slowdown_costs import IN_PLACE, Restarts, as_costs, kept_interval
from slowdown_measure import OURS, OURS_NATIVE, SWEEP, varied
from slowdown_plan import Segment, Turn, intermingled, parsed, row_of, spelled, whole_intervals, with_longer
from slowdown_report import verdicts
from slowdown_runs import Native, blocks_of, durable_sets
from training_run import RunFailed
from training_state import bytes_of, same

from understudy.recovery.costs.given.goodput_costs import Keeping, Persisting, parse_costs

pytestmark = pytest.mark.drawn(2)

TURN = Turn(
    "a", 10, steps=20, step_s=0.22, plain_s=0.2, processor_s=0.3, plain_processor_s=0.2, durable=2,
    durable_s=(0.5, 0.7),
)  # fmt: skip


def test_segments_are_what_they_were_on_the_command_line() -> None:
    segments = [Segment(0, 3, 9), Segment(10, 0, 20, 5)]
    assert parsed(spelled(segments)) == segments
    for wrong in ("", "1:2", "1:2:3:4:5", "a:b:c"):
        with pytest.raises((ValueError, TypeError)):
            parsed(wrong)


def test_every_segment_lies_between_two_without_snapshots() -> None:
    plain = Segment(0, 1, 3)
    segments = [Segment(interval, 0, interval) for interval in (1, 10, 25)]
    order = intermingled(segments, plain)
    assert order[::2] == [plain] * 4
    assert sorted(order[1::2], key=lambda one: one.interval) == segments


def test_a_ratio_is_the_median_of_the_rounds_ratios_not_that_of_medians() -> None:
    slow_machine = replace(TURN, step_s=2.0, plain_s=1.0)
    row = row_of([TURN, slow_machine, replace(TURN, step_s=0.9, plain_s=0.6)])
    assert row["slowdown"] == 1.5
    assert row["step_s"] == 0.9 and row["plain_s"] == 0.6
    assert (row["due"], row["durable"]) == (6, 6)
    assert row["durable_s"] == 0.6


def test_snapshots_that_were_left_out_show() -> None:
    row = row_of([replace(TURN, interval=1, durable=7, durable_s=(0.1,) * 7)])
    assert (row["due"], row["durable"]) == (20, 7)


def test_a_longer_interval_costs_the_same_snapshot_spread_over_more_steps() -> None:
    rows = with_longer([row_of([TURN])], (1, 10, 25, 100))
    assert [(row["interval"], row["from_interval"]) for row in rows] == [(10, None), (25, 10), (100, 10)]
    assert [row["slowdown"] for row in rows] == pytest.approx([1.1, 1.04, 1.01])
    assert [row["processor"] for row in rows] == pytest.approx([1.5, 1.2, 1.05])


def test_nothing_follows_for_a_longer_interval_where_one_snapshot_waited_for_another() -> None:
    for waiting in (replace(TURN, durable_s=(0.5, 2.1)), replace(TURN, durable=0, durable_s=())):
        assert with_longer([row_of([waiting])], (25,)) == [row_of([waiting])]


def test_whole_intervals_have_at_least_the_steps_asked_for() -> None:
    assert [whole_intervals(interval, 40) for interval in (1, 10, 25, 100)] == [40, 40, 50, 100]


def test_each_sweep_varies_one_thing() -> None:
    for name, points in SWEEP.items():
        assert len({varied(name, point) for point in points}) == len(points) == 3


def test_aims_are_for_the_intervals_that_were_measured() -> None:
    ours = [
        replace(TURN, way=OURS, interval=interval, step_s=step_s)
        for interval, step_s in ((1, 0.23), (10, 0.205))
    ]
    found = verdicts([row_of([turn]) for turn in ours])
    assert [(row["aim"], row["met"]) for row in found] == [(1.03, True), (1.1, False)]
    assert verdicts([row_of([TURN])]) == []


def test_a_log_of_proxyd_tells_when_which_step_was_durable_and_of_lost_ones() -> None:
    line = {"event": "snapshot is durable", "step": 7, "bytes": 5, "timestamp": "1970-01-01T00:01:00.5Z"}
    (found,) = durable_sets(f"text of a library\n{json.dumps(line)}\n" + '{"event": "stopping"}\n')
    assert (found.step, found.at_s, found.bytes) == (7, 60.5, 5)
    with pytest.raises(RunFailed, match="disk is full"):
        durable_sets('{"event": "a snapshot is not durable", "reason": "the disk is full"}')


def test_files_count_with_the_blocks_they_take(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    with open(tmp_path / "inner" / "sparse", "wb") as file:
        file.truncate(1 << 30)
    (tmp_path / "full").write_bytes(bytes(range(256)) * 256)
    assert (1 << 16) <= blocks_of(tmp_path) < 1 << 20
    assert blocks_of(tmp_path, "sparse") < 1 << 16


@pytest.fixture
def trainee() -> Trainee:
    made = Trainee(torch.device("cpu"), tiny=True)
    made.gradients()
    made.update()
    return made


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_saved_while_training_goes_on_is_the_state_after_that_step(
    name: str, trainee: Trainee, tmp_path: Path
) -> None:
    state = state_of(trainee)
    assert bytes_of(state) > 12 * sum(p.numel() for p in trainee.model.parameters())
    with (
        one_rank(),
        BASELINES[name].opened(tmp_path, state) as way,
        contextlib.closing(Taker(way, BASELINES[name].overlaps)) as taker,
    ):
        found = run(Segment(3, 0, 6), trainee, state, taker)
        assert len(found["durable_s"]) == 2
        step(trainee, taker)
        expected = {key: tensor.clone() for key, tensor in state.items()}
        taker.take(state)
        step(trainee, taker)
        taker.drain()
        assert not same(state, expected)
        assert same(way.load(), expected)


def natives() -> dict[str, list[Native]]:
    return {
        name: [Native([], [0.2], 3.0, 0.5, 1000)] for name in ("torch.save", "CheckFreq", "Gemini", "PCcheck")
    }


def test_costs_are_a_file_that_goodput_accepts_and_noise_is_no_speedup() -> None:
    measured = ((1, 0.4, 20), (10, 0.19, 2))
    rows = [
        row_of([replace(TURN, way=way, interval=every, step_s=step_s, durable=n, durable_s=(0.1 * every,))])
        for way in (*natives(), OURS_NATIVE, OURS)
        for every, step_s, n in measured
    ]
    costs = parse_costs(as_costs(rows, natives(), Restarts(4.0, 2.0, 0.3), "a test"))
    assert costs.measured and costs.step_s == 0.2
    by_name = {policy.name: policy for policy in costs.policies}
    assert set(by_name) == {*natives(), OURS, IN_PLACE}
    assert by_name["torch.save"].persists is Persisting.STALLS
    assert by_name["CheckFreq"].persists is Persisting.ONE_AT_A_TIME
    assert by_name["Gemini"].keeps_in is Keeping.PEER_MEMORY
    assert by_name["CheckFreq"].write_s == 1.0 and by_name["PCcheck"].write_s == pytest.approx(0.1)
    ours = by_name[IN_PLACE]
    assert ours.persists is Persisting.CONCURRENT and ours.slowdown == {1: 2.0, 10: 1.0}
    assert (ours.load_s, ours.reattach_s) == (2.0, 4.0)
    assert ours.in_place is not None
    assert (ours.in_place.replica_s, ours.in_place.join_s) == (0.3, pytest.approx(6.1))
    assert by_name[OURS].in_place is None


def test_a_way_that_leaves_snapshots_out_has_the_interval_that_it_kept() -> None:
    every = replace(TURN, interval=1, steps=20)
    for durable, interval in ((20, 1), (19, 1), (7, 3), (0, None)):
        assert kept_interval(row_of([replace(every, durable=durable)])) == interval
    derived = with_longer([row_of([TURN])], (25,))[-1]
    assert kept_interval(derived) == 25


def test_costs_are_refused_where_nothing_became_durable() -> None:
    rows = [row_of([replace(TURN, way=way, durable=0, durable_s=())]) for way in (*natives(), OURS_NATIVE)]
    with pytest.raises(RunFailed, match=r"no snapshot of torch\.save became durable"):
        as_costs(rows, natives(), Restarts(4.0, 2.0, 0.3), "a test")


@pytest.mark.long
@pytest.mark.timeout(600)  # a dozen processes import PyTorch, on whatever else is going on
def test_the_script_measures_every_way_and_goodput_takes_its_costs(tmp_path: Path) -> None:
    build = ROOT / "build"  # on a disk, wherever the tests' own folder is
    build.mkdir(exist_ok=True)
    before = set(build.iterdir())
    output = tmp_path / "results" / "out.json"
    scripts = ROOT / "bench" / "snapshots"
    command = [sys.executable, str(scripts / "training_slowdown.py"), "--quick", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(output.read_text())
    ways = {row["way"] for row in results["rows"]}
    assert ways == {"torch.save", "PCcheck", OURS, OURS_NATIVE}
    assert all(row["due"] > 0 and row["durable"] > 0 for row in results["rows"] if row["interval"] == 25)
    assert all(seconds > 0 for seconds in results["restarts"].values())
    footprint = results["footprint"]
    assert footprint["snapshot_bytes"] >= results["state_bytes"] and footprint["writer_bytes"] > 0
    assert sorted(path.name for path in output.parent.iterdir()) == ["out.json", "out.png", "out_costs.json"]
    assert set(build.iterdir()) == before
    trace = tmp_path / "trace.csv"
    trace.write_text("Time,GPUs\n0,2\n600,1\n1200,2\n")
    costs = output.with_name("out_costs.json")
    command = [sys.executable, str(scripts / "goodput.py"), "--costs", str(costs), "--trace", str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "NOT MEASURED" not in done.stdout, done.stdout + done.stderr
