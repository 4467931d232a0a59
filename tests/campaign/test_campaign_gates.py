"""Gates of a campaign: what a run must not do, and who is told that it did; runs that nobody can read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import STEPS, MadeUp, campaign

from understudy.campaigns.report.gates import Gate, Verdict, verdicts
from understudy.campaigns.report.matrix import Matrix
from understudy.campaigns.report.results import RUNS, Key, Results, read
from understudy.campaigns.running.manifest import LARGEST_FILE, MANIFEST, RECORD
from understudy.recovery.base.errors import BadInput

SUITE, OTHER = "gpt-fixed", "convnet-records"
CALM = "sources-gpt-undisturbed"


def judged(made: MadeUp, folder: Path) -> dict[str, Verdict]:
    return dict(verdicts(read(made.write(folder))))


def only_offence(made: MadeUp, folder: Path, gate: Gate, suite: str = SUITE) -> str:
    """Of the campaign: its sentence. All other suites pass."""
    found = judged(made, folder)
    assert [name for name, verdict in found.items() if not verdict.passed] == [suite]
    (offence,) = found[suite].offences
    assert offence.gate is gate
    return offence.sentence


def compared(loss_difference: float, distances: dict[str, float]) -> dict[str, Any]:
    """With the undisturbed run: different parameters."""
    return {
        "parameters_equal": False,
        "losses_equal": False,
        "loss_difference": loss_difference,
        "distances": distances,
    }


def test_a_campaign_without_a_blemish_passes_all_gates(tmp_path: Path) -> None:
    found = judged(MadeUp.complete(), tmp_path)
    assert len(found) == 4
    assert all(verdict.passed for verdict in found.values()), [v.offences for v in found.values()]


def test_a_peer_that_is_absent_is_no_offence_and_is_shown_with_its_error(tmp_path: Path) -> None:
    excuses = judged(MadeUp.complete(), tmp_path)[SUITE].excuses
    assert [(one.key.variant, one.status) for one in excuses] == [("torchft", "absent")] * 3
    assert "libtorchft.so" in excuses[0].why


def test_a_fault_that_cannot_happen_to_a_variant_is_no_offence(tmp_path: Path) -> None:
    schedule = {"kind": "resize", "lost": 9, "back": 30}
    made = campaign([{"name": "resize", "data": "digits", "model": "mlp", "schedule": schedule}])
    verdict = judged(MadeUp.complete(made), tmp_path)["resize"]
    assert verdict.passed
    assert {one.key.variant for one in verdict.excuses} == {"jit", "transparent", "torchft"}


def test_a_variant_that_skips_a_step_misses_its_target(tmp_path: Path) -> None:
    made = MadeUp.complete()
    made.spoil(SUITE, "overlapped", 2, steps=STEPS - 1)
    said = only_offence(made, tmp_path, Gate.TARGET)
    assert said == f"overlapped with seed 2 came to step {STEPS - 1} of {STEPS}"


def test_a_run_that_failed_is_told_with_its_reason_on_one_line(tmp_path: Path) -> None:
    made = MadeUp.complete()
    made.spoil(SUITE, "jit", 1, status="failed", steps=12, why="Traceback:\n  it\nbroke " + "!" * 2000)
    said = only_offence(made, tmp_path, Gate.TARGET)
    assert said.startswith(f"jit with seed 1 came to step 12 of {STEPS}: Traceback: it broke !!!")
    assert "\n" not in said and len(said) < 500


def test_a_fault_that_never_fires_is_told(tmp_path: Path) -> None:
    made = MadeUp.complete()
    key = Key(SUITE, "blocking", 3)
    made.runs[key]["faults"][1] |= {"fired": False, "at": None}
    said = only_offence(made, tmp_path, Gate.FIRED)
    assert said == "blocking with seed 3 was to have kill of rank 0 in step 30, which never fired"


def test_a_fault_that_a_record_leaves_out_is_told(tmp_path: Path) -> None:
    made = MadeUp.complete()
    key = Key(SUITE, "blocking", 3)
    del made.runs[key]["faults"][0]
    said = only_offence(made, tmp_path, Gate.FIRED)
    assert "was to have a fault of rank 0 in step 12, of which its record knows nothing" in said


def test_a_fault_that_nobody_scheduled_is_told(tmp_path: Path) -> None:
    made = MadeUp.complete()
    made.runs[Key(CALM, "blocking", 1)]["faults"].append(
        {"kind": "kill", "step": 7, "rank": 1, "place": 0.0, "fired": True, "at": 2.0}
    )
    said = only_offence(made, tmp_path, Gate.FIRED, CALM)
    assert "had a fault of rank 1 in step 7, which no schedule has" in said


def test_a_sampler_that_repeats_a_window_fails_the_account_of_samples(tmp_path: Path) -> None:
    made = MadeUp.complete()
    made.spoil(SUITE, "transparent", 1, samples={"exact": False, "sentence": "epoch 0: 32 duplicates"})
    said = only_offence(made, tmp_path, Gate.SAMPLES)
    assert said.endswith("did not have the samples that it was to have: epoch 0: 32 duplicates")


def test_a_run_without_an_account_of_samples_fails_but_not_a_command_of_ones_own(tmp_path: Path) -> None:
    made = MadeUp.complete()
    made.spoil(SUITE, "transparent", 1, samples=None)
    assert "has no account of its samples" in only_offence(made, tmp_path / "ours", Gate.SAMPLES)
    made.spoil(SUITE, "transparent", 1, data="")
    assert judged(made, tmp_path / "own")[SUITE].passed


def test_parameters_that_were_promised_to_the_bit_and_differ_are_told(tmp_path: Path) -> None:
    made = MadeUp.complete()
    differs = {
        "parameters_equal": False,
        "losses_equal": True,
        "loss_difference": 0.0,
        "distances": {"40": 1e-9},
    }
    made.spoil(SUITE, "jit", 2, comparison=differs)
    said = only_offence(made, tmp_path, Gate.PARAMETERS)
    assert (
        said == "jit with seed 2 promises the bits, and its parameters are not those of the undisturbed run"
    )


@pytest.mark.parametrize(
    ("comparison", "passes"),
    [
        (compared(0.1, {"40": 2.5}), True),
        (compared(0.0, {}) | {"parameters_equal": True}, True),
        (compared(0.1, {}), False),
        (compared(float("nan"), {"40": 1.0}), False),
        (None, False),
    ],
)
def test_where_bits_are_not_promised_a_loss_difference_and_distances_are_needed(
    comparison: dict[str, Any] | None, passes: bool, tmp_path: Path
) -> None:
    made = MadeUp.complete()
    made.spoil(SUITE, "jit", 2, exact=False, comparison=comparison)
    verdict = judged(made, tmp_path)[SUITE]
    assert verdict.passed is passes
    assert all(one.gate is Gate.PARAMETERS for one in verdict.offences)


def test_a_command_of_ones_own_is_judged_by_its_losses(tmp_path: Path) -> None:
    made = MadeUp.complete()
    losses = {"parameters_equal": True, "losses_equal": False, "loss_difference": 0.1, "distances": {}}
    made.spoil(SUITE, "transparent", 1, data="", samples=None, comparison=losses)
    assert "its losses are not those" in only_offence(made, tmp_path, Gate.PARAMETERS)


def test_a_left_over_process_is_told_even_of_a_run_that_failed(tmp_path: Path) -> None:
    made = MadeUp.complete()
    made.spoil(SUITE, "blocking", 1, left_behind=["process 4711: python train.py"])
    assert only_offence(made, tmp_path / "done", Gate.LEFT) == (
        "blocking with seed 1 left process 4711: python train.py behind"
    )
    made.spoil(SUITE, "blocking", 1, status="failed", steps=1)
    found = judged(made, tmp_path / "failed")[SUITE]
    assert [one.gate for one in found.offences] == [Gate.TARGET, Gate.LEFT]


@pytest.mark.parametrize(("share", "passes"), [(0.049, True), (0.051, False), (-0.051, False)])
def test_more_than_a_twentieth_of_the_seconds_unaccounted_is_told(
    share: float, passes: bool, tmp_path: Path
) -> None:
    made = MadeUp.complete()
    run = made.runs[Key(SUITE, "blocking", 1)]
    whole = run["wall"] - run["starting"] - run["ending"]
    missing = share * run["wall"]
    run |= {"unaccounted": missing, "parts": {"compute": whole - missing}}
    verdict = judged(made, tmp_path)[SUITE]
    assert verdict.passed is passes
    assert all(one.gate is Gate.ACCOUNTED for one in verdict.offences)


def test_parts_that_are_not_the_whole_are_told(tmp_path: Path) -> None:
    made = MadeUp.complete()
    made.runs[Key(SUITE, "blocking", 1)]["parts"]["compute"] += 0.5
    assert "has parts and an unaccounted rest of" in only_offence(made, tmp_path, Gate.ACCOUNTED)


def _absent(folder: Path) -> None:
    (folder / RECORD).unlink()


def _truncated(folder: Path) -> None:
    content = (folder / RECORD).read_text()
    (folder / RECORD).write_text(content[: len(content) // 2])


def _unknown_key(folder: Path) -> None:
    (folder / RECORD).write_text(json.dumps(json.loads((folder / RECORD).read_text()) | {"more": 1}))


def _nested(folder: Path) -> None:
    (folder / RECORD).write_text("[" * 100_000)


def _bytes(folder: Path) -> None:
    (folder / RECORD).write_bytes(b"\xff\x00\xfe" * 100)


def _large(folder: Path) -> None:
    with (folder / RECORD).open("wb") as file:
        file.truncate(LARGEST_FILE + 1)


def _pipe(folder: Path) -> None:
    (folder / RECORD).unlink()
    os.mkfifo(folder / RECORD)


def _infinite(folder: Path) -> None:
    (folder / RECORD).write_text(
        json.dumps(json.loads((folder / RECORD).read_text()) | {"wall": float("inf")})
    )


def _other_run(folder: Path) -> None:
    (folder / RECORD).write_text(json.dumps(json.loads((folder / RECORD).read_text()) | {"seed": 3}))


def _strange_part(folder: Path) -> None:
    run = json.loads((folder / RECORD).read_text())
    (folder / RECORD).write_text(json.dumps(run | {"parts": {"lunch": 1.0}}))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_absent, "has no run.json"),
        (_truncated, "cannot be read"),
        (_unknown_key, "more: Extra inputs"),
        (_nested, "cannot be read"),
        (_bytes, "cannot be read"),
        (_large, "more than 16 MiB"),
        (_pipe, "no plain file"),
        (_infinite, "wall is inf s"),
        (_other_run, "it is of gpt-fixed, jit with seed 3"),
        (_strange_part, "'lunch' is no part"),
    ],
)
def test_a_record_that_cannot_be_relied_on_fails_its_suite_and_no_more(
    spoil: Any, said: str, tmp_path: Path
) -> None:
    folder = MadeUp.complete().write(tmp_path)
    spoil(folder / RUNS / Key(SUITE, "jit", 1).folder)
    found = verdicts(read(folder))
    assert [name for name, verdict in found.items() if not verdict.passed] == [SUITE]
    (offence,) = found[SUITE].offences
    assert offence.gate is Gate.ARTIFACTS
    assert offence.sentence.startswith("jit with seed 1 has ") and said in offence.sentence


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "it is no folder of a campaign"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"campaign": {}}', "campaign.name: Field required"),
    ],
)
def test_a_damaged_plan_is_one_sentence(content: str | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(BadInput, match=said) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_plan_cannot_name_a_run_outside_of_its_folder(tmp_path: Path) -> None:
    folder = MadeUp.complete().write(tmp_path)
    plan = json.loads((folder / MANIFEST).read_text())
    plan["runs"].append({"suite": "../../elsewhere", "variant": "bare", "seed": 1})
    (folder / MANIFEST).write_text(json.dumps(plan))
    with pytest.raises(BadInput, match="suite"):
        read(folder)


def test_a_failed_suite_leaves_the_aggregates_and_a_failed_reference_its_comparisons(tmp_path: Path) -> None:
    made = MadeUp.complete()
    made.spoil(SUITE, "blocking", 1, left_behind=["a process"])
    matrix = Matrix.of(read(made.write(tmp_path / "suite")))
    assert [suite.name for suite in matrix.counted] == [OTHER]
    assert matrix.overall(lambda suite: matrix.gains(suite, "overlapped", "blocking")).n == 3  # its seeds

    made = MadeUp.complete()
    made.spoil(CALM, "bare", 1, left_behind=["a process"])
    matrix = Matrix.of(read(made.write(tmp_path / "reference")))
    assert not matrix.calm("sources-gpt") and matrix.calm("digits-convnet")
    assert not matrix.drops(matrix.results.suites[SUITE], "jit")


def test_suites_that_vary_a_knob_or_have_variants_of_their_own_are_in_no_mean(tmp_path: Path) -> None:
    one: dict[str, Any] = {"data": "sources", "model": "gpt", "schedule": {"kind": "steps", "at": [9]}}
    more = [
        one | {"name": "every-5", "schedule": {"kind": "none"}, "checkpoint_every": 5},
        one | {"name": "few", "variants": ["bare"]},
        one | {"name": "first"},
        one | {"name": "second"},
    ]
    matrix = Matrix.of(read(MadeUp.complete(campaign(more)).write(tmp_path)))
    assert [suite.name for suite in matrix.counted] == ["first", "second"]


def test_where_a_trace_is_gone_it_is_said_that_faults_could_not_be_reckoned_again(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("Time,GPUs\n0,4\n1000,3\n2000,4\n")
    schedule = {"kind": "trace", "file": str(trace), "hours": 1}
    made = campaign([{"name": "spot", "data": "digits", "model": "mlp", "schedule": schedule}], seeds=(1, 2))
    folder = MadeUp.complete(made).write(tmp_path / "campaign")
    assert verdicts(read(folder))["spot"].unreckoned == ()
    trace.unlink()
    assert verdicts(read(folder))["spot"].unreckoned == (1, 2)


def test_all_kinds_of_schedules_can_be_reckoned_again_from_the_plan(tmp_path: Path) -> None:
    schedules: list[dict[str, Any]] = [
        {"kind": "none"},
        {"kind": "steps", "at": [9]},
        {"kind": "burst", "at": [9]},
        {"kind": "records", "count": 3},
        {"kind": "poisson", "mean": 2},
        {"kind": "kinds", "faults": ["kill", "hang"]},
        {"kind": "resize", "lost": 9, "back": 20},
    ]
    one = {"data": "digits", "model": "mlp", "variants": ["bare"]}
    suites = [one | {"name": schedule["kind"], "schedule": schedule} for schedule in schedules]
    made = campaign(suites)
    results: Results = read(MadeUp.complete(made).write(tmp_path))
    for suite in made.suites:
        for seed in made.seeds:
            assert results.scheduled(suite.name, seed) == suite.schedule.faults(made.steps, made.ranks, seed)
