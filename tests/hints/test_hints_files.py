"""Files of checkpoints: whole or not there, one's own alone, and of this call and this version only."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from understudy.hints import HintError, checkpoint, checkpoints, files, open_files, running


class Cut(BaseException):
    pass


def count(most: int) -> list[int]:
    passed = []
    for number in range(most):
        passed.append(number)
        checkpoint()
    return passed


def cut_behind(number: int, call: Callable[[], Any]) -> None:
    """Calls it, and cuts it off behind its so-manieth checkpoint."""

    def observe(what: str, taken: int) -> None:
        if (what, taken) == ("saved", number):
            raise Cut

    running.observer = observe
    try:
        with pytest.raises(Cut):
            call()
    finally:
        running.observer = None


def hints_passed(call: Callable[[], Any]) -> int:
    """How much of it runs."""
    passed: list[int] = []
    running.observer = lambda what, number: passed.append(number) if what == "hint" else None
    try:
        call()
    finally:
        running.observer = None
    return len(passed)


def stored(directory: Path) -> list[Path]:
    """The checkpoints of the only call there, oldest first."""
    (folder,) = directory.iterdir()
    return sorted(path for path in folder.iterdir() if path.name.isdigit())


@pytest.fixture
def function(tmp_path: Path) -> Any:
    return checkpoints(directory=tmp_path / "run", every=1)(count)


@pytest.fixture
def run(tmp_path: Path, function: Any) -> Path:
    """A directory with the 4th and the 3rd checkpoint of count(6)."""
    cut_behind(4, lambda: function(6))
    return tmp_path / "run"


def test_folders_and_files_are_for_their_owner_alone_and_two_are_kept(run: Path) -> None:
    assert [path.name for path in stored(run)] == ["00000003", "00000004"]
    for path in (run, *run.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in next(run.iterdir()).iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_checkpoints_are_removed_when_the_function_returns(run: Path, function: Any) -> None:
    assert hints_passed(lambda: function(6)) == 2
    assert list(run.iterdir()) == []
    assert hints_passed(lambda: function(6)) == 6


def test_another_call_does_not_take_them(run: Path, function: Any) -> None:
    assert hints_passed(lambda: function(7)) == 7
    assert hints_passed(lambda: function(6)) == 2


def test_another_function_does_not_take_them(run: Path) -> None:
    def other(most: int) -> list[int]:
        for _ in range(most):
            checkpoint()
        return []

    assert hints_passed(lambda: checkpoints(directory=run, every=1)(other)(6)) == 6


VERSION = """
from understudy.hints import checkpoint
def work(most):
    '''A docstring.'''
    total = 0
    for number in range(most):
        total += {step}  # {comment}
        checkpoint()
    return total
"""


def version(folder: Path, name: str, **parts: str) -> Any:
    path = folder / f"{name}.py"
    path.write_text(VERSION.format(**parts))
    names: dict[str, Any] = {"__name__": "work"}
    exec(compile(path.read_text(), path, "exec"), names)
    return checkpoints(directory=folder / "run", every=1)(names["work"])


def test_another_version_of_the_function_is_refused_and_another_comment_is_none(tmp_path: Path) -> None:
    cut_behind(2, lambda: version(tmp_path, "first", step="number", comment="one")(4))
    with pytest.raises(HintError, match=r"is of another version of work .*; go on with"):
        version(tmp_path, "second", step="number + 1", comment="one")(4)
    assert hints_passed(lambda: version(tmp_path, "third", step="number", comment="two")(4)) == 2


def test_another_python_is_refused(run: Path, function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "PYTHON", "3.99")
    with pytest.raises(HintError, match=r"was written by Python 3\.1\d, and this is 3\.99"):
        function(6)


def _cut_short(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    place = len(data) // 2
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def _other_head(**fields: Any) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        head, rest = data.split(b"\n", 1)
        return json.dumps({**json.loads(head), **fields}).encode() + b"\n" + rest

    return change


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut short": _cut_short,
    "a bit flipped": _flipped,
    "longer": lambda data: data + b"x",
    "no head": lambda _: b"x" * 100_000,
    "a deep head": lambda _: b"[" * 60_000 + b"\n",
    "a huge pickle": _other_head(pickle=1 << 60),
    "a negative pickle": _other_head(pickle=-1),
    "huge storages": _other_head(storages=[1 << 60]),
    "storages that are none": _other_head(storages=["x"]),
    "another format": _other_head(format=99),
    "no source": _other_head(source=None),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_newest_one_is_passed_over_for_the_one_before(
    damage: str, run: Path, function: Any, caplog: pytest.LogCaptureFixture
) -> None:
    newest = stored(run)[-1]
    newest.write_bytes(DAMAGES[damage](newest.read_bytes()))
    assert hints_passed(lambda: function(6)) == 3
    assert f"The checkpoint {newest} is passed over for the one before it" in caplog.text


def test_damaged_one_does_not_make_a_whole_one_go(run: Path, function: Any) -> None:
    newest = stored(run)[-1]
    newest.write_bytes(b"")
    cut_behind(1, lambda: function(6))
    assert [path.name for path in stored(run)] == ["00000003", "00000005"]


def test_function_begins_anew_where_all_are_damaged(run: Path, function: Any) -> None:
    for path in stored(run):
        path.write_bytes(b"")
    assert hints_passed(lambda: function(6)) == 6


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
@pytest.mark.parametrize("which", ["directory", "folder", "file"])
def test_what_others_may_write_is_refused(which: str, mode: int, run: Path, function: Any) -> None:
    path = {"directory": run, "folder": next(run.iterdir()), "file": stored(run)[-1]}[which]
    path.chmod(mode)
    with pytest.raises(HintError, match=f"Others may write {path}; .*chmod go-w"):
        function(6)
    path.chmod(0o700)
    assert hints_passed(lambda: function(6)) == 2


@pytest.mark.parametrize("which", ["directory", "folder", "file"])
def test_what_belongs_to_somebody_else_is_refused(
    which: str, run: Path, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = {"directory": run, "folder": next(run.iterdir()), "file": stored(run)[-1]}[which]
    number, real = path.stat().st_ino, files._check_owner

    def check(path: Path, facts: os.stat_result, *rest: Any) -> None:
        fields = list(facts)
        fields[stat.ST_UID] += facts.st_ino == number
        real(path, os.stat_result(fields), *rest)

    monkeypatch.setattr(files, "_check_owner", check)
    with pytest.raises(HintError, match=r"belongs to user .*only one's own are"):
        function(6)


def test_links_and_pipes_in_the_place_of_files_are_not_opened(
    run: Path, function: Any, tmp_path: Path
) -> None:
    newest = stored(run)[-1]
    newest.rename(tmp_path / "elsewhere")
    newest.symlink_to(tmp_path / "elsewhere")
    assert hints_passed(lambda: function(6)) == 3
    cut_behind(2, lambda: function(6))
    newest = stored(run)[-1]
    newest.unlink()
    os.mkfifo(newest, 0o600)
    with pytest.raises(HintError, match="is no regular file"):
        function(6)


def test_link_in_the_place_of_the_folder_is_refused(run: Path, function: Any, tmp_path: Path) -> None:
    folder = next(run.iterdir())
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    with pytest.raises(HintError, match="is no folder"):
        function(6)


def test_full_disk_costs_a_checkpoint_and_not_the_run(
    run: Path, function: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = [path.read_bytes() for path in stored(run)]
    with monkeypatch.context() as patched:
        patched.setattr(files.os, "fsync", full)

        def observe(what: str, number: int) -> None:
            if (what, number) == ("hint", 2):
                raise Cut

        patched.setattr(running, "observer", observe)
        with pytest.raises(Cut):
            function(6)
    assert "the one before it still counts" in caplog.text
    assert [path.read_bytes() for path in stored(run)] == before
    assert sorted(path.name for path in next(run.iterdir()).iterdir()) == ["00000003", "00000004", "lock"]
    assert hints_passed(lambda: function(6)) == 2


@pytest.mark.parametrize("call", ["open", "fsync", "rename"])
def test_interruption_while_a_checkpoint_is_written_leaves_the_one_before(
    call: str, run: Path, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(os, call)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if call != "open" or str(arguments[0]).endswith(".new"):
            raise KeyboardInterrupt
        return real(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(files.os, call, interrupted)
        with pytest.raises(KeyboardInterrupt):
            function(6)
    assert [path.name for path in stored(run)] == ["00000003", "00000004"]
    assert hints_passed(lambda: function(6)) == 2


def hold(path: str, pipe: Any) -> None:
    folder = files.Folder(Path(path))
    pipe.send("held")
    pipe.recv()
    folder.release()


def test_second_process_with_the_same_call_is_refused(run: Path, function: Any) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    other = context.Process(target=hold, args=(str(next(run.iterdir())), theirs))
    other.start()
    try:
        assert ours.recv() == "held"
        with pytest.raises(HintError, match="Another process runs the same call"):
            function(6)
    finally:
        ours.send("go")
        other.join(60)
        other.kill()
    assert hints_passed(lambda: function(6)) == 2


def test_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    function = checkpoints(directory=tmp_path / "file" / "run")(count)
    with pytest.raises(HintError, match="Checkpoints cannot be kept in"):
        function(2)


def test_relative_directory_is_meant_where_the_call_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wanders(there: str) -> int:
        for _ in range(2):
            os.chdir(there)
            checkpoint()
        return 1

    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    cut_behind(2, lambda: checkpoints(directory="run", every=1)(wanders)(str(tmp_path / "there")))
    assert len(stored(tmp_path / "run")) == 2


def test_file_open_for_writing_has_what_came_later_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with open(path, "w") as file:
        file.write("before ä\n")
        found = open_files.of(file)
        file.write("later\n")
    with open_files.reopened(found) as file:
        assert file.mode == "w"
        file.write("behind\n")
    assert path.read_text() == "before ä\nbehind\n"


def test_file_that_is_shorter_than_it_was_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with open(path, "wb") as file:
        file.write(b"before")
        found = open_files.of(file)
    path.write_bytes(b"b")
    with pytest.raises(ValueError, match="has 1 bytes, and had 6"):
        open_files.reopened(found)


def test_second_call_of_the_process_for_the_same_folder_is_refused_and_the_first_keeps_its_lock(
    run: Path, function: Any
) -> None:
    folder = files.Folder(next(run.iterdir()))
    try:
        for _ in range(2):
            with pytest.raises(HintError, match="This process already runs a call"):
                function(6)
    finally:
        folder.release()
    assert hints_passed(lambda: function(6)) == 2


def test_refused_call_lets_its_folder_go(run: Path, function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(running, "PYTHON", "3.99")
        with pytest.raises(HintError, match="was written by Python"):
            function(6)
    assert hints_passed(lambda: function(6)) == 2
