"""What NVML tells of a GPU, judged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from understudy.recovery.planning.gpu_verdict import LEAVE, UNUSABLE, Reading, Severity, judge, reading_of

SOUND = Reading(
    uncorrected=3, remap_pending=False, remap_failed=False, retirement_pending=False, action=0
)  # of a GPU that has had errors before


def severity(before: Reading | None, now: Reading | None, *xids: int) -> Severity | None:
    found = judge(before, now, xids)
    return found.severity if found is not None else None


def test_a_gpu_of_which_nothing_new_is_told_is_kept() -> None:
    assert severity(SOUND, SOUND) is None
    assert severity(None, None) is None
    marked = replace(SOUND, remap_pending=True, remap_failed=True, retirement_pending=True)
    assert severity(marked, marked) is None


@pytest.mark.parametrize(
    ("change", "severity_of_it", "words"),
    [
        ({"uncorrected": 4}, LEAVE, "1 uncorrectable ECC error since the rank came there"),
        ({"uncorrected": 5}, LEAVE, "2 uncorrectable ECC errors since the rank came there"),
        ({"remap_pending": True}, LEAVE, "a row of its memory is to be replaced at its next reset"),
        ({"retirement_pending": True}, LEAVE, "a page of its memory is out of use from its next reset on"),
        ({"remap_failed": True}, UNUSABLE, "a row of its memory could not be replaced"),
        ({"action": 1}, UNUSABLE, "its driver wants it reset"),
        ({"action": 4}, LEAVE, "its driver wants it drained and reset"),
    ],
)
def test_what_came_while_the_rank_was_there_is_told_in_a_sentence(
    change: dict[str, Any], severity_of_it: Severity, words: str
) -> None:
    found = judge(SOUND, replace(SOUND, **change), ())
    assert found is not None
    assert (found.severity, found.sentence) == (severity_of_it, f"NVML tells of it: {words}")


def test_counts_without_one_to_compare_with_are_no_verdict() -> None:
    now = replace(SOUND, uncorrected=9, remap_pending=True, remap_failed=True, retirement_pending=True)
    assert severity(None, now) is None
    assert severity(Reading(), now) is None  # another driver was asked then, which did not tell
    assert severity(replace(SOUND, uncorrected=9), replace(SOUND, uncorrected=0)) is None  # counted anew


def test_a_gpu_that_is_lost_is_unusable_and_one_that_never_was_known_is_not() -> None:
    for trouble in ("lost", "reset"):
        assert severity(None, Reading(trouble=trouble)) is UNUSABLE
    assert severity(SOUND, Reading(trouble="unknown")) is UNUSABLE
    assert severity(None, Reading(trouble="unknown")) is None
    assert severity(Reading(trouble="unknown"), Reading(trouble="unknown")) is None


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 68, 92, 109, 154, 9999])
def test_an_xid_of_the_program_is_no_verdict(xid: int) -> None:
    assert severity(SOUND, SOUND, xid) is None


def test_xids_count_where_nvml_does_not_answer_and_the_worst_finding_decides() -> None:
    assert severity(SOUND, None, 94) is LEAVE
    assert severity(SOUND, SOUND, 48, 94) is LEAVE
    assert severity(SOUND, SOUND, 94, 95) is UNUSABLE
    found = judge(SOUND, replace(SOUND, uncorrected=4), (13, 94, 79, 94))
    assert found is not None
    assert found.sentence == (
        "NVML tells of it: Xid 94, a contained ECC error; Xid 79, it fell off the bus; "
        "1 uncorrectable ECC error since the rank came there"
    )


def test_of_a_divided_gpu_nothing_is_concluded() -> None:
    assert severity(SOUND, Reading(mig=True), 79) is None


@pytest.mark.parametrize(
    "message",
    [
        [],
        {"absent": ""},
        {"trouble": "?"},
        {"mig": 1},
        {"uncorrected": "1"},
        {"action": [1]},
        {"trouble": []},
    ],
)
def test_what_makes_no_sense_is_no_reading(message: Any) -> None:
    assert reading_of(message) is None


def test_a_reading_is_read() -> None:
    assert reading_of({"uncorrected": 3, "action": None, "remap_pending": True}) == Reading(
        uncorrected=3, remap_pending=True
    )
    assert reading_of({"trouble": "lost"}) == Reading(trouble="lost")
