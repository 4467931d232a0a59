"""Calls that are cut, in forks that may be killed or by an exception, and the bits of what came of them."""

from __future__ import annotations

import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from forks import fork

from understudy.hints import running


def bits(value: Any) -> Any:
    """Equal for equal bits alone, and no tensors in it."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), value.detach().contiguous().numpy().tobytes())
    if isinstance(value, numpy.ndarray):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, list | tuple):
        return (type(value).__name__, [bits(each) for each in value])
    if isinstance(value, dict):
        return ("dict", [(bits(key), bits(each)) for key, each in value.items()])
    return (type(value).__name__, repr(value))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For the tests of whoever imports this: forks have no pool of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    running.observer = None


def seeded() -> None:
    random.seed(11)
    numpy.random.seed(12)
    torch.manual_seed(13)


def in_a_process(work: Callable[[], Any]) -> tuple[int, Any]:
    """Runs it in a fork. Returns its exit status (minus the signal that ended it), and what it returned."""
    reader, writer = os.pipe()
    child = fork()
    if not child:
        status = 90
        try:
            os.close(reader)
            seeded()
            with os.fdopen(writer, "wb") as file:
                pickle.dump(work(), file)
            status = 0
        except BaseException:  # noqa: BLE001 - the parent shows it
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        answer = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, pickle.loads(answer) if status == 0 else None


def dies_behind(event: str, number: int) -> None:
    def observe(what: str, count: int) -> None:
        if (what, count) == (event, number):
            os._exit(77)

    running.observer = observe


class Cut(BaseException):
    """In the place of a kill, where the function has nothing that an exception would touch."""


def cut_behind_every_checkpoint(call: Callable[[], Any]) -> tuple[Any, int]:
    """Calls it anew, as another process would, until it returns. Returns that, and how often it was cut."""

    def observe(what: str, _: int) -> None:
        if what == "saved":
            raise Cut

    for cuts in range(100):
        running.observer = observe
        try:
            return call(), cuts
        except Cut:
            pass
        finally:
            running.observer = None
    raise AssertionError("it is cut without end")
