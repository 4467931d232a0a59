"""Goodput under a trace of preemptions: the paper's worked numbers, hand-made traces, and refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import goodput
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

from understudy.recovery.costs.given.goodput_costs import (
    BadCosts,
    Costs,
    InPlace,
    Keeping,
    Persisting,
    Policy,
    example,
    parse_costs,
)
from understudy.recovery.costs.models.goodput_model import (
    BadTrace,
    Trace,
    by_formula,
    durable_after_s,
    evaluate,
    longest_recovery_of,
    read_trace,
    through_events,
)

TRACE = ROOT.parent / "shared" / "data" / "a100_spot_preemptions.csv"

CONCURRENT = Policy("concurrent", Persisting.CONCURRENT, Keeping.STORAGE, 1, 5.0, 7.0, 3.0, {10: 1.0}, None)
ONE = replace(CONCURRENT, name="one", persists=Persisting.ONE_AT_A_TIME)
STALLING = replace(CONCURRENT, name="stalling", persists=Persisting.STALLS)
IN_PLACE = replace(CONCURRENT, name="in place", in_place=InPlace(replica_s=2.0, join_s=4.0))
IN_MEMORY = replace(ONE, name="memory", keeps_in=Keeping.PEER_MEMORY, reattach_s=0.0)


def costs_of(*policies: Policy, shards: int = 1) -> Costs:
    return Costs(False, "made up", 1.0, shards, policies)


def run(trace: Trace, policy: Policy, shards: int = 1, seed: int | None = 0, interval: int = 10) -> Any:
    return through_events(trace, costs_of(policy, shards=shards), policy, interval, seed)


@pytest.fixture
def spot_trace() -> Trace:
    """The one the paper replays."""
    if not TRACE.is_file():
        pytest.skip(f"no trace of preemptions at {TRACE}: it is not part of the repository")
    return read_trace(TRACE)


# ------------------------------------------------------------------ the paper's own numbers
# Figure 9d, f = 10.  Iterations per second, iterations without failures, redone, left:
# PCcheck 0.5, 6137, 550, 5587; CheckFreq 0.256, 3404, 257, 3147.
def paper_policy(persists: Persisting, in_flight: int = 1, write_s: float = math.inf) -> Policy:
    """What 5.2.3 says of it; the iterations that it counts as redone are without loading."""
    return replace(CONCURRENT, persists=persists, in_flight=in_flight, write_s=write_s, load_s=0.0)


def test_checkfreqs_iterations_of_figure_9d_follow_from_the_losses_of_the_trace(spot_trace: Trace) -> None:
    """f = 10 loses 0 to 2 f, so 10 on average, 26 times: 260 (paper: 257), and 3404 - 260 = 3144 (3147)."""
    losses = sum(change.is_loss for change in spot_trace.changes)
    assert (losses, len(spot_trace.changes)) == (26, 48)
    step_s = 1 / 0.256
    found = by_formula(
        replace(costs_of(), step_s=step_s), paper_policy(Persisting.ONE_AT_A_TIME), 10, 3404 * step_s, losses
    )
    assert found.without_failures == pytest.approx(3404)
    assert found.redone == pytest.approx(257, rel=0.012)
    assert found.goodput * 3404 * step_s == pytest.approx(3147, rel=0.001)


def test_rolling_back_at_every_change_as_the_paper_describes_it_would_redo_nearly_twice_as_much(
    spot_trace: Trace,
) -> None:
    found = by_formula(costs_of(), paper_policy(Persisting.ONE_AT_A_TIME), 10, 1e6, len(spot_trace.changes))
    assert found.redone == 480


def test_pcchecks_redone_iterations_of_figure_9d_lie_between_three_and_four_snapshots_at_once(
    spot_trace: Trace,
) -> None:
    """550 / 26 = 21.2 is half of f + min(N f, T_w / t) = 42.3; without N and T_w no more follows."""
    losses = sum(change.is_loss for change in spot_trace.changes)
    redone = [
        by_formula(costs_of(), paper_policy(Persisting.CONCURRENT, count), 10, 1e6, losses).redone
        for count in (3, 4)
    ]
    assert redone == [520, 650]
    assert redone[0] < 550 < redone[1]


def test_the_ratios_that_the_paper_names_follow_from_its_iterations() -> None:
    assert (6137 - 550, 3404 - 257) == (5587, 3147)
    assert math.floor(100 * 5587 / 3147) == 177  # "1.77 x higher goodput"


def test_the_papers_throughputs_give_its_iterations_for_no_single_length_of_the_trace(
    spot_trace: Trace,
) -> None:
    """6137 / 0.5 and 3404 / 0.256 are 12274 s and 13297 s: 0.5 can only be 0.46.  The trace is longer."""
    assert (round(6137 / 0.5), round(3404 / 0.256)) == (12274, 13297)
    assert round(6137 / 13297, 1) == 0.5
    assert spot_trace.length_s == 13482


# ------------------------------------------------------------------ the formula
def test_the_longest_recoveries_are_those_of_section_4_2() -> None:
    """l + f t; l + 2 f t; l + f t + t min(N f, T_w / t)."""
    assert longest_recovery_of(STALLING, 10, 2.0) == 7 + 20
    assert longest_recovery_of(ONE, 10, 2.0) == 7 + 40
    assert longest_recovery_of(CONCURRENT, 10, 2.0) == 7 + 20 + 5
    assert longest_recovery_of(replace(CONCURRENT, write_s=500, in_flight=3), 10, 2.0) == 7 + 20 + 60


def test_goodput_is_what_is_left_of_the_time_after_average_recoveries() -> None:
    """rec = 4 (7 + 20 / 2) = 68 s of 1000 s, a step takes 2 s."""
    policy = replace(STALLING, slowdown={10: 2.0})
    found = by_formula(costs_of(policy), policy, 10, 1000.0, 4)
    assert found.recovering_s == 68
    assert found.goodput == pytest.approx((1000 - 68) / 2 / 1000)
    assert found.redone == 20
    assert by_formula(costs_of(policy), policy, 10, 1000.0, 10**6).goodput == 0


# ------------------------------------------------------------------ through the events, by hand
# A step takes 1 s; a snapshot is taken every 10 steps.
LOSS_AT_102 = Trace(((0.0, 4), (102.0, 3), (200.0, 3)))


def test_without_changes_everything_is_kept() -> None:
    quiet = run(Trace(((0.0, 4), (200.0, 4))), CONCURRENT)
    assert (quiet.kept, quiet.redone, quiet.stopped_s, quiet.restored) == (200, 0, 0, 0)


def test_a_loss_goes_back_to_the_newest_snapshot_that_was_durable_by_then() -> None:
    """The snapshot of step 100 takes 5 s and is not, at 102 s; 3 s + 7 s later training goes on from 90."""
    found = run(LOSS_AT_102, CONCURRENT)
    assert found.redone == 12
    assert found.stopped_s == 10
    assert found.kept == 90 + (200 - 112)
    assert (found.in_place, found.restored, found.from_scratch) == (0, 1, 0)


def test_a_snapshot_that_stalls_training_is_durable_when_training_goes_on() -> None:
    assert run(LOSS_AT_102, STALLING).redone == 2


def test_a_write_takes_no_longer_than_the_snapshots_under_way_allow() -> None:
    slow = replace(CONCURRENT, write_s=1000.0, in_flight=3)
    assert durable_after_s(slow, 10, 1.0) == 30
    assert run(LOSS_AT_102, slow).redone == 102 - 70


def test_a_loss_that_leaves_a_replica_of_every_shard_loses_no_step() -> None:
    found = run(LOSS_AT_102, IN_PLACE)
    assert (found.kept, found.redone, found.stopped_s) == (198, 0, 2)
    assert (found.in_place, found.restored) == (1, 0)


def test_a_loss_that_takes_all_of_a_shard_goes_back_to_a_snapshot_whatever_else_survives() -> None:
    found = run(LOSS_AT_102, IN_PLACE, shards=4)
    assert found.in_place == 0
    assert (found.kept, found.stopped_s) == (90, 98)  # three devices do not hold four shards


def test_an_unlucky_loss_takes_the_devices_of_one_shard() -> None:
    lost_half = Trace(((0.0, 4), (102.0, 2), (200.0, 2)))
    found = run(lost_half, IN_PLACE, shards=2, seed=None)
    assert (found.in_place, found.restored, found.redone) == (0, 1, 12)


def test_a_job_with_too_few_devices_waits_for_more_and_then_restores() -> None:
    trace = Trace(((0.0, 2), (102.0, 1), (150.0, 2), (200.0, 2)))
    found = run(trace, IN_PLACE, shards=2)
    assert (found.kept, found.restored) == (90 + 200 - 160, 2)


def test_gained_devices_are_taken_in_without_a_rollback_only_in_place() -> None:
    gain = Trace(((0.0, 2), (102.0, 4), (200.0, 4)))
    assert run(gain, IN_PLACE).kept == 200 - 4
    assert run(gain, CONCURRENT).kept == 90 + (200 - 112)
    ignored = through_events(gain, costs_of(CONCURRENT), CONCURRENT, 10, 0, rejoins=False)
    assert ignored.kept == 200


def test_a_second_loss_during_a_restore_begins_the_restore_anew() -> None:
    trace = Trace(((0.0, 4), (102.0, 3), (105.0, 2), (200.0, 2)))
    found = run(trace, CONCURRENT)
    assert found.kept == 90 + (200 - 115)
    assert found.redone == 12


def test_a_second_loss_during_a_restore_cannot_be_recovered_in_place() -> None:
    """What the devices are still loading, none of them can give to another."""
    trace = Trace(((0.0, 4), (102.0, 2), (105.0, 3), (200.0, 3)))
    found = run(trace, IN_PLACE, shards=2, seed=None)
    assert (found.in_place, found.restored) == (0, 2)


def test_snapshots_in_memory_are_lost_with_the_devices_that_hold_them() -> None:
    """Shard 1 of two lies with devices 1 and 0 (the next one); both go."""
    trace = Trace(((0.0, 2), (102.0, 0), (110.0, 2), (200.0, 2)))
    found = run(trace, IN_MEMORY, shards=2)
    assert (found.kept, found.redone, found.from_scratch) == (200 - 117, 102, 1)
    assert run(Trace(((0.0, 3), (102.0, 2), (200.0, 2))), IN_MEMORY, shards=2).from_scratch == 0


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    counts = draw(st.lists(st.integers(0, 8), min_size=2, max_size=20))
    gaps = draw(st.lists(st.floats(0.5, 500), min_size=len(counts), max_size=len(counts)))
    times = [sum(gaps[1 : index + 1]) for index in range(len(counts))]
    return Trace(tuple(zip(times, counts, strict=True)))


@settings(deadline=None, database=None, print_blob=True)
@given(
    traces(),
    st.sampled_from([CONCURRENT, ONE, STALLING, IN_PLACE, IN_MEMORY]),
    st.integers(1, 4),
    st.integers(0, 9),
)
def test_every_second_is_training_that_is_kept_or_redone_or_standing_still(
    trace: Trace, policy: Policy, shards: int, seed: int
) -> None:
    policy = replace(policy, slowdown={10: 1.5})
    found = run(trace, policy, shards, seed)
    assert min(found.kept, found.redone, found.stopped_s + 1e-6) >= 0
    assert (found.kept + found.redone) * 1.5 + found.stopped_s == pytest.approx(trace.length_s)
    assert found == run(trace, policy, shards, seed)


@settings(deadline=None, database=None, print_blob=True)
@given(traces(), st.integers(1, 4), st.integers(0, 9))
def test_going_on_in_place_within_the_time_of_a_restore_never_keeps_fewer_steps(
    trace: Trace, shards: int, seed: int
) -> None:
    assert run(trace, IN_PLACE, shards, seed).kept >= run(trace, CONCURRENT, shards, seed).kept - 1e-6


# ------------------------------------------------------------------ the trace
def test_the_trace_is_read_as_it_is(spot_trace: Trace) -> None:
    assert len(spot_trace.samples) == 215
    assert spot_trace.samples[0] == (0.0, 56)
    assert spot_trace.changes[0].at_s == pytest.approx(630)
    assert (spot_trace.changes[0].before, spot_trace.changes[0].after) == (56, 36)
    assert spot_trace.until_devices_are_gone().samples[-1][1] == 15


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n3,4\n", "Time,GPUs\n1,2\n", "Time,GPUs\n2,1\n1,1\n", "Time,GPUs\n1,x\n2,1\n"]
)
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(BadTrace, match="is no trace: it needs"):
        read_trace(tmp_path / "trace.csv")


# ------------------------------------------------------------------ costs
def test_the_example_is_valid_and_says_in_itself_that_it_was_not_measured() -> None:
    costs = parse_costs(example())
    assert not costs.measured
    assert "nothing was measured" in costs.origin
    assert [p.name for p in costs.policies] == [
        "torch_save", "gpm", "checkfreq", "dcp_async", "gemini", "pccheck", "understudy"
    ]  # fmt: skip


def spoilt(path: str, value: Any) -> dict[str, Any]:
    """The example with one place changed; None: removed."""
    found = example()
    *way, last = path.split(".")
    place = found
    for step in way:
        place = place[step]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return found


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("origin", None, "origin is missing; --example-costs shows"),
        ("origin", " ", "origin must say who measured what"),
        ("measured", "yes", "measured must be true, or false"),
        ("step_s", 0, "step_s is 0: it must be a number"),
        ("shards", 1.5, "shards is 1.5: it must be a whole number"),
        ("policies", {}, "policies must hold at least one"),
        ("policies.gpm.load_s", "7", "policies.gpm.load_s is '7': it must be a number, 0 or more"),
        ("policies.gpm.write_s", math.nan, "policies.gpm.write_s is nan"),
        ("policies.gpm.speed", 1, "policies.gpm.speed is unknown"),
        ("policies.gpm.persists", "fast", "'fast': it must be stalls or one-at-a-time or concurrent"),
        ("policies.gpm.in_flight", 2, "in_flight is 2: only concurrent ones"),
        ("policies.gpm.slowdown", {}, "policies.gpm.slowdown must map intervals to factors"),
        ("policies.gpm.slowdown", {"0": 1.1}, "'0' is no interval in steps"),
        (
            "policies.gpm.slowdown",
            {"10": 0.9},
            "policies.gpm.slowdown.10 is 0.9: it must be a number, 1 or more",
        ),
        ("policies.understudy.in_place", {"replica_s": 1}, "policies.understudy.in_place.join_s is missing"),
    ],
)
def test_mistakes_in_a_costs_file_are_named_by_their_place(path: str, value: Any, sentence: str) -> None:
    with pytest.raises(BadCosts, match=sentence):
        parse_costs(spoilt(path, value))


# ------------------------------------------------------------------ the program
@pytest.fixture
def made_up(tmp_path: Path) -> list[str]:
    """Arguments: the example costs and a short trace."""
    (tmp_path / "costs.json").write_text(json.dumps(example()))
    rows = ((63 * i, 8 - i % 3) for i in range(20))
    (tmp_path / "trace.csv").write_text("Time,GPUs\n" + "".join(f"{time},{gpus}\n" for time, gpus in rows))
    return ["--costs", str(tmp_path / "costs.json"), "--trace", str(tmp_path / "trace.csv")]


def test_without_costs_it_refuses_to_make_any_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert goodput.main([]) == 2
    assert "goodput has no numbers of its own" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_told_in_a_sentence(
    made_up: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert goodput.main([*made_up[:2], "--trace", str(tmp_path / "none.csv")]) == 2
    assert "none.csv cannot be read: No such file" in capsys.readouterr().err


def test_the_example_costs_are_printed_as_they_would_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert goodput.main(["--example-costs"]) == 0
    assert parse_costs(json.loads(capsys.readouterr().out)) == parse_costs(example())


def test_everything_made_of_costs_that_nobody_measured_says_so(
    made_up: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert goodput.main([*made_up, "--output", str(tmp_path / "out.json")]) == 0
    assert capsys.readouterr().out.count("NOT MEASURED") == 2
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["measured"] is False
    assert {row["policy"] for row in written["rows"]} == set(example()["policies"])


def test_equal_input_gives_equal_files(made_up: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    for turn in "12":
        options = ["--output", str(tmp_path / f"{turn}.json"), "--plot", str(tmp_path / f"{turn}.png")]
        assert goodput.main([*made_up, *options]) == 0
    for kind in ("json", "png"):
        assert (tmp_path / f"1.{kind}").read_bytes() == (tmp_path / f"2.{kind}").read_bytes()
    assert (tmp_path / "1.png").read_bytes().startswith(b"\x89PNG")


def test_in_the_papers_trace_the_concurrent_policy_beats_the_others_at_short_intervals(
    spot_trace: Trace,
) -> None:
    """With the example's costs: a check of the machinery, not a result."""
    rows = {
        (row.policy, row.interval): row
        for row in evaluate(parse_costs(example()), spot_trace, 2, every_change=True)
    }
    for value in ("formula", "events"):
        rate = {key: row.formula.goodput if value == "formula" else row.goodput for key, row in rows.items()}
        assert rate["pccheck", 10] > max(rate["checkfreq", 10], rate["gpm", 10], rate["torch_save", 10])
