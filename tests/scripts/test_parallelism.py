"""What scripts use of torch.distributed: the bits of native Gloo, also when device servers are killed.

One run goes through all features of some groups; each feature is a test of its own. Marks that a
feature leaves in the undisturbed run say which records are its forward and backward pass and optimizer step.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import proxied
import pytest
from native_reference import native_reference

SCRIPTS = proxied.WORKLOADS / "parallelism"
RANKS = {"data_parallel": 2, "collective_calls": 2, "sharded": 2, "checkpoints": 2, "hybrid": 4}
RUNS = (("data_parallel", "collective_calls"), ("sharded", "checkpoints"), ("hybrid",))
"""Groups that share processes, in this order."""
PHASES = ("forward", "backward", "optimizer")
AIMS = {"checkpoints": ("saving", "loading")}
"""Phases that kills are aimed at, where they are others."""
ALL_AIMS = ("sharded", "checkpoints", "hybrid")
"""Groups whose features are struck in every phase, as their state has no replica; elsewhere once each."""


def _features() -> list[tuple[str, str]]:
    """(group, name) of every function marked `@scenario("group")`, in the order of the sources."""
    found = []
    for source in sorted(SCRIPTS.glob("*.py")):
        for node in ast.parse(source.read_text()).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "scenario":
                    found.append((ast.literal_eval(decorator.args[0]), node.name))
    return found


FEATURES = _features()
Notes = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Drill:
    """One kill, aimed at a phase of a feature."""

    feature: str
    phase: str
    rank: int
    step: int
    call: int

    def __str__(self) -> str:
        return f"kill-server rank={self.rank} step={self.step} call={self.call}"


@dataclass(frozen=True)
class Ran:
    """`notes[rank][feature]`, and proxyrun's report."""

    notes: list[Notes]
    report: dict[str, Any]


class Runs:
    """The three runs of some groups, each done when it is first asked for."""

    def __init__(self, groups: tuple[str, ...], folder: Path) -> None:
        (self.ranks,) = {RANKS[group] for group in groups}
        self._groups = groups
        self._folder = folder

    @functools.cached_property
    def native(self) -> Ran:
        """CPU and Gloo, without our code."""
        folder = native_reference(lambda made: self._command(made / "native.x", "--device", "cpu"), 200)
        return Ran(self._notes(folder / "native"), {})

    @functools.cached_property
    def proxied(self) -> Ran:
        """Under the proxy, undisturbed."""
        return self._under_proxy("proxied", ())

    @functools.cached_property
    def killed(self) -> Ran:
        """Under the proxy, with all of `drills`."""
        return self._under_proxy("killed", self.drills)

    @functools.cached_property
    def drills(self) -> tuple[Drill, ...]:
        """Those of each group."""
        return tuple(drill for group in self._groups for drill in self._drills_of(group))

    def _drills_of(self, group: str) -> list[Drill]:
        """One kill for each feature, in turns in each phase and rank; or one in each phase."""
        drills: list[Drill] = []
        aims = AIMS.get(group, PHASES)
        for number, feature in enumerate(name for of, name in FEATURES if of == group):
            turn = number % len(aims)
            found: list[Drill] = []
            for phase in aims if group in ALL_AIMS else aims[turn:] + aims[:turn]:
                rank = (len(drills) + len(found)) % self.ranks
                spans = _spans(self.proxied.notes[rank][feature]["marks"], phase)
                if not spans:
                    continue
                # One minibatch later for each phase: never two ranks at once.
                step, begin, end = spans[min(1 + aims.index(phase), len(spans) - 1)]
                found.append(Drill(feature, phase, rank, step, (begin + end + 1) // 2))
                if group not in ALL_AIMS:
                    break
            drills += found
        return drills

    def _under_proxy(self, name: str, drills: tuple[Drill, ...]) -> Ran:
        options = [word for drill in drills for word in ("--drill", str(drill))]
        ended = proxied.run(
            self._command(self._folder / f"{name}.x"), folder=self._folder, options=tuple(options),
            timeout_s=200,
        )  # fmt: skip
        assert ended.status == 0, ended.output[-6000:]
        return Ran(self._notes(self._folder / name), ended.report)

    def _command(self, out: Path, *options: str) -> list[str]:
        groups = ",".join(self._groups)
        return proxied.ranks(self.ranks, SCRIPTS / "run.py", groups, "--out", str(out), *options)

    def _notes(self, path: Path) -> list[Notes]:
        return [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(self.ranks)]


def _spans(marks: list[tuple[str, int, int]], phase: str) -> list[tuple[int, int, int]]:
    """(minibatch, first record, last record) of each stretch of a phase that lies within one minibatch."""
    return [
        (step, call, end - 1)
        for (name, step, call), (_, next_step, end) in itertools.pairwise(marks)
        if name == phase and next_step == step and end > call
    ]


def _least_phases(group: str) -> set[str]:
    """Those that every feature of a group that is struck in all its phases has."""
    if group not in ALL_AIMS:
        return set()
    return {"saving"} if group == "checkpoints" else {"backward", "optimizer"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Runs]:
    """Of each group."""
    made = [Runs(groups, tmp_path_factory.mktemp(groups[0])) for groups in RUNS]
    return {group: runs for groups, runs in zip(RUNS, made, strict=True) for group in groups}


@pytest.mark.drawn(12, by="group")
@pytest.mark.parametrize(("group", "feature"), FEATURES)
def test_a_feature_gives_the_bits_of_native_gloo(runs: dict[str, Runs], group: str, feature: str) -> None:
    native, under_proxy = runs[group].native, runs[group].proxied
    for rank in range(RANKS[group]):
        content = under_proxy.notes[rank][feature]["content"]
        assert content, "the feature kept nothing that could be compared"
        assert content == native.notes[rank][feature]["content"], f"rank {rank}"
    assert under_proxy.report["recoveries"] == []


@pytest.mark.drawn(12, by="group")
@pytest.mark.parametrize(("group", "feature"), FEATURES)
def test_a_feature_survives_device_servers_killed_in_it(
    runs: dict[str, Runs], group: str, feature: str
) -> None:
    under_proxy, killed = runs[group].proxied, runs[group].killed
    for rank in range(RANKS[group]):
        assert killed.notes[rank][feature]["content"] == under_proxy.notes[rank][feature]["content"], rank
    drills = [drill for drill in runs[group].drills if drill.feature == feature]
    assert {drill.phase for drill in drills} >= _least_phases(group)
    assert drills
    recoveries = {(r["rank"], r["step"], r["call"]): r for r in killed.report["recoveries"]}
    for drill in drills:
        recovery = recoveries[drill.rank, drill.step, drill.call]
        assert recovery["recovered"]
        assert recovery["plan"] == "restart-copy-replay", recovery["reason"]
        if drill.phase in PHASES:  # loading takes an optimizer step of its own
            assert (recovery["phase"] == "OPTIMIZER") == (drill.phase == "optimizer"), drill
    assert killed.report["replies_different"] == 0


def test_every_group_of_features_has_its_number_of_ranks() -> None:
    assert {group for group, _ in FEATURES} == set(RANKS)


def test_every_equivalent_stands_for_an_operator_that_the_cpu_lacks() -> None:
    """In a process without our server: no row is dead, none hides a kernel of PyTorch's."""
    import subprocess
    import sys

    from understudy.proxy_server import _server

    code = (
        "import sys, torch\n"
        "for name in sys.argv[1:]:\n"
        "    base, _, overload = name.partition('.')\n"
        "    torch._C._dispatch_find_schema_or_throw('aten::' + base, overload)\n"
        "    for key in ('CPU', 'CompositeImplicitAutograd', 'CompositeExplicitAutograd'):\n"
        "        has = torch._C._dispatch_has_kernel_for_dispatch_key('aten::' + name, key)\n"
        "        assert not has, (name, key)\n"
    )
    names = _server.EQUIVALENT_OPERATORS
    assert names and len(set(names)) == len(names)
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
