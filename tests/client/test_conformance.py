"""A spread of PyTorch's own databases on the virtual device; and that the comparison can fail."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import databases
import proxied
import pytest
import reasons
import report
import torch
from observation import Observation, compare, observe, observe_error, without_device
from snapshots import Snapshot

import sweep

EVERY = {"op_db": 140, "module_db": 100, "optim_db": 15}
"""One entry in so many runs here, each time others; `make conformance` runs all."""

FIXED: tuple[str, ...] = (
    "op_db/arange/float32",  # every call had the shape of the first one
    "op_db/atan2/bool",  # in place, an error came late and ended the session
    "op_db/amax/float32",  # more dimensions than PyTorch supports: the session was lost
    "op_db/conj_physical/complex64",  # a kernel that the worker does not have
    "op_db/linalg_lu_solve/complex64",  # results and out= that a kernel conjugates lazily
    "op_db/mode/float32",  # a kernel that the worker does not have
    "op_db/nn_functional_linear_cross_entropy_chunked_none/bfloat16",  # products wider than their factors
    "op_db/triangular_solve/float32",  # strides that a kernel gives to out=
    "op_db/uniform/float32",  # bad numbers raised late
    "op_db/vdot/complex64",  # a result that a kernel conjugates lazily
)
"""Units (`database/entry/dtype`) that once differed, by what was wrong; a run has a third of them."""

ENTRIES = {
    "2.11": {"op_db": 697, "module_db": 113, "optim_db": 15},
    "2.13": {"op_db": 702, "module_db": 114, "optim_db": 15},
}
"""How many the databases of a release of PyTorch have; the report is of the last."""


def lacking(entry: str) -> bool:
    """Whether `entry`, a name or a pattern for names, is of what this PyTorch does not have yet."""
    return "linear_cross_entropy" in entry and not hasattr(torch.nn.functional, "linear_cross_entropy")


def spread(chance: random.Random) -> list[str]:
    """Entries at equal distances, each with one dtype."""
    chosen = []
    for database, distance in EVERY.items():
        entries = [entry for entry in databases.load() if entry.database == database and entry.dtypes]
        for entry in entries[chance.randrange(distance) % len(entries) :: distance]:
            chosen.append(databases.Unit(entry, chance.choice(entry.dtypes)).name)
    return chosen


def test_a_spread_of_pytorchs_databases_gives_the_bits_of_the_cpu(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    fixed = [unit for unit in FIXED if not lacking(unit)]
    units = sorted({*spread(chance), *chance.sample(fixed, len(fixed) // 3)})
    results = sweep.sweep_units(units, tmp_path)
    assert {f"{r.database}/{r.entry}/{r.dtype}" for r in results} == set(units)
    assert report.summarise(results, whole=False).errors == []
    assert sum(result.count("identical") for result in results) > 30


def test_the_databases_have_the_entries_that_the_report_speaks_of() -> None:
    entries = databases.load()
    counts = {name: sum(e.database == name for e in entries) for name in databases.DATABASES}
    assert counts == ENTRIES.get(".".join(torch.__version__.split(".")[:2]))


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    """With the lowest bit of the first element changed."""
    copy = tensor.clone()
    copy.view(torch.int32)[0] ^= 1
    return copy


PLAIN = torch.arange(6.0)
WITH_GAPS = torch.arange(12.0)[::2]
CHANGED: dict[str, tuple[Callable[[], object], Callable[[], object], str]] = {
    "a bit": (lambda: PLAIN.clone(), lambda: flipped(PLAIN), "bits"),
    "the sign of a zero": (lambda: torch.zeros(3), lambda: -torch.zeros(3), "bits"),
    "the payload of a NaN": (
        lambda: torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32),
        lambda: torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32),
        "bits",
    ),
    "strides": (lambda: torch.ones(3, 3), lambda: torch.ones(3, 3).t(), "view"),
    "strides alone": (
        lambda: torch.ones(2, 3),
        lambda: torch.empty_strided((2, 3), (1, 2)).fill_(1),
        "strides",
    ),
    "the shape": (lambda: torch.ones(2, 3), lambda: torch.ones(3, 2), "shape"),
    "the dtype": (lambda: torch.ones(3), lambda: torch.ones(3, dtype=torch.float64), "dtype"),
    "the offset": (lambda: torch.ones(4)[:2], lambda: torch.ones(4)[2:], "offset"),
    "requires_grad": (lambda: torch.ones(2), lambda: torch.ones(2, requires_grad=True), "requires_grad"),
    "conjugation": (
        lambda: torch.zeros(2, dtype=torch.complex64),
        lambda: torch.zeros(2, dtype=torch.complex64).conj(),
        "conjugated",
    ),
    "the length": (lambda: [PLAIN], lambda: [PLAIN, PLAIN], "value"),
    "the container": (lambda: [PLAIN], lambda: (PLAIN,), "value"),
    "a number": (lambda: 0.1 + 0.2, lambda: 0.3, "value"),
    "the class of a number": (lambda: 1, lambda: True, "value"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_the_comparison_sees_a_change_in(what: str) -> None:
    native, virtual, kind = CHANGED[what]
    assert compare(observe((), [("r", native())]), observe((), [("r", native())])) == []
    differences = compare(observe((), [("r", native())]), observe((), [("r", virtual())]))
    assert kind in {difference.what for difference in differences}


def test_the_comparison_sees_what_shares_memory_and_which_object_is_returned() -> None:
    argument = torch.ones(4)
    returned = observe(argument, [("r", argument)])
    view = observe(argument, [("r", argument.view(4))])
    copy = observe(argument, [("r", argument.clone())])
    for one, other in ((returned, view), (view, copy), (returned, copy)):
        assert "sharing" in {difference.what for difference in compare(one, other)}


def test_the_comparison_sees_what_was_written_between_the_elements_of_an_argument() -> None:
    first, second = (Snapshot(WITH_GAPS).build("cpu") for _ in range(2))
    second.untyped_storage()[5] = 77  # of the second element of twelve, which the view leaves out
    assert torch.equal(first, second)
    assert [d.what for d in compare(observe(first, []), observe(second, []))] == ["bits"]


def failure(error: Exception) -> Observation:
    return observe_error(error)


def test_the_comparison_sees_other_messages_and_classes_of_errors_but_not_other_devices() -> None:
    native = failure(RuntimeError("expected a tensor on cpu"))
    assert compare(native, failure(RuntimeError("expected a tensor on cuda:0"))) == []
    assert compare(native, failure(RuntimeError("expected a tensor on mps")))[0].what == "error message"
    assert compare(native, failure(ValueError("expected a tensor on cpu")))[0].what == "error class"
    assert compare(native, observe((), []))[0].what == "error"
    assert without_device("cudart, cuda and cuda:0") == "cudart, cpu and cpu"


def test_arguments_are_built_again_with_their_sharing_strides_offsets_and_bits() -> None:
    whole = torch.randn(4, 6, dtype=torch.complex64)
    part = torch.empty(0, dtype=whole.dtype).set_(whole.untyped_storage(), 6, (3, 3), (6, 2))
    given = (part, {"whole": whole, "twice": [whole, whole.conj()]}, "cpu", 3)
    again = Snapshot(given).build("cpu")
    assert compare(observe(given, []), observe(again, [])) == []
    again[1]["whole"][1, 0] += 1
    assert compare(observe(given, []), observe(again, [])) != []


@pytest.mark.drawn(6)
def test_a_device_that_computes_other_bits_or_hangs_is_found_and_a_flaky_original_is_not_blamed(
    tmp_path: Path,
) -> None:
    script = proxied.WORKLOADS / "conformance_judge.py"
    ended = proxied.run(proxied.python(script, str(sweep.FOLDER)), folder=tmp_path)
    assert ended.status == 0, ended.output[-3000:]
    assert "all verdicts are as they should be" in ended.output


def test_every_reason_names_an_entry_that_exists() -> None:
    entries = databases.load()
    names = {f"{entry.database}/{entry.name}" for entry in entries}
    for reason in reasons.REASONS:
        assert any(re.fullmatch(reason.entry, name) for name in names) or lacking(reason.entry), reason
    assert {f"op_db/{name}" for name in reasons.NO_DEFINED_BITS} <= names
    units = {databases.Unit(entry, dtype).name for entry in entries for dtype in entry.dtypes}
    assert {unit for unit in FIXED if not lacking(unit)} <= units
