"""Why a device server has ended, as far as it could still say so, in the error of a rank that is given up."""

from __future__ import annotations

import pytest
from executor_harness import Harness

from understudy.recovery.job.noticed import ENDED, last_words


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (f"{ENDED}: CUDA error: device-side assert triggered", ": CUDA error: device-side assert triggered"),
        (ENDED, ""),
        ("asleep for 3.0 s at record 48, in no collective", ""),
    ],
)
def test_only_what_a_server_said_itself_stands_behind_its_deaths(evidence: str, words: str) -> None:
    assert last_words(evidence) == words


def test_a_session_that_goes_on_or_was_ended_by_proxyd_has_none() -> None:
    with Harness() as h:
        assert h.log.take_last_words() == ""
        h.log.lose("the device is gone")
        assert h.log.take_last_words() == ""
        assert h.log.lost_message == "the device is gone"
