"""docs/operators.md says of every operator that PyTorch's dispatcher knows where it runs, and it is so."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import operators_page
import proxied
import pytest
from operator_ways import REGISTRATIONS, ROOT, WORKER, Kernel, Operator, Way, own_kernels, way_of
from zygotes import COLD

pytestmark = pytest.mark.cpu_driver
OF_PYTORCH = "Could not run '{name}' with arguments from the 'CPU' backend"
REFUSED = {
    Way.NO_KERNEL: OF_PYTORCH,
    Way.ONLY_OTHER_LAYOUTS: OF_PYTORCH,
    Way.NOT_FOR_THE_SERVER: "the device server does not run operator {name}",
    Way.NOT_FOR_CUDA: "Could not run '{name}' with arguments from the 'CUDA' backend: it has no kernel for",
}
CALLED = {Way.NO_KERNEL: 90, Way.ONLY_OTHER_LAYOUTS: 70, Way.NOT_FOR_THE_SERVER: 50, Way.NOT_FOR_CUDA: 140}
"""Operators, at least, whose arguments can be made; the others take objects of TorchScript's."""
OPERATOR = Operator(
    "aten::new",
    {"PrivateUse1": Kernel(REGISTRATIONS, "backend fallback")},
    {"CPU": Kernel("RegisterCPU.cpp", "kernel")},
    takes_tensors=True,
    has_out=False,
    gives_views=False,
    on_cuda=False,
    with_signature=frozenset(),
    direct=False,
)


@pytest.fixture(scope="module")
def found() -> Iterator[operators_page.Found]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(COLD, "1")  # a fork's dispatcher would have been there before the virtual device
        yield operators_page.look()


@pytest.mark.drawn(2)
def test_the_page_is_that_of_the_dispatchers(found: operators_page.Found) -> None:
    text = operators_page.PAGE.read_text()
    if f"PyTorch {version('torch')}:" not in text:
        pytest.skip("the page is of another PyTorch")
    assert text == operators_page.page(found), "make operators-page"


def test_every_operator_has_one_way_and_every_way_an_operator(found: operators_page.Found) -> None:
    named = Counter(operator.name for those in found.by_way.values() for operator in those)
    assert named == Counter(operator.name for operator in found.operators)
    assert len(named) > 3000 and set(named.values()) == {1}
    assert found.by_way.keys() == set(Way)


def test_the_kernels_of_our_own_that_the_source_lists_are_those_of_the_dispatcher(
    found: operators_page.Found,
) -> None:
    registered = {
        operator.name
        for operator in found.operators
        if operator.worker.get("PrivateUse1") == Kernel(REGISTRATIONS, "kernel")
        and "PrivateUse1" in operator.with_signature
        and not operator.direct
    }
    assert registered == own_kernels().keys()


def test_every_file_that_the_page_names_is_there() -> None:
    for way in Way:
        for path in (*way.value.code, *way.value.tests):
            assert (ROOT / path).is_file(), (way, path)
    text = operators_page.PAGE.read_text()
    for path in re.findall(r"`((?:proxy_client|proxy_server|bench|tests|docs)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    ("worker", "server"),
    [
        (Kernel(f"{WORKER}/operators/new.cpp", "kernel"), None),
        (Kernel("RegisterNew.cpp", "new kernel"), None),
        (Kernel(REGISTRATIONS, "backend fallback"), Kernel("RegisterNew.cpp", "new kernel")),
    ],
)
def test_an_answer_that_nobody_has_thought_of_is_told(worker: Kernel, server: Kernel | None) -> None:
    assert way_of(OPERATOR, {}, frozenset()) is Way.BOXED
    there = {} if server is None else {"CPU": server}
    with pytest.raises(ValueError, match="aten::new"):
        way_of(replace(OPERATOR, worker={"PrivateUse1": worker}, server=there), {}, frozenset())


@pytest.mark.drawn(2)
def test_every_operator_that_is_refused_is_refused_by_whom_the_page_says_and_ends_nothing(
    found: operators_page.Found, tmp_path: Path
) -> None:
    ways = {operator.name: way for way in REFUSED for operator in found.by_way[way]}
    script = proxied.WORKLOADS / "refused_operators.py"
    told = proxied.run(proxied.python(script, json.dumps(list(ways))), folder=tmp_path).result()
    outcomes = {name: said for name, said in told["outcomes"].items() if not said.startswith("not called")}
    wrong = {
        name: said
        for name, said in outcomes.items()
        if not said.startswith(f"NotImplementedError: {REFUSED[ways[name]].format(name=name)}")
    }
    assert not wrong
    called = Counter(ways[name] for name in outcomes)
    assert {way: called[way] for way in CALLED if called[way] < CALLED[way]} == {}
    assert told["alive"] == 4
