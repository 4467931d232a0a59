"""Gates: what must hold of a suite's runs before its numbers count (paper 002 §5.9, and ours). Pure.

A run that could not have such a fault (`impossible`), and one whose peer does not run here (`absent`), is no
offence: it is shown with its reason. Any offence of any run makes its suite a failed one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from understudy.campaigns.planning.faults import Fault
from understudy.campaigns.planning.variants import REFERENCE
from understudy.campaigns.report.results import Key, Results
from understudy.campaigns.results.records import Run

MOST_UNACCOUNTED = 0.05
"""Of a run's seconds."""
ROUNDING_S = 1e-3
"""Seconds by which a split, written with rounded numbers, may differ from the whole."""
LONGEST_REASON = 400
EXCUSED = ("impossible", "absent")


class Gate(Enum):
    """In the order in which a suite is looked at."""

    ARTIFACTS = "artifacts readable"
    TARGET = "target steps in every variant"
    FIRED = "every scheduled fault fired"
    SAMPLES = "sample accounting"
    PARAMETERS = "parameters as promised"
    LEFT = "nothing left behind"
    ACCOUNTED = "wall time accounted for"


@dataclass(frozen=True)
class Offence:
    """`what`: what the run did, as the rest of a sentence that begins with its name."""

    gate: Gate
    key: Key
    what: str

    @property
    def sentence(self) -> str:
        """Without a full stop."""
        return f"{self.key} {self.what.rstrip('.')}"


@dataclass(frozen=True)
class Excuse:
    """A run that there could not be."""

    key: Key
    status: str
    why: str


@dataclass(frozen=True)
class Verdict:
    """Of one suite."""

    suite: str
    offences: tuple[Offence, ...]
    excuses: tuple[Excuse, ...]
    unreckoned: tuple[int, ...] = ()
    """Seeds whose faults cannot be reckoned again: of these only what records say of faults was looked at."""

    @property
    def passed(self) -> bool:
        return not self.offences

    def of(self, gate: Gate) -> list[Offence]:
        return [one for one in self.offences if one.gate is gate]


def verdicts(results: Results) -> Mapping[str, Verdict]:
    """Of all suites, those of undisturbed runs among them, by name."""
    return {suite: judge(suite, keys, results) for suite, keys in results.planned.items()}


def judge(suite: str, keys: Sequence[Key], results: Results) -> Verdict:
    """All offences of a suite, by gate; and its excuses."""
    offences: list[Offence] = []
    excuses: list[Excuse] = []
    scheduled = {seed: results.scheduled(suite, seed) for seed in dict.fromkeys(key.seed for key in keys)}
    for key in keys:
        run = results.runs.get(key)
        if run is None:
            why = results.unread.get(key, "is missing")
            offences.append(Offence(Gate.ARTIFACTS, key, why))
        elif run.status in EXCUSED:
            excuses.append(Excuse(key, run.status, run.why or "no reason was given"))
        else:
            found = offences_of(run, scheduled[key.seed])
            offences += [Offence(gate, key, what) for gate, what in found]
    order = list(Gate)
    return Verdict(
        suite,
        tuple(sorted(offences, key=lambda one: order.index(one.gate))),
        tuple(excuses),
        tuple(seed for seed, faults in scheduled.items() if faults is None),
    )


def offences_of(run: Run, scheduled: Sequence[Fault] | None) -> Iterator[tuple[Gate, str]]:
    """Of a run that was to reach its target. `scheduled`: None where that cannot be told any more."""
    if run.left_behind:
        yield Gate.LEFT, f"left {', '.join(run.left_behind)} behind"
    if run.status != "done" or run.steps < run.target:
        why = f": {_brief(run.why)}" if run.why else ""
        yield Gate.TARGET, f"came to step {run.steps} of {run.target}{why}"
        return
    yield from _faults(run, scheduled)
    yield from _samples(run)
    yield from _parameters(run)
    yield from _seconds(run)


def _faults(run: Run, scheduled: Sequence[Fault] | None) -> Iterator[tuple[Gate, str]]:
    for seen in run.faults:
        if not seen.fired:
            yield (
                Gate.FIRED,
                f"was to have {seen.kind} of rank {seen.rank} in step {seen.step}, which never fired",
            )
    if scheduled is None:
        return
    wanted = Counter((fault.step, fault.rank) for fault in scheduled)
    met = Counter((seen.step, seen.rank) for seen in run.faults)
    for (step, rank), count in (wanted - met).items():
        times = "a fault" if count == 1 else f"{count} faults"
        yield (
            Gate.FIRED,
            f"was to have {times} of rank {rank} in step {step}, of which its record knows nothing",
        )
    for (step, rank), _ in (met - wanted).items():
        yield Gate.FIRED, f"had a fault of rank {rank} in step {step}, which no schedule has"


def _samples(run: Run) -> Iterator[tuple[Gate, str]]:
    if run.samples is None:
        if not of_a_users_command(run):
            yield Gate.SAMPLES, "has no account of its samples"
    elif not run.samples.exact:
        yield Gate.SAMPLES, f"did not have the samples that it was to have: {run.samples.sentence}"


def _parameters(run: Run) -> Iterator[tuple[Gate, str]]:
    compared = run.comparison
    if compared is None:
        if run.disturbed or run.variant != REFERENCE:
            yield Gate.PARAMETERS, "was compared with no undisturbed run"
    elif run.exact:
        # Of a user's own command nobody knows the parameters: its losses are what it can be judged by.
        if of_a_users_command(run):
            if not compared.losses_equal:
                yield (
                    Gate.PARAMETERS,
                    "promises the bits, and its losses are not those of the undisturbed run",
                )
        elif not compared.parameters_equal:
            yield (
                Gate.PARAMETERS,
                "promises the bits, and its parameters are not those of the undisturbed run",
            )
    elif compared.parameters_equal:
        return
    elif not math.isfinite(compared.loss_difference):
        yield Gate.PARAMETERS, "has no loss difference to the undisturbed run"
    elif not compared.distances and not of_a_users_command(run):
        yield Gate.PARAMETERS, "has no distance of its parameters to those of the undisturbed run"


def _seconds(run: Run) -> Iterator[tuple[Gate, str]]:
    whole = run.training_seconds
    if whole <= 0:
        yield Gate.ACCOUNTED, f"took {run.wall:.3f} s and has no seconds of training"
        return
    if abs(sum(run.parts.values()) + run.unaccounted - whole) > ROUNDING_S * max(1.0, whole):
        yield (
            Gate.ACCOUNTED,
            f"has parts and an unaccounted rest of {sum(run.parts.values()) + run.unaccounted:.3f} s together, "
            f"and {whole:.3f} s of training",
        )
    share = run.unaccounted / run.wall  # eq. 7 splits the wall time
    if abs(share) > MOST_UNACCOUNTED:
        yield Gate.ACCOUNTED, f"has {100 * share:.1f} % of its seconds unaccounted for"


def _brief(text: str) -> str:
    """On one line."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 1] + "…"


def of_a_users_command(run: Run) -> bool:
    """Whose samples and parameters nobody knows."""
    return not run.data
