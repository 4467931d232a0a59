"""What a function that goes on behind a hint finds as it was: arguments, files, variables, random numbers."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hinted
import pytest
import torch
from forked_calls import cut_behind_every_checkpoint, dies_behind, in_a_process, one_thread, seeded

from understudy.hints import checkpoint, checkpoints, running

__all__ = ["one_thread"]  # a fixture

pytestmark = pytest.mark.drawn(2)


def fit(model: torch.nn.Module, optimizer: torch.optim.Optimizer, history: list[Any]) -> None:
    for _ in range(3):
        loss = model(torch.ones(2, 4)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
        checkpoint()
        history.append(history)


def make_fit() -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []


def test_what_the_caller_passed_in_is_what_it_finds_changed(tmp_path: Path) -> None:
    expected = make_fit()
    fit(*expected)
    function = checkpoints(directory=tmp_path, every=1)(fit)
    given: list[Any] = []

    def call() -> None:
        given[:] = make_fit()
        given.append(given[0].weight.data[0])
        function(*given[:3])

    _, cuts = cut_behind_every_checkpoint(call)
    model, optimizer, history, view = given
    assert cuts == 3
    assert torch.equal(model.weight, expected[0].weight)
    assert torch.equal(view, model.weight[0])  # a view that the caller had taken before
    assert history[::2] == expected[2][::2]
    assert history[1] is history
    theirs = expected[1].state[expected[0].weight]["momentum_buffer"]
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], theirs)


class Counter:
    made = 0

    def step(self) -> int:
        return 2


class Walker(Counter):
    __slots__ = ("place",)

    def __init__(self) -> None:
        self.place, self.__steps = 0, 0

    def walk(self, most: int, *rest: int, by: int = 1, **named: int) -> Any:
        places = []
        for _ in range(most):
            self.place += by * super().step()
            self.__steps += 1
            Counter.made += 1
            places.append((self.place, self.__steps, Counter.made, rest, named))
            checkpoint()
        return places


def test_methods_have_super_private_names_slots_and_attributes_of_their_class(tmp_path: Path) -> None:
    expected = Walker().walk(3, 7, by=2, z=1)
    walk = checkpoints(directory=tmp_path, every=1)(Walker.walk)

    def call() -> Any:
        Counter.made = 0
        return walk(Walker(), 3, 7, by=2, z=1)

    assert cut_behind_every_checkpoint(call) == (expected, 3)
    Counter.made = 0


def test_variables_around_the_function_are_what_they_were(tmp_path: Path) -> None:
    def around() -> Any:
        count, seen = 0, []

        def bump() -> None:
            nonlocal count
            count += 1
            seen.append(count)

        def work(most: int) -> int:
            for _ in range(most):
                bump()
                checkpoint()
            return count

        return checkpoints(directory=tmp_path, every=1)(work)(4), count, seen

    assert cut_behind_every_checkpoint(around) == ((4, 4, [1, 2, 3, 4]), 4)


def factorial(n: int) -> int:
    result = n
    for _ in range(1):
        checkpoint()
        result *= recursive(n - 1) if n > 1 else 1
    return result


recursive: Any = factorial


def test_recursion_and_calls_inside_others_are_covered_by_the_outermost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "recursive", checkpoints(directory=tmp_path, every=1)(factorial))
    assert cut_behind_every_checkpoint(lambda: recursive(5)) == (120, 1)
    assert [each.message for each in caplog.records if "whose checkpoints cover it" in each.message]


def draw(n: int) -> Any:
    drawn = []
    for _ in range(n):
        drawn.append(random.random())
        checkpoint()
    return drawn


def test_second_of_two_equal_calls_goes_on_as_the_second(tmp_path: Path) -> None:
    def process(last: int) -> Any:
        seeded()
        function = checkpoints(directory=tmp_path, every=1)(draw)
        first = function(3)
        if last:
            dies_behind("saved", last)
        return first, function(3)

    seeded()
    expected = (draw(3), draw(3))
    assert in_a_process(lambda: process(2))[0] == 77
    assert in_a_process(lambda: process(0)) == (0, expected)


def leaves(kind: str) -> int:
    number = 0
    for number in range(4):
        try:
            checkpoint()
            if number == 2 and os.path.exists(kind):
                raise KeyboardInterrupt if kind.endswith("int") else OSError("no space")
        finally:
            checkpoint()
    return number


@pytest.mark.parametrize(("name", "error"), [("int", KeyboardInterrupt), ("full", OSError)])
def test_function_that_an_error_has_ended_goes_on_before_the_error(
    name: str, error: type[BaseException], tmp_path: Path
) -> None:
    function = checkpoints(directory=tmp_path / "run", every=1)(leaves)
    (tmp_path / name).touch()
    with pytest.raises(error):
        function(str(tmp_path / name))
    (tmp_path / name).unlink()
    seen: list[int] = []
    running.observer = lambda what, count: seen.append(count) if what == "hint" else None
    assert function(str(tmp_path / name)) == 3
    assert len(seen) == 3  # of the 8 that a call from the beginning passes


def appends(path: Path) -> bytes:
    with open(path, "ab") as file:
        for number in range(4):
            file.write(bytes([number]))
            checkpoint()
    return path.read_bytes()


def test_file_that_is_appended_to_has_nothing_twice(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    function = checkpoints(directory=tmp_path / "run", every=1)(appends)

    def dies() -> Any:
        dies_behind("hint", 2)
        return function(tmp_path / "file")

    assert [in_a_process(dies)[0] for _ in range(3)] == [77] * 3
    assert in_a_process(lambda: function(tmp_path / "file")) == (0, b"before\0\1\2\3")


def test_exception_that_leaves_the_function_is_the_same_behind_a_resumption(tmp_path: Path) -> None:
    function = checkpoints(directory=tmp_path, every=1)(hinted.propagating)

    def call() -> Any:
        with pytest.raises(ArithmeticError) as caught:
            function(4)
        return caught.value.args

    assert in_a_process(lambda: (dies_behind("saved", 3), call()))[0] == 77  # type: ignore[func-returns-value]
    assert in_a_process(call) == (0, (2,))


def loads(seed: int) -> Any:
    own = torch.Generator().manual_seed(seed)
    loader = torch.utils.data.DataLoader(torch.arange(12), batch_size=4, shuffle=True, generator=own)
    found = []
    for _ in range(2):
        for batch in loader:
            checkpoint()
            found.append((batch.tolist(), torch.rand(1).item(), torch.rand(1, generator=own).item()))
    return found


def test_loader_with_a_generator_of_its_own_repeats_its_order(tmp_path: Path) -> None:
    seeded()
    expected = loads(3)
    function = checkpoints(directory=tmp_path, every=1)(loads)

    def call() -> Any:
        seeded()
        return function(3)

    assert cut_behind_every_checkpoint(call) == (expected, 6)


def flows(most: int) -> Any:
    found = []
    for i in range(most):
        for j in (x for x in range(2)):
            found.append((i, j))
        while len(found) % 3:
            found.append((i, -1))
    return found


def test_hints_are_proposed_at_the_ends_of_loops_and_left_out_where_nothing_can_be_saved(
    tmp_path: Path,
) -> None:
    function = checkpoints(directory=tmp_path, every=1, hints="auto")(flows)
    expected = flows(3)
    result, cuts = cut_behind_every_checkpoint(lambda: function(3))
    assert result == expected
    assert cuts == 6  # three rounds of each of the outer loops, none of the generator's


def test_overhead_bounds_what_checkpoints_take(tmp_path: Path) -> None:
    taken: list[int] = []
    running.observer = lambda what, count: taken.append(count) if what == "saved" else None
    function = checkpoints(directory=tmp_path, overhead=1e-6)(draw)
    assert len(function(50)) == 50
    assert taken == []
    seeded()
    expected = draw(50)
    seeded()
    assert function(50) == expected


def links(most: int) -> Any:
    chain: Any = None
    for number in range(most):
        chain = [number, chain]
    checkpoint()
    length = 0
    while chain is not None:
        length, chain = length + chain[0], chain[1]
    return length


def test_long_chain_of_objects_is_saved(tmp_path: Path) -> None:
    function = checkpoints(directory=tmp_path, every=1)(links)
    assert cut_behind_every_checkpoint(lambda: function(20_000)) == (sum(range(20_000)), 1)
    assert sys.getrecursionlimit() < 20_000


def calls_back(most: int, notify: Callable[[int], None], table: dict[str, Any]) -> Any:
    for number in range(most):
        notify(number)
        checkpoint()
        table["last"] = notify
    return table["last"] is notify


def test_function_as_argument_keeps_its_identity_and_its_variables(tmp_path: Path) -> None:
    function = checkpoints(directory=tmp_path, every=1)(calls_back)

    def call() -> Any:
        total = 0

        def notify(number: int) -> None:
            nonlocal total
            total += number + 1

        table: dict[str, Any] = {}
        return function(3, notify, table), total, table["last"] is notify

    assert cut_behind_every_checkpoint(call) == ((True, 6, True), 3)


HISTORY: list[Any] = []


def keeps_history(most: int) -> int:
    for number in range(most):
        HISTORY.append([number])
        checkpoint()
    return len(HISTORY)


def test_global_that_the_first_attempt_has_changed_is_what_it_was_at_the_checkpoint(tmp_path: Path) -> None:
    function = checkpoints(directory=tmp_path, every=1)(keeps_history)
    same_list = HISTORY
    HISTORY.clear()
    assert cut_behind_every_checkpoint(lambda: function(4)) == (4, 4)
    assert HISTORY == [[0], [1], [2], [3]]
    assert HISTORY is same_list
    HISTORY.clear()
