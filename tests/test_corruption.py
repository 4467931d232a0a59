"""A bit of a parameter changes by itself: it is noticed, and training ends with the right bits."""

from __future__ import annotations

import json
from pathlib import Path

import proxied
import pytest
from compiled_programs import program
from test_training import EXAMPLES

STEPS = 40


@pytest.mark.parametrize("call", [5, pytest.param(60, marks=pytest.mark.long)])
def test_a_flipped_bit_of_a_parameter_is_found_by_digests_and_repaired(call: int, tmp_path: Path) -> None:
    """What the corrupted step has already shown to the script stays; everything after it is right again."""
    training = EXAMPLES["digits_convnet"](2, STEPS, 0.1)
    unfaulted = training.run(tmp_path / "unfaulted", proxied=True)
    faulted = training.run(
        tmp_path / "faulted", proxied=True, drills=(f"bit-flip rank=1 step=20 call={call}",)
    )
    recoveries = faulted.report["recoveries"]
    assert recoveries and all(recovery["recovered"] for recovery in recoveries), json.dumps(recoveries)
    assert {recovery["fault"] for recovery in recoveries} == {"silent-corruption"}
    differing = [
        step
        for rank in range(2)
        for step, (ours, theirs) in enumerate(zip(unfaulted.losses[rank], faulted.losses[rank], strict=True))
        if ours != theirs
    ]
    assert set(differing) <= set(range(19, 30))  # until it was noticed
    assert unfaulted.losses[0][-1] == faulted.losses[0][-1]


@pytest.fixture
def drifting(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that uses an operator that does not replay."""
    monkeypatch.setenv("UNDERSTUDY_TEST_LIBRARY", str(program("libdrifting.so")))
    return proxied.WORKLOADS / "drifting.py"


def test_a_job_whose_operator_does_not_replay_is_told_so_and_trains_on(
    tmp_path: Path, drifting: Path
) -> None:
    """Also past steps that are to be validated, and although a bit of a parameter changes."""
    # Late enough for proxyd, which looks every 20 ms, to know the replicas.
    options = ("--validate-every", "10", "--drill", "bit-flip rank=1 step=800 call=5")
    ended = proxied.run(proxied.ranks(2, drifting, "1000"), folder=tmp_path, options=options)
    assert ended.status == 0, ended.output[-3000:]
    assert "rank" in ended.report["not_replayable"]
    assert "drifting" in ended.report["not_replayable"]
    assert ended.report["validations"] == 1
    assert ended.report["recoveries"] == []
    assert "corrupted state stays" in ended.output


def test_a_job_that_ends_right_after_its_validation_is_told_of_it(tmp_path: Path, drifting: Path) -> None:
    ended = proxied.run(proxied.ranks(2, drifting, "5"), folder=tmp_path)
    assert ended.status == 0, ended.output[-3000:]
    assert "drifting" in ended.report["not_replayable"]


def test_a_replay_that_gives_other_values_than_the_program_was_given_is_a_loud_error(
    tmp_path: Path, drifting: Path
) -> None:
    options = ("--validate-every", "0", "--drill", "kill-server rank=1 step=20 call=8")
    ended = proxied.run(proxied.ranks(2, drifting, "30"), folder=tmp_path, options=options)
    assert ended.status == 0, ended.output[-3000:]
    assert ended.report["replies_different"] > 0
    assert "replayed values differ" in ended.report["not_replayable"]
    assert "DIFFER" in ended.report["recoveries"][0]["verified"]
    assert "replayed values differ" in ended.output
