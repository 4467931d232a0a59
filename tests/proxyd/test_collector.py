"""Python's collector of cycles, kept out of the way."""

from __future__ import annotations

import gc

import pytest

from understudy.recovery.machine.collector import without_collector


def test_the_collector_is_as_it_was_also_behind_an_error_and_within_another_such_call() -> None:
    @without_collector()
    def nested(depth: int) -> bool:
        return gc.isenabled() if depth == 0 else nested(depth - 1) or gc.isenabled()

    assert gc.isenabled()
    assert not nested(2)
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), without_collector():
        1 / 0  # noqa: B018
    assert gc.isenabled()
    gc.disable()
    try:
        assert not nested(0)
        assert not gc.isenabled()
    finally:
        gc.enable()
