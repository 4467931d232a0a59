"""One comparison: the same thing done natively and on the virtual device."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy
import torch
from cuda_choices import choosing_as_on_cuda
from observation import Difference, Observation, compare, observe_error
from snapshots import CannotCopy

NATIVE, VIRTUAL = "cpu", "cuda"
_MOST_DIFFERENCES = 4
_REPETITIONS = 60


@dataclass
class Execution:
    """What a call left behind, to be looked at when everything has run."""

    look: Callable[[], Observation]


class Run(Protocol):
    def __call__(self, device: str) -> Execution: ...


@dataclass(frozen=True)
class Case:
    """`run` makes its arguments anew on the device it is given, executes, and does not wait for results."""

    variant: str
    index: int
    run: Run
    sparse: bool = False
    says_where: bool = True
    """Results belong on the device: one that is on the CPU is a difference."""


@dataclass
class Verdict:
    variant: str
    index: int
    status: str
    """identical, different, flaky (a native repetition differs from itself), or unsupported here."""
    differences: list[Difference] = field(default_factory=list)
    sparse: bool = False
    raised_late: bool = False
    poisoned: bool = False
    syncs: int | None = None


Source = Callable[[Any], Iterator[Case]]


def seed_everything(seed: int) -> None:
    """The device's generator too; on the `cpu` driver it gives the numbers that the CPU's generator gives."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class Judge:
    """Runs cases and says whether both sides agree."""

    def __init__(self, seed: int, before: Callable[[str], None] = lambda _: None) -> None:
        self._seed = seed
        self._before = before

    def judge(self, case: Case, *, count_syncs: bool) -> Verdict:
        """The device side runs twice: at first PyTorch's answer about shapes is learnt, then it is used."""
        verdict = Verdict(case.variant, case.index, "identical", sparse=case.sparse)
        native = self.run(case, NATIVE)
        if native.error and native.error[0] == CannotCopy.__name__:
            verdict.status = "unsupported"
            return verdict
        virtual = self.run(case, VIRTUAL)
        verdict.differences = self._differences(case, native, virtual)
        verdict.raised_late = virtual.raised_late
        verdict.poisoned = _poisoned()
        if not verdict.differences and not virtual.error:
            again = self.run(case, VIRTUAL, counting=verdict if count_syncs else None)
            verdict.differences = [
                Difference(d.what, d.where, f"{d.detail} (second call)")
                for d in self._differences(case, native, again)
            ]
            verdict.poisoned = again.error is not None and _poisoned()
        if verdict.differences:
            verdict.status = "flaky" if self._is_flaky(case, native) else "different"
            del verdict.differences[_MOST_DIFFERENCES:]
        return verdict

    def _is_flaky(self, case: Case, native: Observation) -> bool:
        """Repeats the native side with memory elsewhere: libraries choose algorithms by alignment."""
        kept: list[torch.Tensor] = []
        sizes = random.Random(self._seed)
        for _ in range(_REPETITIONS):
            if len(kept) > 6 and sizes.random() < 0.3:
                kept.pop(sizes.randrange(len(kept)))
            kept.append(torch.empty(sizes.randrange(1, 20_000), dtype=torch.uint8))
            if compare(native, self.run(case, NATIVE)):
                return True
        return False

    def _differences(self, case: Case, native: Observation, virtual: Observation) -> list[Difference]:
        differences = compare(native, virtual)
        if case.says_where and not native.error and not virtual.error:
            differences += [
                Difference("device", path, "it is on the CPU")
                for path in virtual.elsewhere
                if not path.startswith(("arguments", "memory of arguments"))
            ]
        return differences

    def run(self, case: Case, device: str, *, counting: Verdict | None = None) -> Observation:
        """What the case leaves on one side; each time with the same seeds."""
        self._before(device)
        seed_everything(self._seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                before = _synchronisations() if counting else 0
                with choosing_as_on_cuda() if device == NATIVE else contextlib.nullcontext():
                    execution = case.run(device)
                if counting:
                    counting.syncs = _synchronisations() - before
                if device == VIRTUAL:
                    torch.cuda.synchronize()
                return execution.look()
            except Exception as error:  # noqa: BLE001 - whatever a call raises is what is compared
                return observe_error(error)


def _poisoned() -> bool:
    """An error that arrived late ends the session, as a device-side assertion ends a CUDA context."""
    try:
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001 - of whatever class the first failure was
        return True
    return False


def _synchronisations() -> int:
    """How often this process has waited: for an operator's answer, or for a copy to the host."""
    from understudy.proxy_client import _client

    statistics = _client.statistics()
    return int(statistics["synchronous"]) + int(statistics["device_to_host"])
