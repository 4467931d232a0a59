"""The client's cost per call, in instructions: it may not creep up. `make baseline` accepts a new one."""

from __future__ import annotations

import instructions
import pytest

GROWTH = 1.10


@pytest.fixture(scope="module", params=["callgrind"])
def costs() -> dict[str, instructions.Cost]:
    if (why := instructions.obstacle()) is not None:
        pytest.skip(f"instructions cannot be counted here: {why}")
    then = instructions.read_baseline()[0]
    if then != instructions.torch_version():
        pytest.skip(f"the baseline is PyTorch {then}'s, this is {instructions.torch_version()}")
    return instructions.measure()


@pytest.mark.drawn(5, by="costs")
def test_no_call_takes_a_tenth_more_instructions_than_in_the_baseline(
    costs: dict[str, instructions.Cost],
) -> None:
    _, baseline = instructions.read_baseline()
    assert costs.keys() == baseline.keys()
    grown = {
        name: (round(baseline[name].instructions), round(cost.instructions))
        for name, cost in costs.items()
        if cost.instructions > GROWTH * baseline[name].instructions
    }
    assert not grown, "(baseline, now); if it is worth it, `make baseline` accepts it"


@pytest.mark.drawn(5, by="costs")
def test_no_call_asks_the_heap_more_often_than_in_the_baseline(costs: dict[str, instructions.Cost]) -> None:
    _, baseline = instructions.read_baseline()
    more = {  # a table that grows now and then is not "per call"
        name: (baseline[name].allocations, cost.allocations)
        for name, cost in costs.items()
        if cost.allocations > baseline[name].allocations + 0.1
    }
    assert not more


def test_a_dump_of_callgrind_is_read_as_its_format_says() -> None:
    name, cost = instructions.parse(
        "desc: Trigger: Client Request: add\n"
        "ob=(1) /x/libunderstudy_client.so\nfn=(1) append\n10 300\n+2 100\n"
        "cob=(2) /lib/libc.so\ncfn=(2) operator new(unsigned long)\ncalls=200 0\n10 5000\n* 100\n"
        "ob=(2)\nfn=(3) memcpy\n4 7000\nob=(1)\nfn=(1)\n-1 500\n"
    )
    assert name == "add"
    assert cost == instructions.Cost(instructions=10, allocations=2)
