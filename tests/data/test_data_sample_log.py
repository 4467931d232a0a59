"""The log of samples and its judgement (eqs. 2 and 5 of paper 002), and logs that are anything else."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import fork
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.data import EpochPlan, ResumableSampler, SampleLog
from understudy.data.accounting import Run, gaps
from understudy.data.check import NoRecords, main, read_run
from understudy.data.judgement import judge
from understudy.data.records import Beginning, Used, added, multiset_hash, parse

PLAN = EpochPlan(22, 4, seed=3)
"""Epochs of five steps."""


def write(
    directory: Path,
    ranks: int,
    steps: Iterable[int],
    change: Callable[[int, int, list[Any]], list[Any]] = lambda rank, step, ids: ids,
    own: Callable[[int], int | str] | None = None,
    **options: Any,
) -> None:
    """An attempt: `change` makes of a rank's ids of a global step what is recorded, `own` ids of indices."""
    steps = list(steps)
    samplers = [ResumableSampler(22, 4, rank=rank, world_size=ranks, seed=3) for rank in range(ranks)]
    attempt = options.pop("attempt", None) or max([0, *_attempts(directory)]) + 1
    for rank, sampler in enumerate(samplers):
        with SampleLog(directory, sampler, attempt=attempt, own_ids=own is not None, **options) as log:
            for step in steps:
                place = divmod(step, 5)
                ids = change(rank, step, sampler.indices(*place))
                log.record(*place, [own(one) for one in ids] if own else ids)


def _attempts(directory: Path) -> list[int]:
    return list(read_run(directory).attempts) if any(directory.glob("samples-*")) else []


def checked(capsys: pytest.CaptureFixture[str], *words: Path | str) -> tuple[int, str]:
    capsys.readouterr()
    status = main(["check", *map(str, words)])
    said = capsys.readouterr()
    return status, said.out + said.err


def samples(rank: int = 0) -> str:
    return f"samples-rank{rank:05d}.jsonl"


def test_a_whole_run_is_exact_and_each_epoch_is_said_to_be(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, 2, range(12))

    status, said = checked(capsys, folder)

    assert status == 0
    assert said.splitlines() == [
        "1 attempt on 2 ranks; epochs of 5 steps of 4 samples; 0 steps redone, 0 lines torn",
        "epoch 0: 5 steps, duplicates 0, missing 0, extra 0",
        "epoch 1: 5 steps, duplicates 0, missing 0, extra 0",
        "epoch 2: 2 steps, duplicates 0, missing 0, extra 0",
        "exact",
    ]


def test_a_step_that_is_redone_is_that_of_the_later_attempt(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, 2, range(8), lambda rank, step, ids: ids if step < 6 else [0, 0])
    assert checked(capsys, folder)[0] == 1

    write(folder, 1, range(6, 12))

    status, said = checked(capsys, folder)
    assert status == 0
    assert said.startswith("2 attempts on 2 → 1 ranks; epochs of 5 steps of 4 samples; 2 steps redone")
    write(folder, 2, range(7, 9), lambda rank, step, ids: [0, 0])
    assert checked(capsys, folder)[0] == 1, "and if that is wrong, it is not hidden by the earlier one"


def test_a_step_that_a_killed_attempt_has_in_part_is_taken_from_one_that_has_it_whole(folder: Path) -> None:
    write(folder, 2, range(5))
    write(folder, 2, range(3, 5))
    with SampleLog(folder, ResumableSampler(22, 4, rank=0, world_size=2, seed=3), attempt=2) as log:
        log.record(1, 0, [21, 20])  # nonsense, of one rank, which was killed behind it
    write(folder, 2, range(5, 7))

    run = read_run(folder)

    assert judge(run).exact
    assert run.redone == 3


@pytest.mark.parametrize("end", [b'{"epoch": 1, "st', b"\0\0\0", b"{}", b'{"epoch": 1, "step": 0}'])
def test_a_last_line_that_was_torn_is_tolerated_and_the_next_attempt_begins_behind_it(
    folder: Path, capsys: pytest.CaptureFixture[str], end: bytes
) -> None:
    write(folder, 1, range(5))
    with (folder / samples()).open("ab") as file:
        file.write(end)
    assert checked(capsys, folder)[0] == 0

    write(folder, 1, range(5, 7), attempt=2)

    status, said = checked(capsys, folder)
    assert status == 0
    assert "1 line torn" in said


def drop_last(rank: int, step: int, ids: list[int]) -> list[int]:
    return ids[:-1] if (rank, step) == (1, 6) else ids


def repeat_first(rank: int, step: int, ids: list[int]) -> list[int]:
    return [ids[0], ids[0]] if (rank, step) == (1, 6) else ids


def take_foreign(rank: int, step: int, ids: list[int]) -> list[int]:
    return [ids[0], 77] if (rank, step) == (1, 6) else ids


def take_more(rank: int, step: int, ids: list[int]) -> list[int]:
    return [*ids, 77] if (rank, step) == (1, 6) else ids


STEP_6 = PLAN.share(PLAN.order(1), 1, 1, 2).tolist()
"""What rank 1 of 2 has in step 1 of epoch 1."""
OFFENCES = [
    (drop_last, "duplicates 0, missing 1, extra 0", f"sample {STEP_6[1]} is missing"),
    (
        repeat_first,
        "duplicates 1, missing 1, extra 0",
        f"it has used sample {STEP_6[0]}, once too often; {STEP_6[1]} is missing",
    ),
    (
        take_foreign,
        "duplicates 0, missing 1, extra 1",
        f"it has used sample 77, which does not belong to this step; {STEP_6[1]} is missing",
    ),
    (
        take_more,
        "duplicates 0, missing 0, extra 1",
        "it has used sample 77, which does not belong to this step.",
    ),
]


@pytest.mark.parametrize(("change", "counts", "sentence"), OFFENCES)
@pytest.mark.parametrize("compared", [False, True])
def test_the_first_offence_is_named_by_rank_step_and_id(
    folder: Path, capsys: pytest.CaptureFixture[str], change: Any, counts: str, sentence: str, compared: bool
) -> None:
    write(folder / "run", 2, range(12), change)
    write(folder / "whole", 2, range(12))

    words: list[Path | str] = [folder / "run"]
    if compared:
        words += ["--against", folder / "whole"]
    status, said = checked(capsys, *words)

    assert status == 1
    assert f"epoch 1: 5 steps, {counts}" in said
    assert f"NOT exact, 1 time; first at epoch 1, step 1, rank 1: {sentence}" in said
    assert said.count("duplicates 0, missing 0, extra 0") == 2


def test_samples_swapped_between_steps_are_found_although_the_epoch_has_each_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, 1, range(5), lambda rank, step, ids: PLAN.window(PLAN.order(0), 4 - step).tolist())

    status, said = checked(capsys, folder)

    assert status == 1
    assert "epoch 0: 5 steps, duplicates 0, missing 0, extra 0" in said
    assert "first at epoch 0, step 0, rank 0" in said


@pytest.mark.parametrize("ids", [True, False])
def test_a_run_compared_by_hashes_alone_may_have_another_number_of_ranks(
    folder: Path, capsys: pytest.CaptureFixture[str], ids: bool
) -> None:
    name = "image-{}.png".format
    write(folder / "run", 2, range(7), own=name, keep_ids=ids)
    write(folder / "whole", 4, range(7), own=name, keep_ids=ids)
    write(folder / "bad", 2, range(7), take_foreign, own=name, keep_ids=ids)

    assert checked(capsys, folder / "run", "--against", folder / "whole")[0] == 0
    status, said = checked(capsys, folder / "bad", "--against", folder / "whole")
    assert status == 1
    assert "first at epoch 1, step 1, rank " in said
    assert ("'image-77.png'" in said) == ids
    assert ("duplicates ?" in said) != ids


def test_a_hash_only_log_of_indices_is_judged_by_the_plan(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / "run", 2, range(7), keep_ids=False)
    write(folder / "bad", 2, range(7), drop_last, keep_ids=False)

    assert '"ids"' not in (folder / "run" / samples()).read_text()
    assert checked(capsys, folder / "run")[0] == 0
    assert checked(capsys, folder / "bad")[0] == 1


def test_own_ids_without_a_run_to_compare_with_are_judged_by_numbers_and_repetition_and_it_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / "run", 2, range(7), own=str)
    write(
        folder / "twice",
        2,
        range(7),
        lambda rank, step, ids: STEP_6 if (rank, step) == (0, 5) else ids,
        own=str,
    )
    write(folder / "few", 2, range(7), drop_last, own=str)
    write(folder / "hashes", 2, range(7), own=str, keep_ids=False)

    status, said = checked(capsys, folder / "run")
    assert status == 0
    assert said.splitlines()[-2:] == [
        "missing and extra samples cannot be told from the data set's own ids; name a run with --against",
        "nothing wrong",
    ]
    assert (
        f"epoch 1, step 1, rank 1: sample '{STEP_6[0]}' was used in step 0 already"
        in checked(capsys, folder / "twice")[1]
    )
    assert "it has used 1 samples instead of 2" in checked(capsys, folder / "few")[1]
    status, said = checked(capsys, folder / "hashes")
    assert (status, "name a run that never stopped" in said) == (2, True)


@pytest.mark.parametrize(
    ("attempts", "sentence"),
    [
        ([range(1, 5)], "epoch 0, step 0, rank 0: nobody has recorded this step"),
        ([range(5, 7)], "epoch 0, step 0, rank 0: nobody has recorded epoch 0"),
        ([range(2), range(4, 7)], "epoch 0, step 2, rank 0: nobody has recorded steps 2 to 3"),
        ([range(7), [3, 5, 6]], "epoch 0, step 4, rank 0: attempt 2 leaps over this step to epoch 1, step 0"),
        ([[0, 1, 1, 2]], "epoch 0, step 1, rank 0: it is recorded twice in attempt 1"),
    ],
)
def test_steps_that_nobody_recorded_or_that_were_leapt_over_or_doubled_are_found(
    folder: Path, capsys: pytest.CaptureFixture[str], attempts: list[Iterable[int]], sentence: str
) -> None:
    for number, steps in enumerate(attempts, 1):
        write(folder, 1, steps, attempt=number)

    status, said = checked(capsys, folder)

    assert status == 1
    assert f"first at {sentence}" in said


def test_a_rank_whose_log_lacks_a_step_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, 2, range(6))
    (folder / samples(1)).unlink()

    assert (
        "first at epoch 0, step 0, rank 1: it has recorded nothing; 2 ranks took part"
        in checked(capsys, folder)[1]
    )


def test_a_run_that_is_shorter_or_longer_than_the_one_it_is_compared_with_is_not_exact(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / "long", 1, range(7))
    write(folder / "short", 1, range(4))

    status, said = checked(capsys, folder / "short", "--against", folder / "long")
    assert status == 1
    assert "first at epoch 0, step 4, rank 0: nobody has recorded this step" in said
    assert "epoch 0: 4 steps, duplicates 0, missing 4, extra 0" in said
    status, said = checked(capsys, folder / "long", "--against", folder / "short")
    assert status == 1
    assert "first at epoch 0, step 4, rank 0: the run should have no such step" in said
    assert "epoch 0: 5 steps, duplicates 0, missing 0, extra 4" in said


# --- hostile logs ---

BEGIN = Beginning(1, 0, 1, PLAN, False).line()
FIRST = Used(0, 0, 4, multiset_hash(PLAN.order(0)[:4].tolist()), PLAN.order(0)[:4].tolist()).line()


def changed(line: str, **fields: Any) -> str:
    return json.dumps(json.loads(line) | fields)


HASH_OF_HUGE = f"{multiset_hash([10**30]):032x}"


@pytest.mark.parametrize(
    ("text", "status", "sentence"),
    [
        ([FIRST], 1, "line 1, comes before any line that begins an attempt"),
        ([BEGIN, "garbage", FIRST], 1, "line 2, is no record"),
        ([BEGIN, "\0\0", "\xff", FIRST], 1, "line 2, is no record"),
        ([BEGIN, "[" * 50_000, FIRST], 1, "nested too deeply"),
        ([BEGIN, '{"epoch": ' + "9" * 5000 + "}", FIRST], 1, "line 2, is no record"),
        ([BEGIN, changed(FIRST, epoch=2**60), FIRST], 1, "'epoch' is 1152921504606846976, which"),
        ([BEGIN, changed(FIRST, step=-1), FIRST], 1, "'step' is -1"),
        ([BEGIN, changed(FIRST, step=1.5), FIRST], 1, "'step' is 1.5"),
        ([BEGIN, changed(FIRST, step=True), FIRST], 1, "'step' is True"),
        ([BEGIN, changed(FIRST, ids=[1, None]), FIRST], 1, "'ids' is no list of numbers and texts"),
        ([BEGIN, changed(FIRST, ids=[1, 2, 3, 4]), FIRST], 1, "count and hash are not those of its ids"),
        ([BEGIN, changed(FIRST, hash="x"), FIRST], 1, "'hash' is no hash"),
        ([changed(BEGIN, rank=3), BEGIN, FIRST], 0, "exact"),
        ([changed(BEGIN, world_size=3), changed(BEGIN, attempt=0), FIRST], 1, "line 1, is no record"),
        ([BEGIN, changed(BEGIN, world_size=2), FIRST], 1, "Attempt 1 has 1 ranks in one file and 2 in"),
        ([BEGIN, changed(BEGIN, attempt=2, seed=4), FIRST], 1, "Attempt 2 has another data set"),
        ([changed(BEGIN, dataset_size=10**15), FIRST], 2, "of more than 1000000000 are not drawn again"),
        ([changed(BEGIN, global_batch=0), FIRST], 1, "The global batch is 0; it must be at least 1.\n"),
        ([BEGIN], 2, "no step in it"),
        ([BEGIN, changed(FIRST, epoch=2**50)], 1, "nobody has recorded epochs 0 to 1125899906842623"),
        ([BEGIN, FIRST, changed(FIRST, step=2**50)], 1, "leaps over this step"),
        (
            [changed(BEGIN, own_ids=True, dataset_size=2**52), FIRST, changed(FIRST, epoch=1)],
            1,
            "leaps over this step to epoch 1, step 0",
        ),
        ([BEGIN, changed(FIRST, ids=[10**30], count=1, hash=HASH_OF_HUGE)], 1, str(10**30)),
    ],
    ids=range(23),
)  # fmt: skip
def test_what_no_sample_log_has_written_is_told_in_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], text: list[str], status: int, sentence: str
) -> None:
    (folder / samples()).write_bytes("\n".join(text).encode("latin-1") + b"\n")

    found, said = checked(capsys, folder)

    assert (found, sentence in said) == (status, True), said


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.binary(max_size=30), st.booleans())
def test_a_damaged_log_never_passes_for_another_run_and_never_raises_anything_else(
    place: int, damage: bytes, insert: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, 1, range(6))
        path = folder / samples()
        whole = path.read_bytes()
        place %= len(whole)
        path.write_bytes(whole[:place] + damage + whole[place + (0 if insert else len(damage)) :])
        status = main(["check", name])
        if status == 0:  # then all steps that it still has are those that they should be
            for (epoch, step), taken in read_run(folder).steps().items():
                expected = PLAN.window(PLAN.order(epoch), step).tolist()
                assert taken.hash == multiset_hash(expected)
                # A word instead of `ids` is nothing that a reader knows; then there is the hash alone.
                assert taken.ids is None or sorted(taken.ids) == sorted(expected)


def test_no_log_and_no_command_are_usage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = checked(capsys, folder)
    assert (status, "There is no log of samples" in said) == (2, True)
    write(folder / "run", 1, range(2))
    write(folder / "own", 1, range(2), own=str)
    assert checked(capsys, folder / "run", "--against", folder / "absent")[0] == 2
    status, said = checked(capsys, folder / "run", "--against", folder / "own")
    assert (status, "they cannot be compared" in said) == (2, True)
    for words in ([], ["check"], ["other", "x"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2


def test_the_command_line_says_what_it_found(folder: Path) -> None:
    write(folder, 1, range(2), lambda rank, step, ids: ids[1:])

    done = subprocess.run(
        [sys.executable, "-m", "understudy.data", "check", str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert (done.returncode, done.stderr) == (1, "")
    assert "NOT exact, 2 times; first at epoch 0, step 0, rank 0: sample" in done.stdout


# --- writing ---


def test_tensors_are_recorded_as_numbers_and_anything_else_is_refused(folder: Path) -> None:
    with SampleLog(folder, ResumableSampler(22, 4, rank=0, world_size=1, seed=3)) as log:
        log.record(0, 0, torch.tensor([3, 1]))
        for wrong in ([1.5], [None], [True], torch.tensor([0.5])):
            with pytest.raises(ValueError, match="ids are whole numbers or texts"):
                log.record(0, 1, wrong)
        log.sync()

    written = [parse(line) for line in (folder / samples()).read_bytes().splitlines()]
    begun, used = written
    assert begun == Beginning(1, 0, 1, PLAN, False)
    assert isinstance(used, Used) and used == Used(0, 0, 2, multiset_hash([1, 3]), used.ids)
    assert stat.S_IMODE((folder / samples()).stat().st_mode) == 0o600


def test_each_start_is_an_attempt_of_its_own(folder: Path) -> None:
    sampler = ResumableSampler(22, 4, rank=0, world_size=1, seed=3)

    assert [SampleLog(folder, sampler).attempt for _ in range(3)] == [1, 2, 3]


def test_a_line_is_there_although_the_process_is_killed_right_behind_it(folder: Path) -> None:
    pid = fork()
    if pid == 0:
        SampleLog(folder, ResumableSampler(22, 4, rank=0, world_size=1, seed=3)).record(
            0, 0, PLAN.order(0)[:4]
        )
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)

    assert judge(read_run(folder)).exact


@given(st.lists(st.lists(st.one_of(st.integers(), st.text(max_size=5)), max_size=6), max_size=4))
def test_hashes_of_ranks_add_up_to_that_of_the_step_in_whatever_order(parts: list[list[Any]]) -> None:
    together = [one for part in parts for one in part]

    assert added(map(multiset_hash, parts)) == multiset_hash(reversed(together))
    assert multiset_hash([*together, 1]) != multiset_hash([*together, "1"])


@given(st.sets(st.integers(0, 30)), st.integers(0, 25))
def test_gaps_are_exactly_what_is_not_there(present: set[int], end: int) -> None:
    found = [number for gap in gaps(present, end) for number in gap]

    assert found == [number for number in range(end) if number not in present]


def test_an_empty_run_has_nothing_to_judge_and_garbage_alone_is_no_run(folder: Path) -> None:
    with pytest.raises(ValueError, match="no step in it"):
        judge(Run())
    (folder / samples()).write_text("a\nb\n")
    with pytest.raises(NoRecords, match="line 1, is no record"):
        read_run(folder)
