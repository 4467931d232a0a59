"""Pre-images on a GPU lie in an arena: what is asked of the allocator for them, on the simulated device."""

from __future__ import annotations

from pathlib import Path

import pytest
from native_reference import native_losses
from simulated_case import does
from training_run import Training

pytestmark = [pytest.mark.usefixtures("simulated_gpus"), pytest.mark.drawn(9)]

SMALL = str(64 << 20)
"""Bytes of a device whose memory a case can use up."""


def lines(case: str, **variables: str) -> list[str]:
    done = does(case, "simulated_arena_cases.py", **variables)
    print(done.stderr)
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


def test_in_the_long_run_pre_images_allocate_nothing_and_their_arena_grows_at_commits_alone() -> None:
    """Each of two rows of pre-images (peers follow a commit later) is missed once, and then has a block."""
    asked, taken = lines("steady_steps")
    assert asked == "[8, 0, 8, 0, 0, 0, 0, 0, 0, 0]"
    assert taken == "[1.9, -0.9, 1.9, -0.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]", (
        "the blocks, and what they replace"
    )


def test_the_copies_of_all_that_a_call_writes_are_one_launch() -> None:
    of_the_call, of_copies = 8, 1
    assert lines("one_launch") == [str([of_the_call + of_copies] * 6)]


def test_a_rewind_brings_back_the_bits_of_each_commit_also_of_what_was_resized_and_freed_since() -> None:
    assert lines("way_back") == ["True"] * 3


def test_behind_a_rewind_there_is_no_arena_and_the_next_commits_make_one() -> None:
    single_allocations = "0.9"
    assert lines("a_rewind_leaves_none") == [single_allocations, "[0, 0, 8, 0, 0]"]


def test_a_program_that_finds_no_memory_gets_an_arena_in_which_nothing_lies_and_keeps_its_way_back() -> None:
    blocks, sealed = 2, 0
    assert lines("room_for_the_program", SIMULATED_CUDA_BYTES=SMALL) == [
        str((blocks, sealed)),
        "True",
        "[0, 8, 8, 8]",  # it stays away for long
        "[8, 0, 8, 0, 0]",
    ]


def test_a_program_that_finds_no_memory_amid_a_step_gets_the_arena_with_its_pre_images() -> None:
    blocks, sealed = 2, 1
    assert lines("room_amid_a_step", SIMULATED_CUDA_BYTES=SMALL) == [str((blocks, sealed)), "True", "True"]


def test_an_arena_that_nobody_used_for_long_goes_and_comes_back() -> None:
    assert lines("no_more_use") == ["2.0", "0.0", "[8, 0, 8, 0, 0]"]


def test_an_arena_makes_way_before_the_device_is_full() -> None:
    assert lines("a_full_device", SIMULATED_CUDA_BYTES=SMALL) == ["2.0", "[8, 8, 8]"]


def test_ranks_that_go_back_amid_a_steady_step_have_the_losses_of_the_undisturbed_run(folder: Path) -> None:
    """Amid the calls of the optimizer, whose pre-images the arena has then."""
    training = Training("char_gpt.py", 2, 14)
    drills = ("kill-server rank=1 step=9 call=448", "call-error rank=0 step=12 call=448")
    done = training.run(folder / "run", proxied=True, drills=drills)
    assert [one["fired"] for one in done.report["faults"]] == [True, True]
    found = [(one["phase"], one["recovered"]) for one in done.report["recoveries"]]
    assert found == [("OPTIMIZER", True)] * 2
    assert done.losses == native_losses(training)
