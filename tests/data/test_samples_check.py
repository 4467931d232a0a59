"""`recoveryctl samples check`: what is wrong with a run is found and named, and files may be anybody's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from understudy.data import check as library
from understudy.proxy_client.samples import lines
from understudy.recovery import recoveryctl
from understudy.recovery.samples import reading
from understudy.recovery.samples.records import Batch, Share, parse

PLAIN: dict[str, Any] = {
    "class": "torch.utils.data.dataloader.DataLoader", "samplers": ["torch.utils.data.sampler.RandomSampler"],
    "dataset_size": 8, "batch_size": 2, "share": None, "may_repeat": False, "plan": None,
}  # fmt: skip
PLACE = "loader 0, epoch 0, step"
"""Of most sentences."""
Line = Callable[[int], str]


def batch(loader: int, epoch: int, step: int, ids: Sequence[int] | None) -> Line:
    return lambda line: lines.batch(line, loader, epoch, step, None if ids is None else list(ids))


def content(number: int, digest: int = 1, size: int = 8) -> Line:
    return lambda line: lines.minibatch(line, number, 1, size, digest)


def end(behind: Sequence[Line]) -> Line:
    number = 1 + sum("minibatch" in json.loads(line(0)) for line in behind)
    return lambda line: lines.ending(line, number, 0, 0, 0)


def loader(number: int = 0, **other: Any) -> Line:
    return lambda line: lines.loader(line, number, PLAIN | other)


def sampled(*steps: Sequence[int], of: int = 0, epoch: int = 0) -> list[Line]:
    """Minibatches with a batch each."""
    found: list[Line] = []
    for step, ids in enumerate(steps):
        found += [batch(of, epoch, step, ids), content(step + 1, step + 1)]
    return found


def attempt(
    following: Sequence[Line], rank: int = 0, world: int = 1, number: int = 1, restart: int = 0
) -> list[str]:
    begun = lines.beginning(number, restart, rank, world, 0)
    return [begun, *(line(place) for place, line in enumerate(following, 1))]


def write(folder: Path, *ranks: Sequence[str]) -> Path:
    folder.mkdir()
    for rank, text in enumerate(ranks):
        (folder / f"samples-rank{rank:05d}.jsonl").write_text("".join(f"{line}\n" for line in text))
    return folder


def check(*arguments: object) -> Result:
    return CliRunner().invoke(recoveryctl.app, ["samples", "check", *map(str, arguments)])


def first_offence(*arguments: object) -> str:
    """Of a run in which something is wrong."""
    done = check(*arguments, "--json")
    assert done.exit_code == 1, done.output
    return str(json.loads(done.output)["offences"][0])


def ended(*middle: Line, loaders: int = 1) -> list[Line]:
    return [*(loader(number) for number in range(loaders)), *middle, end(middle)]


# ------------------------------------------------------------------ one run
@pytest.mark.parametrize(
    ("middle", "sentence"),
    [
        (sampled([1, 2], [3, 1]), "minibatch 2, PLACE 1: sample 1 was used in step 0 already."),
        (sampled([1, 1]), "minibatch 1, PLACE 0: sample 1 was used in this very step already."),
        ([batch(0, 0, 1, [1])], "minibatch 1, PLACE 1: it is the first of its epoch."),
        ([batch(0, 0, 0, [1]), batch(0, 0, 2, [2])], "minibatch 1, PLACE 2: it comes behind step 0."),
        ([batch(4, 0, 0, [1])], "minibatch 1, loader 4, epoch 0, step 0: nothing says what loader this is."),
        ([content(2)], "minibatch 2: it comes where minibatch 1 should."),
        ([content(1), content(1)], "minibatch 1: it comes where minibatch 2 should."),
    ],
)
def test_an_offence_is_named_with_rank_minibatch_and_place(
    tmp_path: Path, middle: list[Line], sentence: str
) -> None:
    run = write(tmp_path / "run", attempt(ended(*middle)))
    assert first_offence(run) == f"rank 0, {sentence}".replace("PLACE", PLACE)


def test_the_first_offence_is_told_and_repetitions_are_counted(tmp_path: Path) -> None:
    middle = sampled([1, 2], [2, 1], [3, 2])
    done = check(write(tmp_path / "run", attempt(ended(*middle))))
    assert done.exit_code == 1 and "NOT as it should be (1 time, 3 samples repeated)" in done.output
    assert "rank 0, minibatch 2, loader 0, epoch 0, step 1: sample 2" in done.output


def test_samples_may_come_again_in_another_epoch_loader_or_attempt_and_where_a_sampler_says_so(
    tmp_path: Path,
) -> None:
    for name, following in (
        ("epochs", ended(batch(0, 0, 0, [1]), batch(0, 1, 0, [1]))),
        ("loaders", ended(batch(0, 0, 0, [1]), batch(1, 0, 0, [1]), loaders=2)),
        ("drawn", [loader(may_repeat=True), batch(0, 0, 0, [1, 1]), end([])]),
    ):
        assert check(write(tmp_path / name, attempt(following))).exit_code == 0
    again = attempt(ended(batch(0, 0, 0, [1]))) + attempt(ended(batch(0, 0, 0, [1])), restart=1)
    assert check(write(tmp_path / "attempts", again)).exit_code == 0


def dealt(replica: int, *steps: Sequence[int]) -> list[Line]:
    """One rank of two that share five samples."""
    share = {"replicas": 2, "replica": replica, "chunk": 1, "skipped": 0}
    middle = sampled(*steps)
    return [loader(share=share, dataset_size=5), *middle, end(middle)]


def test_ranks_that_share_a_data_set_have_no_sample_in_common_but_what_fills_up_the_last(
    tmp_path: Path,
) -> None:
    """Five samples on two ranks: DistributedSampler gives the first of its order to the last rank, too."""
    good = [attempt(dealt(0, [4, 1], [0]), 0, 2), attempt(dealt(1, [3, 2], [4]), 1, 2)]
    assert check(write(tmp_path / "good", *good)).exit_code == 0
    wrong = [attempt(dealt(0, [4, 1], [0]), 0, 2), attempt(dealt(1, [3, 1], [4]), 1, 2)]
    assert first_offence(write(tmp_path / "wrong", *wrong)) == (
        "rank 1, minibatch 1, loader 0, epoch 0, step 0: sample 1 is rank 0's, which had it in this epoch."
    )
    same = [attempt(dealt(0, [4, 1], [0]), rank, 2) for rank in range(2)]
    assert "is rank 0's" in first_offence(write(tmp_path / "same", *same))


@pytest.mark.parametrize(
    ("share", "positions"),
    [
        (Share(2, 1, 1, 0), [1, 3, 5, 7, 9, 11]),
        (Share(2, 0, 2, 0), [0, 1, 4, 5, 8, 9]),
        (Share(3, 1, 2, 2), [8, 9, 14, 15, 20, 21]),
    ],
)
def test_a_share_says_which_positions_of_the_order_are_a_ranks(share: Share, positions: list[int]) -> None:
    assert [share.position(number) for number in range(6)] == positions


def test_content_that_comes_again_is_found_only_where_no_index_tells_more(tmp_path: Path) -> None:
    unknown = [batch(0, 0, 0, None), content(1, 7), batch(0, 0, 1, None), content(2, 7)]
    offence = first_offence(write(tmp_path / "unknown", attempt(ended(*unknown))))
    assert offence == "rank 0, minibatch 2: it copies what minibatch 1 of the same epoch did."
    known = [batch(0, 0, 0, [1]), content(1, 7), batch(0, 0, 1, [2]), content(2, 7)]
    assert check(write(tmp_path / "known", attempt(ended(*known)))).exit_code == 0
    epochs = [batch(0, 0, 0, None), content(1, 7), batch(0, 1, 0, None), content(2, 7)]
    assert check(write(tmp_path / "epochs", attempt(ended(*epochs)))).exit_code == 0
    nothing = [content(1, 7), content(2, 7), content(3, 7, size=0)]  # a script without any loader
    assert check(write(tmp_path / "nothing", attempt(ended(*nothing)))).exit_code == 0


def test_lines_that_go_back_replace_those_before_and_lines_that_lack_are_missed(tmp_path: Path) -> None:
    """As of a worker whose host was lost, and which goes on from an image of its process."""
    made = attempt(ended(*sampled([1], [2], [3])))
    back = [*made[:5], *made[2:]]  # it had written one minibatch and a batch, and does them again
    done = check(write(tmp_path / "back", back))
    assert done.exit_code == 0 and "brought back to an image" in done.output
    assert "3 samples in 3 batches" in done.output
    lacking = [*made[:3], *made[5:]]
    assert first_offence(write(tmp_path / "lacking", lacking)) == (
        "rank 0: lines 3 to 4 of what it wrote are missing."
    )


# ------------------------------------------------------------------ two runs
@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (sampled([1, 2], [3, 5]), "minibatch 2, PLACE 1: its sample 1 is 4, and 5 in the other run."),
        (sampled([1, 2]), "minibatch 2, PLACE 1: the other run had no such batch."),
        (
            sampled([1, 2], [3, 4], [5, 6]),
            "minibatch 2, PLACE 2: it had no such batch, and the other run had it in minibatch 3.",
        ),
        (
            [*sampled([1, 2], [3, 4]), content(3)],
            "minibatch 3: it has 2 minibatches, and the other run 3.",
        ),
        (sampled([1, 2], [3]), "minibatch 2, PLACE 1: it has 2 samples, and 1 in the other run."),
        (
            [batch(0, 0, 0, [1, 2]), content(1, 1), batch(0, 0, 1, [3, 4]), content(2, 9)],
            "minibatch 2: other bytes went to the device than in the other run "
            "(0000000000000002, 0000000000000009).",
        ),
        (
            [batch(0, 0, 0, [1, 2]), content(1, 1, 16), batch(0, 0, 1, [3, 4]), content(2, 2)],
            "minibatch 1: 1 copies of 8 bytes went to the device, and 1 of 16 in the other run.",
        ),
        (
            [batch(0, 0, 0, [1, 2]), content(1, 1), batch(0, 1, 0, [3, 4]), content(2, 2)],
            "minibatch 2, PLACE 1: the other run had step 0 of epoch 1 of loader 0 here.",
        ),
        (
            [batch(0, 0, 0, [1, 2]), content(1, 1), batch(0, 0, 1, None), content(2, 2)],
            "minibatch 2, PLACE 1: one of the runs knows its indices, and the other does not.",
        ),
    ],
)
def test_the_first_difference_of_two_runs_is_named(tmp_path: Path, other: list[Line], sentence: str) -> None:
    run = write(tmp_path / "run", attempt(ended(*sampled([1, 2], [3, 4]))))
    against = write(tmp_path / "other", attempt(ended(*other)))
    assert first_offence(run, "--against", against) == f"rank 0, {sentence}".replace("PLACE", PLACE)
    assert check(run, "--against", run).exit_code == 0


def test_runs_of_different_numbers_of_ranks_are_compared_by_what_all_have_together(tmp_path: Path) -> None:
    two = [attempt(dealt(0, [0, 2], [4]), 0, 2), attempt(dealt(1, [1, 3], [0]), 1, 2)]
    run = write(tmp_path / "two", *two)
    alone = [loader(may_repeat=True), *sampled([0, 1, 2, 3], [4, 0]), end(sampled([1], [1]))]
    assert check(run, "--against", write(tmp_path / "one", attempt(alone))).exit_code == 0
    other = write(tmp_path / "other", attempt(ended(*sampled([0, 1, 2, 5], [4, 0]))))
    assert "sample 3 is in one of the runs alone" in first_offence(run, "--against", other)


# ------------------------------------------------------------------ hostile files
GOOD = attempt(ended(*sampled([1, 2])))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[]", "it is no JSON object"),
        ("[" * 100_000, "it is nested too deeply"),
        ("\x00\x00", "is no record"),
        ('{"line": 1}', "its field 'loader' is None"),
        ('{"line": -1, "loader": 0, "epoch": 0, "step": 0}', "its field 'line' is -1"),
        ('{"line": 1e400, "loader": 0, "epoch": 0, "step": 0}', "its field 'line' is inf"),
        ('{"line": 1, "loader": 0, "epoch": true, "step": 0}', "its field 'epoch' is True"),
        ('{"line": 1, "loader": 0, "epoch": 0, "step": 9007199254740993}', "its field 'step'"),
        ('{"line": 1, "loader": 0, "epoch": 0, "step": 0, "ids": [1, 2], "count": 3}', "its field 'count'"),
        ('{"line": 1, "loader": 0, "epoch": 0, "step": 0, "ids": [[1]], "count": 1}', "its field 'ids'"),
        (
            '{"line": 1, "minibatch": 0, "payloads": 0, "bytes": 0, "content": "0000000000000000"}',
            "minibatch 0",
        ),
        ('{"line": 1, "minibatch": 1, "payloads": 0, "bytes": 0, "content": "xyz"}', "its field 'content'"),
        ('{"line": 3, "attempt": 1, "restart": 0, "rank": 0, "world_size": 1, "left_out": 0}', "rank 0 of 1"),
        ('{"line": 0, "attempt": 1, "restart": 0, "rank": 5, "world_size": 1, "left_out": 0}', "rank 5 of 1"),
        ('{"line": 1, "loader": 0, "class": "a\\u001b[2J", "samplers": [], "may_repeat": false}', "'class'"),
        ('{"line": 1, "loader": 0, "class": "a", "samplers": 3, "may_repeat": false}', "'samplers'"),
        (
            '{"line": 1, "loader": 0, "class": "a", "samplers": [], "may_repeat": false, "share": '
            '{"replicas": 1, "replica": 1, "chunk": 1, "skipped": 0}}',
            "'share'",
        ),
        (
            '{"line": 1, "loader": 0, "class": "a", "samplers": [], "may_repeat": false, "plan": '
            '{"dataset_size": 1, "global_batch": 2, "seed": 0, "shuffle": true}}',
            "'plan'",
        ),
    ],
)
def test_a_line_that_no_worker_writes_is_found_bad_in_one_sentence(
    tmp_path: Path, line: str, why: str
) -> None:
    done = check(write(tmp_path / "run", [GOOD[0], line, *GOOD[1:]]))
    assert done.exit_code == 1 and getattr(done.exception, "status", None) == 1
    sentence = str(done.exception)
    assert "samples-rank00000.jsonl, line 2, is no record" in sentence and why in sentence, sentence
    assert "\n" not in sentence and len(sentence) < 400


def test_a_line_that_a_kill_has_torn_is_none_at_the_end_and_before_another_attempt(tmp_path: Path) -> None:
    torn = GOOD[-1][:10]
    run = write(tmp_path / "run", [*GOOD[:-1], torn, *attempt(ended(*sampled([1, 2])), number=2), torn])
    assert check(run).exit_code == 0
    assert check(write(tmp_path / "amid", [*GOOD[:2], torn, *GOOD[2:]])).exit_code == 1


def test_files_that_cannot_be_read_and_those_of_others_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, status: int) -> str:
        done = check(path)
        assert done.exit_code == 1 and getattr(done.exception, "status", None) == status, done.output
        return str(done.exception)

    assert "cannot be read" in refused(tmp_path / "nowhere", 2)
    (tmp_path / "empty").mkdir()
    assert "run it with proxyrun --samples" in refused(tmp_path / "empty", 2)
    run = write(tmp_path / "run", GOOD)
    path = run / "samples-rank00000.jsonl"
    assert "comes before any that begins" in refused(write(tmp_path / "headless", GOOD[1:]), 1)
    assert "is of rank 0" in refused(write(tmp_path / "strange", GOOD, GOOD), 1)
    worlds = write(tmp_path / "worlds", attempt([], 0, 2), attempt([], 1, 3))
    assert "one of 3 in attempt 1, and rank 0 one of 2" in refused(worlds, 1)
    monkeypatch.setattr(reading, "LONGEST_LINE", 40)
    assert "line 1, has more than 40 bytes" in refused(run, 1)
    monkeypatch.setattr(reading, "MOST_BYTES", 10)
    assert "more than can be judged" in refused(run, 2)
    monkeypatch.undo()
    path.rename(run / "elsewhere")
    path.symlink_to(run / "elsewhere")
    assert "cannot be read" in refused(run, 2)
    path.unlink()
    os.mkfifo(path)
    assert "is no regular file" in refused(run, 1)


def test_each_of_the_two_commands_names_the_other_for_what_is_not_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path / "run", GOOD)
    assert library.main(["check", str(run)]) == library.BAD
    assert "recoveryctl samples check" in capsys.readouterr().err
    own = '{"attempt": 1, "rank": 0, "world_size": 1, "own_ids": false}'
    done = check(write(tmp_path / "own", [own, own]))
    assert "python -m understudy.data check" in str(done.exception)


@pytest.mark.parametrize(
    ("index", "is_batch", "ids"),
    [
        ([3, 1], True, [3, 1]),
        ((3, 1), True, [3, 1]),
        (["b", 1], True, ["b", 1]),
        ([(1, 2)], True, ["(1, 2)"]),
        ([1.5], True, None),
        ([True], True, None),
        ([None, None], True, None),
        ({"a": 1}, True, None),
        (7, False, [7]),
        ((1, "x"), False, ["(1, 'x')"]),
        ([4, 5], False, [4, 5]),
    ],
)
def test_what_a_sampler_yields_becomes_plain_numbers_and_texts(index: Any, is_batch: bool, ids: Any) -> None:
    assert lines.ids_of(index, is_batch) == ids
    if ids is not None:
        _, record = parse(lines.batch(5, 0, 0, 0, ids).encode())
        assert isinstance(record, Batch) and record.ids is not None and list(record.ids) == ids
