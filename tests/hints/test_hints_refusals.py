"""What cannot be resumed is refused in one sentence that names it, and its line, before anything is lost."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from understudy import hints
from understudy.hints import HintError, checkpoint, checkpoints, surroundings


def line_of(function: Any, offset: int) -> str:
    return f"test_hints_refusals.py:{function.__code__.co_firstlineno + offset})"


def generator() -> Any:
    yield 1
    checkpoint()


async def asynchronous() -> None:
    checkpoint()


def without() -> int:
    return 1


def in_function() -> None:
    def inner() -> None:
        checkpoint()

    inner()


def in_comprehension() -> Any:
    return [checkpoint() for _ in range(3)]  # type: ignore[func-returns-value]


def in_assignment() -> Any:
    value = hints.checkpoint()  # type: ignore[func-returns-value]
    return value


def sees_locals() -> Any:
    checkpoint()
    return locals()


def evaluates() -> Any:
    checkpoint()
    return eval("1")


def in_star() -> None:
    try:
        pass
    except* ValueError:
        checkpoint()


def numbers() -> Iterator[int]:
    yield 1


def over_expression() -> None:
    for _ in (x for x in range(3)):
        checkpoint()


def over_generator() -> None:
    for _ in enumerate(numbers()):
        checkpoint()


def holds_generator() -> Any:
    left = (x for x in range(3))
    checkpoint()
    return next(left)


def holds_own_generator() -> Any:
    def own() -> Iterator[int]:
        yield 2

    left = own()
    checkpoint()
    return next(left)


def holds_lock() -> None:
    lock = threading.Lock()
    for _ in range(3):
        with lock:
            pass
        checkpoint()


def holds_socket() -> None:
    connection = socket.socket()
    checkpoint()
    connection.close()


def holds_class() -> Any:
    class Local:
        pass

    checkpoint()
    return Local


class Managed:
    def __enter__(self) -> Managed:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def managed() -> Iterator[None]:
    yield


def within() -> None:
    with Managed():
        checkpoint()


def within_generator() -> None:
    with managed():
        checkpoint()


@pytest.mark.parametrize(
    ("function", "offset", "words"),
    [
        (generator, 0, "is a generator"),
        (asynchronous, 0, "is an async function"),
        (lambda: checkpoint(), 0, "is a lambda"),
        (without, 0, "has no hint"),
        (in_function, 2, "inside an expression, a lambda, a function or a class"),
        (in_comprehension, 1, "inside an expression"),
        (in_assignment, 1, "inside an expression"),
        (sees_locals, 2, "calls locals()"),
        (evaluates, 2, "calls eval()"),
        (in_star, 1, "except*"),
        (over_expression, 1, "a generator in progress"),
        (over_generator, 1, "the generator numbers in progress"),
        (holds_generator, 1, "'left' be a generator in progress"),
        (holds_own_generator, 4, "'left' be the generator own in progress"),
        (holds_lock, 1, "'lock' be what threading.Lock() makes"),
        (holds_socket, 1, "'connection' be what socket.socket() makes"),
        (holds_class, 1, "'Local' be a class"),
        (within, 1, "`with Managed()`"),
        (within_generator, 1, "`with managed()`"),
    ],
)
def test_function_is_refused_at_decoration(function: Any, offset: int, words: str) -> None:
    with pytest.raises(HintError) as caught:
        checkpoints()(function)
    sentence = str(caught.value)
    assert words in sentence
    assert line_of(function, offset) in sentence
    assert sentence.endswith(".") and "\n" not in sentence


def test_function_without_source_is_refused() -> None:
    names: dict[str, Any] = {"checkpoint": checkpoint}
    exec("def made():\n    for i in range(3):\n        checkpoint()", names)
    with pytest.raises(HintError, match=r"The source of made .* cannot be had"):
        checkpoints()(names["made"])


@pytest.mark.parametrize("what", [print, len, Managed, 3])
def test_what_is_no_function_is_refused(what: Any) -> None:
    with pytest.raises(HintError, match="decorate a function that is written in Python"):
        checkpoints()(what)


def test_function_under_another_decorator_is_refused() -> None:
    with pytest.raises(HintError, match="put @checkpoints next to its def"):
        checkpoints()(managed)


def test_function_whose_file_has_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "changed.py"
    path.write_text("def work(n):\n    for i in range(n):\n        checkpoint()\n")
    names: dict[str, Any] = {"checkpoint": checkpoint}
    exec(compile(path.read_text(), path, "exec"), names)
    path.write_text("def other(n):\n    for k in range(n):\n        checkpoint()\n")
    with pytest.raises(HintError, match="is not that of the function that runs"):
        checkpoints()(names["work"])


def test_what_is_dead_behind_the_hint_may_be_anything(tmp_path: Path) -> None:
    def function() -> int:
        left = (x for x in range(3))
        lock = threading.Lock()
        with lock:
            total = sum(left)
        checkpoint()
        return total

    assert checkpoints(directory=tmp_path, every=1)(function)() == 3


def some_lock(module: Any) -> Any:
    secret = module.Lock()
    checkpoint()
    return secret


def some_generator(make: Any) -> None:
    for _ in make():
        checkpoint()


def zipped_generator(make: Any) -> None:
    for _ in zip(range(3), make(), strict=False):
        checkpoint()


def unfinished_graph(_: Any) -> Any:
    x = torch.ones(2, requires_grad=True)
    loss = (x * 2).sum()
    checkpoint()
    loss.backward()
    return x.grad


def shared_memory(_: Any) -> Any:
    array = numpy.zeros(3)
    tensor = torch.from_numpy(array)
    checkpoint()
    tensor += 1
    return array


def some_manager(make: Any) -> None:
    with make():
        checkpoint()


def some_file(path: Any) -> Any:
    with open(path, "r+") as file:
        checkpoint()
        return file.read()


class Unreadable:
    def __reduce__(self) -> Any:
        return (Unreadable._again, ())

    @staticmethod
    def _again() -> Any:
        raise TypeError("it is not read again")


def unreadable(make: Any) -> Any:
    value = make()
    checkpoint()
    return value


@pytest.mark.parametrize(
    ("function", "argument", "offset", "words"),
    [
        (
            some_lock,
            threading,
            0,
            "the variable 'secret' of line {1}, a lock, may be read behind the hint in line {2}",
        ),
        (some_generator, numbers, 0, "the loop in line {1}, over a generator"),
        (zipped_generator, numbers, 0, "the iterator of the loop in line {1}, a zip"),
        (unfinished_graph, None, 0, "'loss' of line {2}, a Tensor"),
        (shared_memory, None, 0, "a tensor and a NumPy array share memory"),
        (some_manager, Managed, 0, "the with in line {1}, whose Managed"),
        (some_file, __file__, 0, "open in mode r+"),
        (unreadable, Unreadable, 0, "it is not read again"),
    ],
)
def test_state_that_cannot_be_saved_is_refused_at_the_first_hint(
    function: Any, argument: Any, offset: int, words: str, tmp_path: Path
) -> None:
    first = function.__code__.co_firstlineno
    with pytest.raises(HintError) as caught:
        checkpoints(directory=tmp_path)(function)(argument)
    sentence = str(caught.value)
    assert words.format(*(first + n for n in range(4))) in sentence
    assert line_of(function, 0) in sentence
    assert sentence.endswith(".") and "\n" not in sentence


@pytest.mark.parametrize("argument", [threading.Lock(), (x for x in range(3))], ids=["lock", "generator"])
def test_argument_that_cannot_be_saved_is_refused_before_anything_runs(argument: Any, tmp_path: Path) -> None:
    ran: list[int] = []

    def function(given: Any) -> Any:
        ran.append(1)
        checkpoint()
        return given

    with pytest.raises(HintError, match="an argument 'given' that cannot be saved"):
        checkpoints(directory=tmp_path)(function)(argument)
    assert ran == []


def test_open_file_as_argument_is_refused(tmp_path: Path) -> None:
    def function(file: Any) -> None:
        checkpoint()

    with open(__file__) as file, pytest.raises(HintError, match="open it inside the function"):
        checkpoints(directory=tmp_path)(function)(file)


def test_hint_outside_a_decorated_function_does_nothing_and_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surroundings, "_said", set())
    checkpoint()
    checkpoint()
    (record,) = caplog.records
    assert record.message.startswith("checkpoint() was called outside a function that is decorated")


def test_second_thread_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    begun, over = threading.Event(), threading.Event()

    def function(_: int) -> int:
        begun.set()
        over.wait(60)
        checkpoint()
        return 1

    decorated = checkpoints(directory=tmp_path)(function)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(decorated(1)))
    thread.start()
    try:
        assert begun.wait(60)
        with pytest.raises(HintError, match="is being run by another thread"):
            decorated(1)
    finally:
        over.set()
        thread.join()
    assert results == [1]
    assert decorated(1) == 1


def test_global_that_cannot_be_saved_is_named_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surroundings, "_said", set())
    assert checkpoints(directory=tmp_path)(uses_global)() == 1
    assert "The global 'LOCK' of uses_global" in caplog.text


LOCK = threading.Lock()


def uses_global() -> int:
    checkpoint()
    with LOCK:
        return 1


@pytest.mark.parametrize(
    "options",
    [
        {"overhead": 0},
        {"overhead": "much"},
        {"failure_rate": -1},
        {"failure_rate": float("nan")},
        {"hints": "some"},
        {"cost": "cheap"},
        {"every": 0},
        {"every": 1.5},
    ],
)
def test_options_that_make_no_sense_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} is .*; it must be"):
        checkpoints(**options)


def test_decorator_without_parentheses_is_refused() -> None:
    with pytest.raises(TypeError):
        checkpoints(without)  # type: ignore[call-arg, arg-type]
