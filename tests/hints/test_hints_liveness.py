"""Which variables a checkpoint holds, and that the rewritten function is equal where nothing is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from understudy.hints import checkpoint, checkpoints, source
from understudy.hints.liveness import DELETED, live_variables


def live(function: Callable[..., Any]) -> list[set[str]]:
    """For each hint, in the order of the source."""
    found = live_variables(source.read(function, checkpoint, auto=False))
    return [set(found[number]) for number in sorted(found)]


def test_only_what_is_read_behind_the_hint_is_live() -> None:
    def function(a: int, b: int) -> int:
        c = a + b
        checkpoint()
        d = c + b
        checkpoint()
        return d

    assert live(function) == [{"c", "b"}, {"d"}]


def test_variable_that_is_written_before_it_is_read_is_dead() -> None:
    def function(a: int) -> int:
        b = a
        checkpoint()
        b = 1
        return b

    assert live(function) == [set()]


def test_what_one_branch_alone_reads_is_live() -> None:
    def function(a: int, b: int, c: int) -> int:
        checkpoint()
        if a:
            c = 1
        else:
            b = 2
        return b + c

    assert live(function) == [{"a", "b", "c"}]


def test_loops_carry_what_their_next_round_reads() -> None:
    def function(n: int) -> int:
        total = last = 0
        for i in range(n):
            total += last
            checkpoint()
            last = i
        return total

    assert live(function) == [{"total", "i"}]


def test_endless_loop_is_left_by_break_alone() -> None:
    def function(n: int, never: int) -> int:
        while True:
            checkpoint()
            n -= 1
            if not n:
                return n
        return never  # type: ignore[unreachable]

    assert live(function) == [{"n"}]


def test_break_and_continue_read_what_is_behind_them() -> None:
    def function(items: list[int], a: int, b: int, c: int) -> int:
        for item in items:
            checkpoint()
            if item:
                break
            if a:
                continue
            return 0
        else:
            return b
        return c

    assert live(function) == [{"item", "a", "b", "c"}]


def test_handlers_and_finally_may_be_reached_from_anywhere_in_the_body() -> None:
    def function(a: int, c: int, d: int) -> int:
        try:
            checkpoint()
            a = 1
            d = int("x")
        except ValueError:
            return a
        finally:
            print(c)
        return d

    assert live(function) == [{"a", "c"}]


def test_return_and_break_pass_through_finally() -> None:
    def function(a: int, b: int) -> int:
        for _ in range(3):
            try:
                checkpoint()
                return 1
            finally:
                print(a)
        return b

    assert live(function) == [{"a"}]


def test_context_manager_may_swallow_an_exception() -> None:
    def function(manager: Any, a: int) -> int:
        with open("x") as file:
            checkpoint()
            a = int(file.read())
        return a

    assert live(function) == [{"a", "file"}]


def test_captured_variables_are_live_wherever_the_function_inside_may_be_called() -> None:
    def function(a: int) -> Any:
        b = 1

        def inner() -> int:
            return b

        checkpoint()
        b = 2
        return inner

    assert live(function) == [{"b", "inner"}]


def test_variables_of_comprehensions_are_their_own() -> None:
    def function(rows: list[list[int]], x: int, k: int) -> Any:
        checkpoint()
        return [x * k for row in rows for x in row if x], {x: 1 for x in rows[0]}, {k for k in rows[1]}

    assert live(function) == [{"rows", "k"}]


def test_first_iterable_of_a_comprehension_is_read_outside() -> None:
    def function(x: Any) -> Any:
        checkpoint()
        return [x for x in x]

    assert live(function) == [{"x"}]


def test_patterns_bind_and_guards_read() -> None:
    def function(thing: Any, limit: int, other: int) -> Any:
        checkpoint()
        match thing:
            case [first, *rest] if first < limit:
                return rest
            case {"k": value, **others}:
                return value, others
            case _:
                return other

    assert live(function) == [{"thing", "limit", "other"}]


def test_variable_that_is_only_deleted_needs_a_value_and_not_its_own() -> None:
    def function(big: Any) -> int:
        checkpoint()
        del big
        return 1

    assert live(function) == [{DELETED + "big"}]


def test_augmented_assignment_reads_and_target_expressions_are_read() -> None:
    def function(a: int, b: list[int], i: int, c: Any) -> Any:
        checkpoint()
        a += 1
        b[i] = c.x = a
        return None

    assert live(function) == [{"a", "b", "i", "c"}]


def test_names_in_handlers_types_are_held_for_hints_inside_them() -> None:
    def function(kind: type[Exception]) -> int:
        try:
            return int("x")
        except kind:
            checkpoint()
            return 0

    assert live(function) == [{"kind"}]


def test_assignment_expression_may_not_have_been_reached() -> None:
    def function(a: int, n: int) -> int:
        checkpoint()
        if a and (n := 2) > 1:
            pass
        return n

    assert live(function) == [{"a", "n"}]


def plain(n: int, *more: int, scale: int = 2) -> Any:
    """Its docstring stays."""
    found, error = [], None
    for i in range(n):
        try:
            if i == 1:
                continue
            match i % 3:
                case 0 | 1 as rest:
                    found.append(rest * scale)
                case other if other:
                    found.append((other, more))  # type: ignore[arg-type]
            checkpoint()
            if i == 5:
                break
        finally:
            checkpoint()
            found.append(i)
    else:
        checkpoint()
        found.append("else")  # type: ignore[arg-type]
    return found, error


@pytest.mark.parametrize("n", range(8))
def test_rewritten_function_is_equal_where_nothing_is_cut(n: int, tmp_path: Any) -> None:
    function = checkpoints(directory=tmp_path)(plain)
    assert function(n, 4, scale=3) == plain(n, 4, scale=3)
    assert function.__doc__ == plain.__doc__
    assert '"""Its docstring stays."""' in function.source
    compile(function.source, "source", "exec")


def test_lines_of_the_rewritten_function_are_those_of_the_file(tmp_path: Any) -> None:
    def function(n: int) -> int:
        for _ in range(n):
            checkpoint()
            n //= 0
        return n

    with pytest.raises(ZeroDivisionError) as caught:
        checkpoints(directory=tmp_path)(function)(1)
    frame = caught.traceback[-1]
    assert frame.path.name == "test_hints_liveness.py"  # type: ignore[union-attr]
    assert frame.lineno == function.__code__.co_firstlineno + 2


def test_names_of_the_rewriting_give_way_to_those_of_the_user(tmp_path: Any) -> None:
    def function(_hint_at: int) -> int:
        for _hint_run in range(3):
            checkpoint()
            _hint_at += _hint_run
        return _hint_at

    assert checkpoints(directory=tmp_path, every=1)(function)(4) == 7


def makes(_: int) -> Any:
    class Inner:
        def method(self) -> Any:
            return lambda: 0

    def inner() -> None:
        pass

    made = [inner, Inner, Inner.method, Inner().method()]
    names = [(each.__qualname__, each.__module__) for each in made]
    del made, Inner
    checkpoint()
    return names


def test_what_a_function_makes_inside_has_the_names_that_it_has_without_the_decorator(tmp_path: Any) -> None:
    """A random program (seed 1028) told them apart by the text of a TypeError."""
    assert checkpoints(directory=tmp_path, overhead=1e-9)(makes)(1) == makes(1)
