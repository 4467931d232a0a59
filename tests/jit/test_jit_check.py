"""`python -m understudy.jit check DIR`: what it lists, what it calls damaged, and its exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from understudy.jit.check import BAD, OK, USAGE, main
from understudy.jit.identity import Identity
from understudy.jit.storage import ShardDirectory


def saved(
    directory: Path, *steps: int, world: int = 2, reason: str = "rank 1 is dead"
) -> list[ShardDirectory]:
    """Each step by all ranks, each its own shard."""
    ranks = [
        ShardDirectory(directory, Identity("job", f"s{rank}", rank, world, f"host-{rank}", "first"))
        for rank in range(world)
    ]
    for rank in ranks:
        rank.announce()
    for step in steps:
        for rank in ranks:
            rank.save(step, Path.touch, reason)
    return ranks


def newer(path: Path) -> None:
    path.write_text("newer")


def checked(directory: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    status = main(["check", str(directory)])
    shown = capsys.readouterr()
    return status, shown.out + shown.err


def payload(directory: Path, step: int, rank: int) -> Path:
    [folder] = directory.glob(f"step-{step}.*.rank-{rank}.*")
    return folder / "payload"


def test_each_save_is_listed_and_what_would_be_taken_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, 3)

    status, shown = checked(tmp_path, capsys)

    assert status == OK
    lines = shown.splitlines()
    assert lines[0] == "job job"
    assert lines[1].startswith("step 3  shard s0  rank 0 of 2  host host-0  rank 1 is dead  whole")
    assert lines[2] == "step 3  shard s1  rank 1 of 2  host host-1  rank 1 is dead  whole"
    assert lines[-1] == "step 3 would be taken: s0 from rank 0, s1 from rank 1"


def test_ranks_that_did_not_arrive_are_named_with_their_hosts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, world=3)[0].save(3, Path.touch, "a test")

    assert "without rank 1 (host-1), rank 2 (host-2)" in checked(tmp_path, capsys)[1]


def test_damage_is_named_and_the_older_step_would_be_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = saved(tmp_path, 3)
    first.save(4, newer, "a test")
    payload(tmp_path, 4, 0).write_text("NEWER")

    status, shown = checked(tmp_path, capsys)

    assert status == BAD
    assert "damaged: payload has not the digest that was written down" in shown
    assert shown.splitlines()[-1].startswith("step 3 would be taken")


def test_damaged_metadata_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, 3)
    (payload(tmp_path, 3, 1).parent / "metadata.json").write_text("{")

    status, shown = checked(tmp_path, capsys)

    assert status == BAD and "damaged: metadata.json is damaged" in shown
    assert shown.splitlines()[-1] == "no step can be resumed from"


def test_a_step_that_lacks_a_shard_is_no_damage_if_an_older_one_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = saved(tmp_path, 3)
    first.save(4, Path.touch, "a test")

    status, shown = checked(tmp_path, capsys)

    assert status == OK and "nobody has saved the shards s1" in shown


def test_where_nothing_is_complete_the_status_is_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path)[0].save(4, Path.touch, "a test")

    assert checked(tmp_path, capsys)[0] == BAD


def test_a_periodic_checkpoint_that_the_script_removed_is_no_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = saved(tmp_path / "ckpt", 3)
    own = tmp_path / "own.pt"
    own.touch()
    first.saved(own, 5)
    own.unlink()

    status, shown = checked(tmp_path / "ckpt", capsys)

    assert status == OK and "gone: the script has removed it" in shown


def test_what_is_being_made_is_counted_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, 3)
    half = tmp_path / f".save.rank-0.{0:016x}"
    half.mkdir()

    status, shown = checked(tmp_path, capsys)

    assert status == OK and "1 unfinished" in shown and half.is_dir()


def test_a_terminal_is_shown_no_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, 3, reason="\x1b[2J\nstep 9 whole\ud800")

    _, shown = checked(tmp_path, capsys)

    assert "\x1b" not in shown and "\\x1b[2J\\nstep 9 whole\\ud800" in shown


@pytest.mark.parametrize("what", ["nothing", "empty", "file"])
def test_what_is_no_directory_of_shards_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    path = tmp_path / "ckpt"
    if what == "empty":
        path.mkdir()
    elif what == "file":
        path.touch()

    status, shown = checked(path, capsys)

    assert status == USAGE and shown.startswith("understudy.jit check: The") and shown.count("\n") == 1


def test_a_missing_argument_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check"])
    assert ended.value.code == USAGE


def test_the_command_line_ends_with_its_status(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    command = [sys.executable, "-m", "understudy.jit", "check", str(tmp_path)]

    found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    assert found.returncode == OK, found.stderr  # in a checkout, too
    assert "step 3 would be taken" in found.stdout
