"""Peers in campaigns: their environments, how they are started, and what torchft's groups have used.

`make test-long` installs them and kills a rank of each.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from understudy.campaigns.planning.variants import VARIANTS, Launch
from understudy.campaigns.programs import training, with_torchft
from understudy.campaigns.programs.launch_nvrx import SHORT
from understudy.campaigns.programs.own_faults import fired_marker
from understudy.campaigns.programs.plan import Plan, PlannedFault
from understudy.campaigns.programs.with_torchft import Used
from understudy.campaigns.results.stamps import of_ranks
from understudy.campaigns.running import environments
from understudy.campaigns.running.commands import ENVIRONMENT, installed
from understudy.campaigns.running.environments import Unavailable
from understudy.campaigns.running.own_processes import MARK, kill_all, left_after
from understudy.campaigns.running.peers import command
from understudy.data.check import read_run
from understudy.data.judgement import Verdict, judge

pytestmark = pytest.mark.drawn(5)

SAMPLES, BATCH, GROUPS = 64, 8, 2
PEERS = [name for name, one in VARIANTS.items() if one.launch is Launch.PEER]


# ------------------------------------------------------------------ environments
def test_what_pip_refuses_is_told_in_one_sentence_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "place", lambda: tmp_path)
    monkeypatch.setattr(environments, "_refused", {})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    with pytest.raises(Unavailable) as refused:
        environments.make("nvrx")

    sentence = str(refused.value)
    assert sentence.startswith("nvidia-resiliency-ext==0.4.1 cannot be installed here: ERROR: ")
    assert f"torch=={environments.torch_here()}" in sentence and "\n" not in sentence
    assert not (tmp_path / "nvrx" / ".complete").exists()
    monkeypatch.setattr(environments, "build", lambda *words: pytest.fail("it is tried again"))
    with pytest.raises(Unavailable, match="cannot be installed here"):
        environments.make("nvrx")


def test_an_environment_is_made_once_and_shows_the_package_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def build(folder: Path, *requirements: str) -> None:
        made.append(requirements)
        (folder / "lib" / "python3.11" / "site-packages").mkdir(parents=True)

    monkeypatch.setattr(environments, "place", lambda: tmp_path)
    monkeypatch.setattr(environments, "build", build)

    folder = environments.make("torchft")
    assert environments.make("torchft") == folder

    assert made == [tuple(environments.PEERS["torchft"])]
    linked = folder / "lib" / "python3.11" / "site-packages" / "understudy"
    assert linked.resolve() == Path(environments.__file__).resolve().parents[2]


def test_what_was_not_made_to_its_end_is_made_anew(tmp_path: Path) -> None:
    stamp, made = tmp_path / "stamp", []

    def make(number: int, *, fails: bool = False) -> None:
        made.append(number)
        if fails:
            raise Unavailable("no")

    environments.up_to_date(stamp, "a", lambda: make(1))
    environments.up_to_date(stamp, "a", lambda: make(2))
    with pytest.raises(Unavailable):
        environments.up_to_date(stamp, "b", lambda: make(3, fails=True))
    environments.up_to_date(stamp, "a", lambda: make(4))
    assert made == [1, 3, 4]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("ERROR: first\nERROR: No matching distribution\nWARNING: old\n", "ERROR: No matching distribution"),
        ("  Building wheel\nno space left\n\n[notice] A new release of pip\n", "no space left"),
        ("ERROR: Cannot install a\nERROR: ResolutionImpossible: for help visit\n", "ERROR: Cannot install a"),
        ("WARNING: nothing else\n", ""),
        ("", ""),
    ],
)
def test_of_what_pip_says_the_last_error_is_told(said: str, told: str) -> None:
    assert environments.last_line(said) == told


def test_each_peer_is_started_by_the_python_of_its_own_environment(tmp_path: Path) -> None:
    plan = a_plan(tmp_path, "torchft").write()
    for name in PEERS:
        words = command(VARIANTS[name].environment, tmp_path / "environment", plan, 2, 5)
        assert words[0] == str(tmp_path / "environment" / "bin" / "python")
        assert {str(plan), "2", "5"} <= set(words)
        assert all(Path(word).exists() for word in words if word.endswith(".py"))
        assert VARIANTS[name].environment in environments.PEERS


# ------------------------------------------------------------------ what torchft's groups have used
def a_plan(folder: Path, keeps: str, faults: tuple[PlannedFault, ...] = ()) -> Plan:
    store = folder / "store"
    store.mkdir(exist_ok=True)
    return Plan(
        data="digits", model="convnet", steps=40, global_batch=32, seed=1, keeps=keeps, checkpoint_every=10,
        max_in_flight=4, folder=str(folder), store=str(store), device="cpu", collective_timeout=10.0,
        faults=faults,
    )  # fmt: skip


def a_group(folder: Path, number: int) -> Used:
    plan = replace(a_plan(folder, "torchft"), global_batch=BATCH)
    return Used(plan, range(SAMPLES), number, GROUPS)


def commit(used: Used, step: int, participants: int = GROUPS, *, part: bool = True) -> None:
    used.committed(step, used.batch(step) if part else None, participants)


def judged(folder: Path) -> Verdict:
    return judge(read_run(folder))


def test_groups_that_commit_all_steps_together_use_exactly_the_expected_samples(tmp_path: Path) -> None:
    groups = [a_group(tmp_path, number) for number in range(GROUPS)]
    for step in range(20):  # 8 steps are an epoch
        for one in groups:
            assert one.batch(step) is one.batch(step), "a step that did not commit has its samples again"
            commit(one, step)
    assert judged(tmp_path).exact


def test_a_step_of_one_group_alone_lacks_the_samples_of_the_other(tmp_path: Path) -> None:
    groups = [a_group(tmp_path, number) for number in range(GROUPS)]
    for step in range(6):
        commit(groups[0], step, 1 if step == 3 else GROUPS)
        if step != 3:
            commit(groups[1], step)
    found = judged(tmp_path)
    assert [one.missing for one in found.epochs] == [BATCH // GROUPS]
    assert {(one.step, one.rank) for one in found.offences} == {(3, 1)}


def test_a_batch_that_a_healing_group_had_dropped_is_missing(tmp_path: Path) -> None:
    groups = [a_group(tmp_path, number) for number in range(GROUPS)]
    for step in range(6):
        commit(groups[0], step, 1 if step == 3 else GROUPS)
        commit(groups[1], step, 1 if step == 3 else GROUPS, part=step != 3)
    assert [one.missing for one in judged(tmp_path).epochs] == [BATCH // GROUPS]


def test_a_group_killed_in_front_of_its_record_is_told_of_the_step_it_took_part_in(tmp_path: Path) -> None:
    groups = [a_group(tmp_path, number) for number in range(GROUPS)]
    for step in range(4):
        commit(groups[0], step)
        if step < 3:
            commit(groups[1], step)
    groups[1].close()

    again = a_group(tmp_path, 1)
    again.load_state_dict(groups[0].state_dict())
    for step in range(4, 6):
        commit(groups[0], step)
        commit(again, step)

    assert judged(tmp_path).exact


def test_a_group_whose_record_is_there_is_not_told_again(tmp_path: Path) -> None:
    groups = [a_group(tmp_path, number) for number in range(GROUPS)]
    for step in range(3):
        for one in groups:
            commit(one, step)
    again = a_group(tmp_path, 1)
    again.load_state_dict(groups[0].state_dict())
    for one in (groups[0], again):
        commit(one, 3)
    assert judged(tmp_path).exact


def test_groups_that_have_all_died_begin_anew_as_another_attempt(tmp_path: Path) -> None:
    for steps in (3, 6):
        groups = [a_group(tmp_path, number) for number in range(GROUPS)]
        for step in range(steps):
            for one in groups:
                commit(one, step)
    run = read_run(tmp_path)
    assert sorted(run.attempts) == [1, 2] and run.redone == 3 and judge(run).exact


def test_only_the_variant_that_waits_for_all_groups_needs_them_all(tmp_path: Path) -> None:
    assert with_torchft.least_groups(a_plan(tmp_path, "torchft"), 2) == 1
    assert with_torchft.least_groups(a_plan(tmp_path, "torchft-whole"), 2) == 2


# ------------------------------------------------------------------ the peers themselves
@pytest.mark.long
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.timeout(900)
def test_a_peer_reaches_the_last_step_when_a_rank_is_killed(tmp_path: Path, name: str) -> None:
    try:
        environment = environments.make(VARIANTS[name].environment)
    except Unavailable as why:
        pytest.skip(str(why))
    ours, theirs = tmp_path / "bare", tmp_path / name
    for folder in (ours, theirs):
        folder.mkdir()
    bare = a_plan(ours, "none").write()
    torchrun = [*installed("torchrun"), "--standalone", "--nproc-per-node", "2", training.__file__, str(bare)]
    ends(torchrun, ours)
    struck = a_plan(theirs, name, (PlannedFault(16, 1, "KILL", 0.5),)).write()

    ends(command(VARIANTS[name].environment, environment, struck, 2, 5), theirs)

    assert fired_marker(theirs, 0).exists()
    assert {one.step for one in of_ranks(theirs) if one.what == "step"} == set(range(1, 41))
    assert judged(theirs).exact is (name != "torchft"), "torchft alone goes on with half of a batch"
    assert (parameters(theirs) == parameters(ours)) is (name == "nvrx")


def ends(words: list[str], folder: Path) -> None:
    """Well, and leaves no process."""
    mark = f"{folder}-{uuid.uuid4()}"
    long = folder / ("a campaign's folder".replace(" ", "-") * 4)  # no socket has room in it
    long.mkdir()
    try:
        with (folder / "output").open("wb") as output, tempfile.TemporaryDirectory() as short:
            done = subprocess.run(
                words,
                env=os.environ | ENVIRONMENT | {MARK: mark, "TMPDIR": str(long), SHORT: short},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=300,
                check=False,
            )
            assert not list(Path(short).iterdir())
        assert done.returncode == 0, (folder / "output").read_text()[-4000:]
        assert not left_after(mark, 10)
    finally:
        kill_all(mark)


def parameters(folder: Path) -> set[str]:
    """Digests of all ranks, which are one."""
    found = {one.note for one in of_ranks(folder) if one.what == "parameters"}
    assert len(found) == 1
    return found
