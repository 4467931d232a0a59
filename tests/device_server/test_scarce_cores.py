"""Device servers that have to share their cores with the workers that they serve."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
from executor_harness import Harness
from training_run import driver

CORES = sorted(os.sched_getaffinity(0))


@contextlib.contextmanager
def thread_that_has(cores: int, policy: int) -> Iterator[None]:
    """What this thread starts has them as well."""
    os.sched_setaffinity(0, CORES[:cores])
    os.sched_setscheduler(0, policy, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.sched_setaffinity(0, CORES)


def threads() -> set[int]:
    return set(map(int, os.listdir("/proc/self/task")))


def policies_of_a_server(cores: int, world: int, policy: int = os.SCHED_OTHER) -> set[int]:
    """Of all threads that an executor has started when it has run a record."""
    before = threads()
    with thread_that_has(cores, policy), Harness(world=world) as harness:
        harness.new(1, [1.0, 2.0, 3.0, 4.0])
        assert harness.read(1) == (1.0, 2.0, 3.0, 4.0)
        return {os.sched_getscheduler(thread) for thread in threads() - before}


@pytest.mark.skipif(driver() != "cpu", reason="a GPU would stand idle while its server waits for the core")
def test_server_takes_the_core_from_nobody_where_cores_are_scarce() -> None:
    assert os.SCHED_BATCH in policies_of_a_server(cores=1, world=1)


@pytest.mark.skipif(len(CORES) < 2, reason="this machine has one core")
def test_server_that_has_a_core_to_itself_wakes_up_at_once() -> None:
    assert policies_of_a_server(cores=2, world=1) == {os.SCHED_OTHER}


def test_policy_that_an_operator_has_chosen_for_a_server_stays() -> None:
    assert policies_of_a_server(cores=1, world=1, policy=os.SCHED_IDLE) == {os.SCHED_IDLE}
