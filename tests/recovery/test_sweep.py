"""A seeded sample of the sweep: faults at calls of three models change no bit."""

from __future__ import annotations

import random
import sys

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "sweep"))

from fault_sweep import Sweep
from sweep_models import COMMITS, MODELS
from sweep_points import FAULTS, Outcome, Point, all_points, sample

pytestmark = pytest.mark.drawn(3)

MANY = {"kill-server": 20, "call-error": 20, "sticky-error": 10, "stop-server": 2}
"""Points of a model, all in one training."""
FEW = {"kill-server": 6, "call-error": 5, "sticky-error": 2, "stop-server": 1}

SWEPT = [
    *(pytest.param((model, MANY if model == "gpt" else FEW), id=model) for model in MODELS),
    *(pytest.param((model, MANY), id=f"{model}-long", marks=pytest.mark.long)
      for model in MODELS if model != "gpt"),
]  # fmt: skip


@pytest.fixture(scope="module", params=SWEPT)
def swept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """The outcomes of one model's sample."""
    (model, numbers), seed = request.param, 20261121
    print(f"seed {seed}")
    sweep = Sweep(tmp_path_factory.mktemp(model))
    room = sum(numbers.values()) + COMMITS[model]
    calls = {model: sweep.count_calls(model, room)}
    points = [
        point
        for fault in FAULTS
        for point in sample(all_points(calls, [model], [fault]), numbers[fault], seed)
    ]
    # A minibatch ends with its optimizer's step, which takes few records: the sample might miss it.
    ends = {Point(model, FAULTS[0], commit, last - 3) for commit, last in enumerate(calls[model])}
    points += sorted(ends - set(points))
    random.Random(seed).shuffle(points)
    return sweep.strike(points, room)


def test_a_fault_at_any_call_changes_no_value_parameter_or_generator(swept: list[Outcome]) -> None:
    assert len(swept) >= sum(FEW.values())
    assert [outcome for outcome in swept if outcome.problem or not outcome.identical] == []
    assert {outcome.phase for outcome in swept} == {"FORWARD_BACKWARD", "OPTIMIZER"}
