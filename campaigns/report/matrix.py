"""The runs of a campaign as a matrix: which suites count, what is compared with what. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from understudy.campaigns.planning.variants import REFERENCE, VARIANTS
from understudy.campaigns.report import gates
from understudy.campaigns.report.gates import Verdict
from understudy.campaigns.report.results import Key, PlannedSuite, Results
from understudy.campaigns.report.statistics import Estimate, differences, estimate, gains, over_suites
from understudy.campaigns.results.records import Run

BASELINE = "blocking"
"""What ways are compared with, beside the undisturbed reference."""
OVERLAPPED = "overlapped"
Value = Callable[[Run], float]


def goodput(run: Run) -> float:
    return run.goodput


@dataclass(frozen=True)
class Matrix:
    """Only runs that are done are in it."""

    results: Results
    verdicts: Mapping[str, Verdict]

    @classmethod
    def of(cls, results: Results) -> Matrix:
        return cls(results, gates.verdicts(results))

    @cached_property
    def disturbed(self) -> Sequence[PlannedSuite]:
        """The campaign's suites that have runs planned."""
        return tuple(suite for name, suite in self.results.suites.items() if name in self.results.planned)

    @cached_property
    def counted(self) -> Sequence[PlannedSuite]:
        """The suites that aggregates are made of: their gates are passed."""
        return tuple(suite for suite in self.of_the_matrix if self.verdicts[suite.name].passed)

    @cached_property
    def of_the_matrix(self) -> Sequence[PlannedSuite]:
        """Those that have faults, vary no knob, and have the same variants, which most of them have: means over
        others would be of unlike things."""
        alike: dict[frozenset[str], list[PlannedSuite]] = {}
        for suite in self.disturbed:
            if suite.kind != "none" and not suite.varies_a_knob:
                alike.setdefault(frozenset(self.variants(suite.name)), []).append(suite)
        return tuple(max(alike.items(), key=lambda one: (len(one[1]), len(one[0])))[1]) if alike else ()

    @cached_property
    def undisturbed(self) -> Sequence[str]:
        """Names of the suites of undisturbed runs."""
        return tuple(name for name in self.results.planned if name not in self.results.suites)

    def done(self, suite: str, variant: str) -> Mapping[int, Run]:
        """By seed."""
        keys = (key for key in self.results.planned.get(suite, ()) if key.variant == variant)
        found = {key.seed: self.results.runs.get(key) for key in keys}
        return {seed: run for seed, run in found.items() if run is not None and run.status == "done"}

    def variants(self, suite: str) -> Sequence[str]:
        """That are planned for it, in the report's order."""
        planned = {key.variant for key in self.results.planned.get(suite, ())}
        return tuple(name for name in self.results.variants if name in planned)

    def values(self, suite: str, variant: str, of: Value = goodput) -> dict[int, float]:
        """By seed."""
        return {seed: of(run) for seed, run in self.done(suite, variant).items()}

    def mean(self, suite: str, variant: str, of: Value = goodput) -> float | None:
        """Over seeds; None if there is no run."""
        found = self.values(suite, variant, of)
        return fmean(found.values()) if found else None

    @cached_property
    def _undisturbed_by_training(self) -> Mapping[str, Sequence[str]]:
        """Suites whose gates are passed."""
        found: dict[str, list[str]] = {}
        for key, run in self.results.runs.items():
            if key.suite in self.undisturbed and self.verdicts[key.suite].passed:
                names = found.setdefault(run.training, [])
                if key.suite not in names:
                    names.append(key.suite)
        return found

    def calm(self, training: str, variant: str = REFERENCE) -> Mapping[int, Run]:
        """Its undisturbed runs in a variant, by seed; none where their suite has failed a gate."""
        found: dict[int, Run] = {}
        for suite in self._undisturbed_by_training.get(training, ()):
            found |= self.done(suite, variant)
        return found

    def calm_values(self, training: str, variant: str = REFERENCE, of: Value = goodput) -> dict[int, float]:
        return {seed: of(run) for seed, run in self.calm(training, variant).items()}

    def trainings(self) -> Sequence[str]:
        """In the suites' order."""
        return tuple(dict.fromkeys(suite.training for suite in self.disturbed))

    def gains(self, suite: PlannedSuite, variant: str, against: str, of: Value = goodput) -> list[float]:
        """Percent, per seed."""
        return gains(self.values(suite.name, variant, of), self.values(suite.name, against, of))

    def gain(self, suite: PlannedSuite, variant: str, against: str = BASELINE) -> Estimate:
        """Of goodput, in percent."""
        return estimate(self.gains(suite, variant, against))

    def drops(self, suite: PlannedSuite, variant: str, against: str = REFERENCE) -> list[float]:
        """Percent of goodput that faults and protection cost it, against undisturbed runs; per seed, negative."""
        return gains(self.values(suite.name, variant), self.calm_values(suite.training, against))

    def changes(self, suite: PlannedSuite, variant: str, against: str, of: Value) -> list[float]:
        """Differences, per seed."""
        return differences(self.values(suite.name, variant, of), self.values(suite.name, against, of))

    def overall(self, per_suite: Callable[[PlannedSuite], Sequence[float]]) -> Estimate:
        """Over the suites that count."""
        return over_suites({suite.name: per_suite(suite) for suite in self.counted})

    def counted_mean(self, variant: str, of: Value) -> float | None:
        """Mean over suites that count of their means over seeds."""
        found = [self.mean(suite.name, variant, of) for suite in self.counted]
        known = [value for value in found if value is not None]
        return fmean(known) if known else None

    def label(self, suite: str) -> str:
        """In pictures."""
        return suite if self.verdicts[suite].passed else f"{suite} (failed)"

    def every_run(self) -> Sequence[tuple[Key, Run | None]]:
        """All that were planned."""
        keys = (key for planned in self.results.planned.values() for key in planned)
        return tuple((key, self.results.runs.get(key)) for key in keys)


def is_peer(variant: str) -> bool:
    """Another project's way, in an environment of its own."""
    return variant in VARIANTS and bool(VARIANTS[variant].environment)
