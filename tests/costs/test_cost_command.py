"""`recoveryctl cost`: inputs with their origin, one sentence per mistake, a report that is made."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from made_up_costs import tree
from places import ROOT
from typer.testing import CliRunner, Result

from understudy.recovery import recoveryctl
from understudy.recovery.base.errors import BadInput
from understudy.recovery.costs.comparing import influences
from understudy.recovery.costs.given import measured
from understudy.recovery.costs.given.inputs import Inputs
from understudy.recovery.costs.given.reading import EXAMPLE, combined, of_file
from understudy.recovery.costs.models.ways import Way, terms_of, waste_of


def cost(*arguments: object) -> Result:
    return CliRunner().invoke(recoveryctl.app, ["cost", *map(str, arguments)], env={"COLUMNS": "200"})


def written(folder: Path, made: dict[str, Any]) -> Path:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(made, sort_keys=False))
    return path


def test_the_example_is_a_file_that_the_command_takes(tmp_path: Path) -> None:
    shown = cost("--example")
    path = tmp_path / "job.yaml"
    path.write_text(shown.output)
    done = cost(path, "--simulate", 3, "--plot", tmp_path / "plot.png")
    assert done.exit_code == 0, done.output
    assert "job.yaml, line 3" in done.output and "periodic checkpoints" in done.output
    assert "understudy is left out: ours is not given" in done.output
    assert "25 spares are needed" in done.output
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_json_has_every_number_of_the_table(tmp_path: Path) -> None:
    done = cost(written(tmp_path, tree()), "--json", "--simulate", 2)
    assert done.exit_code == 0, done.exception
    found = json.loads(done.output)
    made = Inputs.model_validate(tree())
    by_way = {way["way"]: way for way in found["ways"]}
    for way in Way:
        fraction = waste_of(way, made).fraction
        assert by_way[way.value]["wasted_fraction"] == fraction
        hours = 1024 * 720 * fraction
        assert by_way[way.value]["gpu_hours_a_month"] == pytest.approx(hours, rel=1e-12)
        assert by_way[way.value]["money_a_month"] == pytest.approx(4 * hours, rel=1e-12)
    assert len(found["simulated"]) == len(Way) and "job.gpus" in found["origins"]
    assert found["crossovers"]
    for one in found["crossovers"]:
        for gpus, is_better in ((one["from_gpus"], True), (one["from_gpus"] - 1, False)):
            wasted = [
                terms_of(Way(name), made, made.job.with_gpus(gpus)).waste(gpus * made.failures.rate).total
                for name in (one["better"], one["worse"])
            ]
            assert (wasted[0] < wasted[1]) is is_better, one


MISTAKES: list[tuple[str, str]] = [
    ("job:\n  gpu: 4", "job.gpu (FILE, line 2) is unknown: is gpus meant?"),
    ("jobs:\n  gpus: 4", "jobs (FILE, line 2) is unknown: is job meant?"),
    ("job: 3", "job is 3 (FILE, line 1): it should be"),
    ("job:\n  gpus: 0", "job.gpus is 0 (FILE, line 2): it should be greater than or equal to 1"),
    ("job:\n  gpus: 4\n  gpus: 5", "FILE, line 3: job.gpus was given in line 2 already"),
    ("job:\n  gpus: [4]", "FILE, line 2: job.gpus must be one value"),
    ("job: {gpus: 4", "FILE, line 1 is no YAML"),
    ("4", "holds no inputs"),
    ("", "holds no inputs"),
    ("? [a]\n: 4", "a name is wanted"),
    ("a: &x\n  b: *x", "must be one value"),
    ("job: !!python/object:os.system 4", "is no number and no text"),
    ("job: 2026-13-45", "is no number and no text"),
]


@pytest.mark.parametrize(("text", "sentence"), MISTAKES)
def test_a_file_with_a_mistake_is_answered_with_one_sentence(
    text: str, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        combined(of_file(path))
    assert sentence.replace("FILE", str(path)) in str(caught.value)
    assert "\n" not in str(caught.value)


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"job": {"replicas": 3}}, "1024 GPUs are not 3 replicas of equal size"),
    ({"job": {"minibatch_s": -1}}, "job.minibatch_s is -1"),
    (
        {"failures": {"per_gpu_day": 60}},
        "does each GPU fail more than once a day, or is that a rate per month",
    ),
    ({"failures": {"per_gpu_day": -0.1}}, "failures.per_gpu_day is -0.1"),
    ({"failures": {"per_gpu_day": float("nan")}}, "failures.per_gpu_day is nan"),
    ({"failures": {"shares": {"server": 0.5}}}, "shares add up to 0.5, not to 1"),
    ({"failures": {"shares": {"servers": 1.0}}}, "failures.shares.servers"),
    ({"ours": {"detect_s": {"server": 0.1}}}, "ours.detect_s.transient is missing: 30% of failures"),
    ({"ours": {"recovery_s": {"give-up": 1.0}}}, "recovery_s.give-up is no recovery to time"),
    ({"prices": {"gpu_hour": "four"}}, "prices.gpu_hour is 'four'"),
    ({"simulation": {"law": "weibul"}}, "simulation.law is 'weibul'"),
    ({"failures": None}, "failures is missing; recoveryctl cost --example shows"),
]


@pytest.mark.parametrize(("change", "sentence"), CHANGES)
def test_a_wrong_input_is_answered_with_one_sentence(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    made = tree(**change)
    made = {name: value for name, value in made.items() if value is not None}
    with pytest.raises(BadInput) as caught:
        combined(of_file(written(tmp_path, made)))
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "a FILE of inputs is needed"),
        (("missing.yaml",), "cannot be read: No such file"),
        ((EXAMPLE, "--measured", "missing.json"), "cannot be read: No such file"),
        ((EXAMPLE, "--measured", EXAMPLE), "is no JSON"),
        ((EXAMPLE, "--from-running", "nobody"), "no proxyd answers"),
        ((EXAMPLE, "--plot", "/nowhere/at/all.png"), "cannot be written"),
    ],
)
def test_a_wrong_command_line_is_answered_with_one_sentence(
    arguments: tuple[object, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNDERSTUDY_SOCKET", str(tmp_path / "nobody.sock"))
    done = cost(*arguments)
    assert done.exit_code != 0
    assert sentence in (
        str(done.exception) if isinstance(done.exception, BadInput | RuntimeError) else done.output
    )


def test_a_way_that_cannot_be_reckoned_is_left_out_with_a_sentence_and_the_others_stand(
    tmp_path: Path,
) -> None:
    made = tree(ours={"images": None, "stored": None}, job={"gpus": 1024, "replicas": 1})
    done = cost(written(tmp_path, made))
    assert done.exit_code == 0
    assert "user_level needs two replicas or more" in done.output
    assert "failure of kind host would end the job" in done.output


# ------------------------------------------------------------------ what was measured
def entry(fault: str, plan: str, total: float, detect: float, replay: float, **more: Any) -> dict[str, Any]:
    return {
        "fault": fault, "plan": plan, "total_s": total, "detect_s": detect, "replay_s": replay,
        "recovered": True, "planned": False,
    } | more  # fmt: skip


def test_medians_of_recoveries_become_times_of_rungs_and_the_file_goes_before(tmp_path: Path) -> None:
    entries = [
        entry("server-died", "restart-copy-replay", 0.5, 0.1, 0.1),
        entry("server-hung", "restart-copy-replay", 0.7, 0.3, 0.1),
        entry("server-died", "roll-forward", 0.6, 0.2, 0.1),
        entry("call-failed", "rewind-in-place", 0.2, 0.1, 0.05),
        entry("planned-move", "stash-restart-restore", 9.0, 0.0, 0.0, planned=True),
        entry("server-died", "restart-copy-replay", 9.0, 0.0, 0.0, recovered=False),
        entry("server-died", "restart-copy-replay", float("nan"), 0.0, 0.0),
        {"fault": "server-died"},
        7,
    ]
    report = tmp_path / "report.json"
    report.write_text(
        json.dumps({"recoveries": [{"all": entries}], "step_times": [{"ranks": 2, "ratio": 1.02}]})
    )
    found = measured.of_file(report)
    assert found["ours", "recovery_s", "restart-copy-replay"].value == pytest.approx(0.3)
    assert found["ours", "recovery_s", "rewind-in-place"].value == pytest.approx(0.05)
    assert found["ours", "detect_s", "server"].value == pytest.approx(0.2)
    assert found["ours", "overhead"].value == pytest.approx(0.02)
    assert ("ours", "recovery_s", "stash-restart-restore") not in found
    assert found["ours", "recovery_s", "restart-copy-replay"].origin == f"median of 3, {report}"
    read = combined(
        of_file(written(tmp_path, tree(ours={"recovery_s": {"restart-copy-replay": 2.0}}))), found
    )
    assert read.inputs.ours is not None
    assert list(read.inputs.ours.recovery_s.values()) == [2.0, pytest.approx(0.05)]
    assert read.origins["ours.recovery_s.rewind-in-place"] == f"median of 1, {report}"


def test_of_a_running_job_its_size_its_steps_and_its_faults_are_taken() -> None:
    class Rank:
        step_s = 0.25

    faults = [entry("server-died", "restart-copy-replay", 0.5, 0.1, 0.1)] * 3 + [
        entry("device-gone", "restart-copy-replay", 0.5, 0.1, 0.1)
    ]
    found = measured.of_job("brave-otter", [Rank(), Rank()], faults, 86_400.0)
    assert found["job", "gpus"].value == 2 and found["job", "minibatch_s"].value == 0.25
    assert found["failures", "per_gpu_day"].value == 2.0  # more than once a day: a bill asks about that
    assert found["failures", "shares", "server"].value == 0.75
    assert "running job brave-otter" in found["job", "gpus"].origin


# ------------------------------------------------------------------ what follows
def test_what_matters_most_comes_first() -> None:
    found = influences(Inputs.model_validate(tree()), Way.PERIODIC)
    assert [one.name for one in found[:2]] == ["failures.per_gpu_day", "periodic.checkpoint_s"]
    assert all(one.halved < one.doubled for one in found)


def test_the_page_of_costs_has_what_the_equations_give() -> None:
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        made = runpy.run_path(str(ROOT / "bench" / "cost_report.py"))
    finally:
        sys.path.remove(str(ROOT / "bench"))
    page = (ROOT / "docs" / "cost.md").read_text()
    assert made["HEAD"] in page and made["paper_part"]() in page and made["BEYOND"] in page
    assert re.search(r"^Commit [0-9a-f]{7,}\+?, ", page, re.MULTILINE)
