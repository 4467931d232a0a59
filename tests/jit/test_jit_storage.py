"""Shards on disk: what counts, what a crash leaves, what a hostile directory does (paper 001 §3.2-3.3)."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jit_shards import chosen, complete, folders, identity, nothing, opened, taken, text

from understudy.jit.identity import JitError
from understudy.jit.reading import Directory
from understudy.jit.storage import ShardDirectory

# What counts.


def test_a_save_is_found_with_its_payload_and_says_whose_it_is(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "ckpt"
    first, second = opened(place)
    path = first.save(5, lambda path: torch.save({"weight": torch.ones(3)}, path), "rank 1 is dead")
    second.save(5, text("other"), "rank 1 is dead")

    choice = chosen(place)

    assert choice is not None and choice.path == path and choice.step == 5
    assert torch.load(choice.path)["weight"].tolist() == [1, 1, 1]
    told = {name: choice.metadata[name] for name in ("job", "shard", "rank", "world_size", "host", "reason")}
    assert told == {
        "job": "job", "shard": "s0", "rank": 0, "world_size": 2, "host": "host-0", "reason": "rank 1 is dead",
    }  # fmt: skip
    assert choice.metadata["versions"]["torch"] == torch.__version__
    assert stat.S_IMODE(place.stat().st_mode) == stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_nothing_is_chosen_in_an_empty_directory(tmp_path: Path) -> None:
    assert chosen(tmp_path / "ckpt") is None


def test_shards_of_different_steps_are_never_mixed(tmp_path: Path) -> None:
    first, second = complete(tmp_path, 3)
    first.save(7, text("i"), "a test")
    second.save(8, text("i + 1"), "a test")

    assert [taken(tmp_path, rank) for rank in (0, 1)] == [(3, "s0 of 3"), (3, "s1 of 3")]
    assert any("step 8" in remark.lower() for remark in (chosen(tmp_path) or pytest.fail()).remarks)


def test_a_shard_that_was_announced_but_not_saved_makes_the_older_step_be_taken(tmp_path: Path) -> None:
    ranks = complete(tmp_path, 3, world=3)
    for rank in ranks[:2]:
        rank.save(4, text("newer"), "a test")

    choice = chosen(tmp_path, world=3)

    assert choice is not None and choice.step == 3
    assert any("nobody has saved the shards s2" in remark for remark in choice.remarks)


def test_one_rank_chooses_for_all_and_refuses_a_shard_that_there_is_not(tmp_path: Path) -> None:
    complete(tmp_path, 3)

    choice = chosen(tmp_path, rank=0)

    assert choice is not None
    assert choice.for_rank(identity(1)).read_text() == "s1 of 3"
    with pytest.raises(JitError, match="has no shard strange, only s0, s1"):
        choice.for_rank(identity(1, shard="strange"))


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (["other", "same", "same"], "same"),
        (["same", "other", "same"], "same"),
        (["a", "b", "c"], "a"),
        (["b", "a", "a", "b"], "b"),
    ],
)
def test_of_replicas_that_differ_the_majority_is_taken_and_at_a_tie_the_lowest_rank(
    tmp_path: Path, contents: list[str], expected: str
) -> None:
    world = len(contents)
    ranks = opened(tmp_path, world, shards=dict.fromkeys(range(world), "0"))
    for rank, content in zip(reversed(ranks), reversed(contents), strict=True):
        rank.save(5, text(content), "a test")

    choice = ShardDirectory(tmp_path, identity(0, world, "0", "next")).choose()

    assert choice is not None and choice.path.read_text() == expected
    assert any("replicas differ" in remark for remark in choice.remarks)


def test_a_damaged_replica_is_passed_over_for_a_whole_one_with_a_sentence(tmp_path: Path) -> None:
    first, second = opened(tmp_path, shards={0: "0", 1: "0"})
    first.save(5, text("state"), "a test").write_text("stale")
    second.save(5, text("state"), "a test")

    choice = ShardDirectory(tmp_path, identity(0, shard="0", attempt="next")).choose()

    assert choice is not None and choice.metadata["rank"] == 1 and choice.path.read_text() == "state"
    assert any("digest" in remark for remark in choice.remarks)


def test_where_all_replicas_of_a_shard_are_damaged_the_older_step_is_taken(tmp_path: Path) -> None:
    ranks = complete(tmp_path, 3)
    shutil.copytree(tmp_path, tmp_path / "kept")
    for number, rank in enumerate(ranks):
        rank.save(4, text(f"s{number} of 4"), "a test")
    for folder in folders(tmp_path / "kept"):  # removed when step 4 was complete
        if not (tmp_path / folder.name).exists():
            shutil.copytree(folder, tmp_path / folder.name)
    (folders(tmp_path, 4)[1] / "payload").write_text("damaged")

    assert taken(tmp_path) == (3, "s0 of 3")


def test_a_payload_may_be_a_tree_of_folders(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        (path / "a" / "b").mkdir(parents=True)
        (path / "a" / "b" / "ü \n.pt").write_text("deep")
        (path / "empty.pt").touch()

    ranks = opened(tmp_path, world=1)
    ranks[0].save(5, write, "a test")

    choice = chosen(tmp_path, world=1)

    assert choice is not None and (choice.path / "a" / "b" / "ü \n.pt").read_text() == "deep"
    (choice.path / "a" / "b" / "ü \n.pt").write_text("DEEP")
    assert chosen(tmp_path, world=1) is None


SHARDS = (
    "a/b", "a_b", "a%2Fb", "A_b", "a.b", "..", ".", " ", "\n", "~", "模型", "\u00e9", "e\u0301", "\U0001f525",
    "x" * 200, "x" * 199 + "y", "模" * 200, "rank-0", "\x1b[31m",
)  # fmt: skip


def test_shards_whose_names_look_alike_when_quoted_are_kept_apart(tmp_path: Path) -> None:
    world, shards = len(SHARDS), dict(enumerate(SHARDS))
    assert len(set(SHARDS)) == world
    for number, rank in enumerate(opened(tmp_path, world, shards=shards)):
        rank.save(5, text(f"content {number}"), "a test")

    choice = ShardDirectory(tmp_path, identity(0, world, SHARDS[0], "next")).choose()

    assert choice is not None
    found = [choice.for_rank(identity(rank, world, shard)).read_text() for rank, shard in shards.items()]
    assert found == [f"content {number}" for number in range(world)]


@pytest.mark.parametrize("shard", ["", "x" * 201, "\ud800", 7])
def test_a_shard_that_cannot_be_written_down_is_refused(shard: Any) -> None:
    with pytest.raises(JitError, match="The shard of this rank"):
        identity(shard=shard)


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", None, 2**53 + 1])
def test_what_is_no_step_is_refused(tmp_path: Path, step: Any) -> None:
    directory = ShardDirectory(tmp_path, identity())
    for call in (lambda: directory.save(step, nothing, ""), lambda: directory.attend(step)):
        with pytest.raises(JitError, match="A step is a whole number"):
            call()


def test_saves_of_an_attempt_with_more_ranks_are_taken_if_the_shards_are_the_same(tmp_path: Path) -> None:
    shards = {0: "s0", 1: "s1", 2: "s0", 3: "s1"}
    ranks = opened(tmp_path, 4, shards=shards)
    ranks[2].save(9, text("s0"), "a test")
    ranks[3].save(9, text("s1"), "a test")

    fewer = opened(tmp_path, 2, "second")

    assert [(rank.choose() or pytest.fail()).path.read_text() for rank in fewer] == ["s0", "s1"]


def test_saves_of_an_attempt_with_other_shards_are_not_taken(tmp_path: Path) -> None:
    complete(tmp_path, 9, world=3)

    fewer = opened(tmp_path, 2, "second")

    assert fewer[0].choose() is None
    assert any("shards s2 would be taken by no rank" in remark for remark in fewer[0].remarks)


def test_who_did_not_arrive_is_in_the_metadata(tmp_path: Path) -> None:
    ranks = opened(tmp_path, 4)
    ranks[1].attend(6)
    path = ranks[0].save(7, text(""), "a test")

    fields = json.loads((path.parent / "metadata.json").read_text())

    assert fields["absent"] == [{"rank": 2, "host": "host-2"}, {"rank": 3, "host": "host-3"}]


# Old ones.


def test_a_rank_removes_its_own_older_saves_once_a_newer_step_is_complete(tmp_path: Path) -> None:
    first, second = complete(tmp_path, 3, 4)
    first.save(5, text("newer"), "a test")
    assert len(folders(tmp_path, 4)) == 2, "step 5 is not complete"
    second.save(5, text("newer"), "a test")

    assert [len(folders(tmp_path, step)) for step in (3, 4, 5)] == [0, 1, 2]
    first.save(6, text("newest"), "a test")
    assert [len(folders(tmp_path, step)) for step in (4, 5, 6)] == [0, 2, 1]


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 1)], ids=["gone", "cut"])
def test_what_is_behind_a_step_whose_payload_is_gone_or_cut_is_kept(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    first, second = complete(tmp_path, 3)
    damage(first.save(4, text("s0 of 4"), "a test"))
    second.save(4, text("s1 of 4"), "a test")
    first.save(5, text("s0 of 5"), "a test")

    assert taken(tmp_path) == (3, "s0 of 3")


@pytest.mark.parametrize("saver", [0, 1])
@pytest.mark.parametrize("step", [4, 51], ids=["before it", "behind it"])
def test_a_damaged_newer_step_that_the_job_has_turned_away_from_costs_nothing(
    tmp_path: Path, saver: int, step: int
) -> None:
    ranks = complete(tmp_path, 3)
    kept = [(folder, folder.name) for folder in folders(tmp_path)]
    shutil.copytree(tmp_path, tmp_path / "kept")
    for rank in ranks:
        rank.save(50, text("bits"), "a test")
    for _, name in kept:
        shutil.copytree(tmp_path / "kept" / name, tmp_path / name, dirs_exist_ok=True)
    for folder in folders(tmp_path, 50):
        (folder / "payload").write_text("rots")

    again = opened(tmp_path, attempt="second")
    if step > 50:  # else the step itself says that the job has turned away
        assert (again[0].choose() or pytest.fail()).step == 3
    again[saver].save(step, text("newer"), "a test")

    assert taken(tmp_path) == (3, "s0 of 3"), "the new step lacks a shard, step 50 is damaged"


def test_old_attempts_of_which_nothing_is_left_are_forgotten(tmp_path: Path) -> None:
    complete(tmp_path, 3, attempt="0")
    for attempt in range(1, 9):
        opened(tmp_path, attempt=str(attempt))

    assert taken(tmp_path) == (3, "s0 of 3"), "the attempt that has saved is known yet"
    assert len(list((tmp_path / "announced").iterdir())) == 6


# Periodic checkpoints and exports.


def test_a_periodic_checkpoint_competes_by_its_step_where_it_lies(tmp_path: Path) -> None:
    [rank] = complete(tmp_path / "ckpt", 3, world=1)
    own = tmp_path / "own.pt"
    own.write_text("step 5")
    rank.saved(own, 5)

    choice = chosen(tmp_path / "ckpt", world=1)
    assert choice is not None and (choice.step, choice.path) == (5, own)

    own.write_text("step 6")  # not told yet, and as large
    choice = chosen(tmp_path / "ckpt", world=1)
    assert choice is not None and choice.path.read_text() == "s0 of 3"

    rank.saved(own, 6)
    assert [len(folders(tmp_path / "ckpt", step)) for step in (3, 5, 6)] == [1, 0, 1]
    own.unlink()
    choice = chosen(tmp_path / "ckpt", world=1)
    assert choice is not None and choice.step == 3


def test_a_link_to_a_periodic_checkpoint_is_followed_when_it_is_told(tmp_path: Path) -> None:
    [rank] = opened(tmp_path / "ckpt", world=1)
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / "model.pt").write_text("five")
    (tmp_path / "latest").symlink_to("step-5")
    rank.saved(tmp_path / "latest", 5)
    (tmp_path / "latest").unlink()

    choice = chosen(tmp_path / "ckpt", world=1)

    assert choice is not None and (choice.path / "model.pt").read_text() == "five"


def test_a_periodic_checkpoint_that_is_not_there_is_refused(tmp_path: Path) -> None:
    [rank] = opened(tmp_path, world=1)
    with pytest.raises(JitError, match="could not save step 5"):
        rank.saved(tmp_path / "nowhere.pt", 5)
    assert not folders(tmp_path)


def export(path: Path, step: Any, ranks: int = 2, alike: bool = True) -> Path:
    """As `recoveryctl snapshots export` leaves it, in what is read of it."""
    path.mkdir()
    about = {"job": "x", "step": step, "ranks": ranks, "format": "torch", "one_for_all_ranks": alike}
    (path / "snapshot.json").write_text(json.dumps(about))
    for rank in range(0 if alike else ranks):
        (path / f"rank-{rank}").mkdir()
    return path


def test_exports_of_snapshots_compete_by_their_step(tmp_path: Path) -> None:
    ranks = complete(tmp_path / "ckpt", 5)
    older, newer = export(tmp_path / "older", 4), export(tmp_path / "newer", 6)

    assert (ranks[0].choose([older]) or pytest.fail()).step == 5
    choice = ranks[0].choose([older, newer])

    assert choice is not None and (choice.step, choice.path) == (6, newer)
    assert choice.for_rank(identity(1)) == newer


def test_an_export_in_which_ranks_differ_has_a_folder_for_each(tmp_path: Path) -> None:
    ranks = opened(tmp_path / "ckpt")
    other = export(tmp_path / "three", 9, ranks=3, alike=False)
    mine = export(tmp_path / "two", 6, alike=False)

    choice = ranks[0].choose([other, mine])

    assert choice is not None and choice.path == mine / "rank-0"
    assert choice.for_rank(identity(1)) == mine / "rank-1"
    assert any("it is for 3 ranks" in remark for remark in choice.remarks)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"[" * 100_000, b'{"step": "7"}', b'{"step": 7}', b'{"step": 1e400}', b"\xff"]
)
def test_a_damaged_export_is_passed_over(tmp_path: Path, content: bytes) -> None:
    ranks = complete(tmp_path / "ckpt", 5)
    (export(tmp_path / "export", 7) / "snapshot.json").write_bytes(content)

    choice = ranks[0].choose([tmp_path / "export", tmp_path / "nowhere"])

    assert choice is not None and choice.step == 5
    assert len([remark for remark in choice.remarks if "passed over" in remark]) == 2


# Whose it is.


def test_another_jobs_directory_is_refused(tmp_path: Path) -> None:
    ShardDirectory(tmp_path, identity())
    with pytest.raises(JitError, match=r"belongs to the job job, and this is other"):
        ShardDirectory(tmp_path, identity(job="other"))


def test_a_save_of_another_job_that_was_copied_here_does_not_count(tmp_path: Path) -> None:
    complete(tmp_path / "mine", 3)
    other = ShardDirectory(tmp_path / "other", identity(job="other"))
    folder = other.save(9, text("other"), "a test").parent
    shutil.copytree(folder, tmp_path / "mine" / folder.name)

    choice = chosen(tmp_path / "mine")

    assert choice is not None and choice.step == 3
    assert any("one of the job other" in remark for remark in choice.remarks)


def test_a_directory_that_everybody_may_write_into_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(JitError, match="Everybody may write"):
        ShardDirectory(tmp_path, identity())


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ckpt").touch()
    with pytest.raises(JitError, match="cannot be used for checkpoints"):
        ShardDirectory(tmp_path / "ckpt", identity())


def test_what_belongs_to_another_user_does_not_count(tmp_path: Path) -> None:
    complete(tmp_path, 3)

    saves, problems = Directory(tmp_path, os.geteuid() + 1).saves()

    assert not saves and all("belongs to uid" in why for why in problems.values()) and len(problems) == 2


def test_an_attempt_with_two_world_sizes_is_refused(tmp_path: Path) -> None:
    opened(tmp_path, 2)
    with pytest.raises(JitError, match="attempt of its own"):
        ShardDirectory(tmp_path, identity(0, 3)).announce()


# Several processes.
