"""A campaign's file: what is wrong in it is one sentence with a line; its plan is the same every time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import ROOT
from typer.testing import CliRunner

from understudy.campaigns.planning import reading
from understudy.campaigns.planning.faults import KINDS, Native
from understudy.campaigns.planning.schedules import FIRST
from understudy.campaigns.planning.spec import Campaign
from understudy.campaigns.planning.variants import VARIANTS, Launch
from understudy.campaigns.running.manifest import Manifest, planned_runs, read_manifest, read_run
from understudy.recovery import recoveryctl
from understudy.recovery.base.errors import BadInput, Failure

SHARED = ROOT.parent / "shared" / "data"


def tree(**changed: Any) -> dict[str, Any]:
    """A campaign of one suite."""
    suite = {"name": "one", "data": "digits", "model": "mlp", "schedule": {"kind": "steps", "at": [4]}}
    whole: dict[str, Any] = {
        "name": "made-up", "seeds": [1], "global_batch": 8, "steps": 10, "checkpoint_every": 3,
        "suites": [suite], "variants": ["blocking"],
    }  # fmt: skip
    return whole | changed


def suite(**changed: Any) -> list[dict[str, Any]]:
    return [tree()["suites"][0] | changed]


def read(folder: Path, content: Any) -> Campaign:
    path = folder / "campaign.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return reading.of_file(path)


WRONG: dict[str, tuple[Any, str]] = {
    "unknown key": (tree(intervall=3), r"line \d+: intervall is unknown: there are name, seeds"),
    "near a key": (tree(variant=["jit"]), r"line \d+: variant is unknown: is variants meant\?"),
    "unknown key of a suite": (
        tree(suites=suite(modell="gpt")),
        r"line \d+: modell is unknown: is model meant\?",
    ),
    "unknown key of a schedule": (
        tree(suites=suite(schedule={"kind": "steps", "att": [3], "at": [3]})),
        r"line \d+: att is unknown: is at meant\?",
    ),
    "unknown variant": (
        tree(variants=["blokking"]),
        r"line \d+: 'blokking' is no variant: .*is blocking meant\?",
    ),
    "unknown model": (tree(suites=suite(model="gtp")), r"line \d+: .*model is 'gtp': .*is gpt meant\?"),
    "unknown data": (tree(suites=suite(data="digitz")), r"line \d+: .*is digits meant\?"),
    "unknown fault": (
        tree(suites=suite(schedule={"kind": "steps", "at": [3], "fault": "kil"})),
        r"line \d+: 'kil' is no fault: .*is kill meant\?",
    ),
    "unknown schedule": (tree(suites=suite(schedule={"kind": "often"})), r"line \d+: .*'often'.*'steps'"),
    "ranks do not divide": (tree(global_batch=7), r"2 ranks do not divide a global batch of 7"),
    "ranks after a loss do not divide": (
        tree(ranks=4, global_batch=8, suites=suite(schedule={"kind": "resize", "lost": 3, "back": 5})),
        r"one: 3 ranks do not divide a global batch of 8",
    ),
    "behind the last step": (
        tree(suites=suite(schedule={"kind": "steps", "at": [11]})),
        r"one: kill of rank 0 in step 11 .* comes behind the last step, 10",
    ),
    "no such rank": (
        tree(suites=suite(schedule={"kind": "steps", "at": [3], "rank": 2})),
        r"one: kill of rank 2 .* is of no rank: there are 2",
    ),
    "model of other data": (tree(suites=suite(model="gpt")), r"gpt learns from sources or text"),
    "command without losses": (
        tree(suites=[{"name": "mine", "command": "python x.py {steps}", "schedule": {"kind": "none"}}]),
        r"the command of mine lacks \{losses\}",
    ),
    "command with another name": (
        tree(
            suites=[{"name": "mine", "command": "x {steps} {losses} {epochs}", "schedule": {"kind": "none"}}]
        ),
        r"the command of mine has \{epochs\}; what can be filled in is \{steps\}",
    ),
    "command with half a brace": (
        tree(suites=[{"name": "mine", "command": "x {steps} {losses} {", "schedule": {"kind": "none"}}]),
        r"the command of mine cannot be filled in",
    ),
    "command as jit": (
        tree(
            suites=[{"name": "mine", "command": "x {steps} {losses}", "schedule": {"kind": "none"}}],
            variants=["jit"],
        ),
        r"mine: a command of one's own runs as bare, transparent.*not as jit",
    ),
    "command and model": (tree(suites=suite(command="x {steps} {losses}")), r"one has a command, and data"),
    "no training": (
        tree(suites=[{"name": "one", "schedule": {"kind": "none"}}]),
        r"one needs data and a model, or a command",
    ),
    "two suites of a name": (tree(suites=suite() * 2), r"two suites have one name"),
    "a variant twice": (tree(variants=["jit", "jit"]), r"a variant is named twice"),
    "no reference": (tree(undisturbed=["blocking"]), r"undisturbed lacks bare"),
    "places without calls": (
        tree(
            variants=["transparent"],
            undisturbed=["bare"],
            suites=suite(schedule={"kind": "records", "count": 1}),
        ),
        r"one: undisturbed lacks transparent",
    ),
    "text without a file": (tree(suites=suite(data="text", model="gpt")), r"the campaign has no text: FILE"),
    "no seeds": (tree(seeds=[]), r"line \d+: seeds is \[\]: it should"),
    "steps in words": (tree(steps="many"), r"line \d+: steps is 'many': it should be a valid integer"),
    "missing": ({"name": "x"}, r"seeds is missing \(and \d more\)"),
    "a trace without rows": (
        tree(suites=suite(schedule={"kind": "trace", "file": "nowhere.csv", "hours": 1})),
        r"nowhere.csv cannot be read",
    ),
    "no mapping": ("- 1\n- 2\n", r"holds no campaign"),
    "empty": ("", r"holds no campaign"),
    "no YAML": ("a: [", r"line \d+ is no YAML"),
    "twice": ("name: x\nname: y\n", r"line 2: name is given twice"),
    "a tag": ("name: !!python/object:os.system x\n", r"line 1: 'x' is no number and no text"),
    "an alias of itself": ("name: &a [*a]\n", r"line 1"),
    "too deep": ("a: " + "[" * 50 + "]" * 50, r"line 1: it is nested too deeply"),
    "not UTF-8": ("name: \udcff", r"."),
}


@pytest.mark.parametrize("case", [name for name in WRONG if name != "not UTF-8"])
def test_each_mistake_in_a_file_is_one_sentence(case: str, tmp_path: Path) -> None:
    content, expected = WRONG[case]
    with pytest.raises(BadInput) as refused:
        read(tmp_path, content)
    sentence = str(refused.value)
    assert re.search(expected, sentence), sentence
    assert "\n" not in sentence and len(sentence) < 600


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"name: \xff\xfe\x00")
    with pytest.raises(BadInput, match="is no YAML"):
        reading.of_file(path)


@pytest.mark.parametrize("name", ["quick", "full", "more"])
def test_the_campaigns_of_the_makefile_are_read(name: str) -> None:
    if name != "quick" and not SHARED.is_dir():
        pytest.skip("no ../shared, which has its texts, images and trace")
    campaign = reading.of_file(ROOT / "campaigns" / f"{name}.yaml")
    runs = planned_runs(campaign)
    assert len({run.folder for run in runs}) == len(runs)
    begun: set[tuple[str, int]] = set()
    for run in runs:
        begun |= {(run.suite.training, run.seed)} if run.variant == "bare" and not run.disturbed else set()
        assert (run.suite.training, run.seed) in begun, "compared with what is not there yet"
    if name == "full":
        whole = [one for one in campaign.suites if len(campaign.variants_of(one)) >= 6]
        assert len(whole) >= 8 and len(campaign.seeds) >= 3


SCHEDULES: tuple[dict[str, Any], ...] = (
    {"kind": "none"},
    {"kind": "steps", "at": [3, 7]},
    {"kind": "burst", "at": [5]},
    {"kind": "records", "count": 5},
    {"kind": "poisson", "mean": 4},
    {"kind": "kinds", "faults": ["call-error", "kill-spare", "slow-rank"]},
    {"kind": "resize", "lost": 3, "back": 8},
)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: str(one["kind"]))
def test_a_schedule_is_the_same_for_a_seed_and_fits_the_run(schedule: dict[str, Any], tmp_path: Path) -> None:
    made = read(tmp_path, tree(suites=suite(schedule=schedule), steps=40)).suites[0].schedule
    drawn = [made.faults(40, 2, seed) for seed in range(50)]
    assert drawn == [made.faults(40, 2, seed) for seed in range(50)]
    for faults in drawn:
        for fault in faults:
            assert 1 <= fault.step <= 40 and fault.rank in (0, 1) and 0 <= fault.place < 1
    if schedule["kind"] in ("records", "poisson"):
        assert len({tuple(faults) for faults in drawn}) > 40
        assert min(fault.step for faults in drawn for fault in faults) == FIRST
    if schedule["kind"] == "poisson":
        counts = [len(faults) for faults in drawn]
        assert 2.5 < sum(counts) / len(counts) < 5 and len(set(counts)) > 3


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared, which has the trace")
def test_a_window_of_the_trace_has_its_preemptions_in_their_places(tmp_path: Path) -> None:
    trace = {"kind": "trace", "file": str(SHARED / "a100_spot_preemptions.csv"), "hours": 1}
    whole = read(tmp_path, tree(suites=suite(schedule=trace), steps=1000)).suites[0].schedule
    half = read(tmp_path, tree(suites=suite(schedule=trace | {"hours": 0.5}), steps=1000)).suites[0].schedule
    early = [fault.step for fault in whole.faults(1000, 2, 1) if fault.step < 500]
    stretched = [fault.step for fault in half.faults(1000, 2, 1)]
    assert len(early) == len(stretched) > 1
    assert all(abs(2 * a - b) <= FIRST + 2 for a, b in zip(early, stretched, strict=True))


def test_each_fault_can_happen_to_some_way_and_each_refusal_says_why() -> None:
    from understudy.campaigns.planning.faults import Fault

    for kind in KINDS:
        answers = {name: variant.meets(Fault(3, 0, kind)) for name, variant in VARIANTS.items()}
        assert "" in answers.values(), kind
        assert all(answer == "" or answer[0].islower() for answer in answers.values())
    for variant in VARIANTS.values():
        assert variant.meets(Fault(3, 0, "kill")) == ""
        assert variant.launch is not Launch.PROXY or variant.keeps == "none"
    assert {kind.native for kind in KINDS.values() if kind.native} == set(Native)


def test_a_directory_of_another_campaign_or_of_anything_else_is_refused(tmp_path: Path) -> None:
    mine, other = read(tmp_path, tree()), read(tmp_path, tree(steps=12))
    place = tmp_path / "runs"
    with Manifest.of(place, mine):
        with pytest.raises(Failure, match="is being worked on"), Manifest.of(place, mine):
            pass
        with pytest.raises(BadInput, match="has the runs of another campaign"), Manifest.of(place, other):
            pass
    with Manifest.of(place, mine) as again:
        assert [again.record(run) for run in again.runs] == [None] * len(again.runs)
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    with pytest.raises(BadInput, match=r"is not empty and has no campaign\.json"), Manifest.of(full, mine):
        pass


def test_another_version_or_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from understudy.campaigns.running import manifest

    with Manifest.of(tmp_path / "runs", read(tmp_path, tree())):
        pass
    for name, what in (("version", "another version"), ("machine", "another machine")):
        with monkeypatch.context() as patch:
            patch.setattr(manifest, name, lambda: "something else")
            with pytest.raises(BadInput, match=what), Manifest.of(tmp_path / "runs", read(tmp_path, tree())):
                pass


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"runs": 3, "campaign": {}}', "[" * 100_000])
def test_a_damaged_manifest_or_record_is_one_sentence(text: str, tmp_path: Path) -> None:
    place = tmp_path / "runs"
    place.mkdir()
    (place / "campaign.json").write_text(text)
    (place / "run.json").write_text(text)
    for reads in (lambda: read_manifest(place), lambda: read_run(place / "run.json")):
        with pytest.raises(BadInput, match="is damaged") as refused:
            reads()
        assert "\n" not in str(refused.value)


def test_the_command_prints_an_example_and_refuses_what_is_wrong(tmp_path: Path) -> None:
    shown = CliRunner().invoke(recoveryctl.app, ["campaign", "example"])
    assert shown.exit_code == 0 and read(tmp_path, shown.output).name == "quick"
    path = tmp_path / "campaign.yaml"
    path.write_text(yaml.safe_dump(tree(seeds=[])))
    done = CliRunner().invoke(recoveryctl.app, ["campaign", "run", str(path), "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, BadInput) and not (tmp_path / "out").exists()
