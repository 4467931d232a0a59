"""Saves of shards that fail at any point, and directories that lie (paper 001 §3.2)."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from jit_shards import chosen, complete, folders, hidden, identity, opened, taken, text

from understudy.jit import reading
from understudy.jit.identity import JitError
from understudy.jit.reading import sealed, unsealed
from understudy.jit.storage import ShardDirectory

pytestmark = pytest.mark.drawn(5)

# Saves that fail.


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
def test_what_save_checkpoint_raises_comes_through_and_nothing_of_it_stays(
    tmp_path: Path, error: BaseException
) -> None:
    ranks = complete(tmp_path, 3)

    def write(path: Path) -> None:
        path.write_text("half")
        raise error

    with pytest.raises(type(error)) as raised:
        ranks[0].save(4, write, "a test")

    assert raised.value is error and not hidden(tmp_path)
    assert taken(tmp_path) == (3, "s0 of 3")


def link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def link_inside(path: Path) -> None:
    path.mkdir()
    (path / "a").touch()
    (path / "b").symlink_to("a")


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda path: None, "was to be at .*payload, and does not count"),
        (lambda path: path.mkdir(), "is an empty folder"),
        (lambda path: path.with_suffix(".npz").touch(), "was to be at"),
        (link, "payload is a symbolic link"),
        (link_inside, "payload/b is a symbolic link"),
        (lambda path: os.mkfifo(path), "payload is neither a file nor a folder"),
        (lambda path: (path / "/".join("d" * 70)).mkdir(parents=True), "64 deep"),
    ],
    ids=["nothing", "empty folder", "another name", "link", "link inside", "pipe", "deep"],
)
def test_a_payload_that_could_not_be_read_back_is_refused_when_it_is_saved(
    tmp_path: Path, write: Callable[[Path], None], said: str
) -> None:
    ranks = complete(tmp_path, 3)
    with pytest.raises(JitError, match=said):
        ranks[0].save(4, write, "a test")

    assert not hidden(tmp_path) and taken(tmp_path) == (3, "s0 of 3")


def test_a_long_reason_does_not_cost_the_save(tmp_path: Path) -> None:
    [rank] = opened(tmp_path, world=1)
    rank.save(3, text("state"), "\ud800é" * (1 << 20))

    assert chosen(tmp_path, world=1) is not None


class Killed(BaseException):
    """The process is gone: nothing that it would still do happens."""


_CHANGES = ("write", "fsync", "rename", "link", "mkdir", "unlink", "rmdir")


@contextmanager
def fault(at: int, kind: str) -> Iterator[Callable[[], bool]]:
    """The `at`-th call that changes the disk fails; yields whether there was one.

    "kill": so do all behind it. "error": that one alone. "full": from then on nothing new finds room.
    """
    calls, real = [0], {name: getattr(os, name) for name in _CHANGES}

    def failing(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[0] += 1
            if kind == "kill" and calls[0] >= at:
                raise Killed
            if kind == "error" and calls[0] == at:
                raise OSError(errno.EIO, "a fault of the test")
            if kind == "full" and calls[0] >= at and name in ("write", "mkdir"):
                raise OSError(errno.ENOSPC, "a full disk of the test")
            if kind == "torn" and calls[0] >= at:
                if name == "write":
                    real["write"](arguments[0], arguments[1][:1])
                raise Killed
            return real[name](*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in _CHANGES:
            patch.setattr(os, name, failing(name))
        yield lambda: calls[0] >= at


def _write_slowly(path: Path) -> None:
    number = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        for part in (b"s0 ", b"of ", b"2"):
            os.write(number, part)
    finally:
        os.close(number)


@pytest.mark.parametrize("kind", ["kill", "error", "full", "torn"])
def test_a_fault_at_any_write_fsync_or_rename_of_a_save_leaves_it_whole_or_not_at_all(
    tmp_path: Path, kind: str
) -> None:
    template = tmp_path / "template"
    complete(template, 1)
    other = opened(template, attempt="first")[1]
    other.save(2, text("s1 of 2"), "a test")  # with rank 0's, step 2 is complete, and step 1 is removed
    for at in range(1, 200):
        directory = tmp_path / f"at-{at}"
        shutil.copytree(template, directory)
        rank = ShardDirectory(directory, identity())
        rank.announce()
        returned, raised = False, None
        with fault(at, kind) as happened:
            try:
                rank.save(2, _write_slowly, "a test")
                returned = True
            except (Killed, OSError, JitError) as error:
                raised = error

        if not happened():
            assert returned and at > 15
            return
        found = taken(directory)
        assert found in ((1, "s0 of 1"), (2, "s0 of 2")), f"call {at}: {found}"
        if returned:
            assert found == (2, "s0 of 2"), f"call {at}"
        elif not isinstance(raised, Killed):
            assert found == (1, "s0 of 1"), f"call {at}: {raised} was raised, and it counts"
        assert not hidden(directory), f"call {at}: remains"
        shutil.rmtree(directory)
    pytest.fail("a save has no end")


@pytest.mark.parametrize("kind", ["kill", "error", "torn"])
def test_a_fault_at_any_point_of_opening_and_announcing_does_not_stop_the_next_start(
    tmp_path: Path, kind: str
) -> None:
    for at in range(1, 200):
        directory = tmp_path / f"at-{at}"
        with fault(at, kind) as happened, suppress(Killed, JitError):
            ShardDirectory(directory, identity()).announce()
        complete(directory, 3, attempt="second")

        assert taken(directory) == (3, "s0 of 3"), f"call {at}"
        assert not hidden(directory), f"call {at}: remains"
        if not happened():
            assert at > 10
            return
        shutil.rmtree(directory)
    pytest.fail("opening has no end")


@pytest.mark.parametrize("kind", ["kill", "error", "torn"])
def test_a_fault_while_a_periodic_checkpoint_is_told_leaves_it_and_the_older_ones(
    tmp_path: Path, kind: str
) -> None:
    own = tmp_path / "own.pt"
    own.write_text("own")
    for at in range(1, 100):
        directory = tmp_path / f"at-{at}"
        [rank] = complete(directory, 1, world=1)
        with fault(at, kind) as happened, suppress(Killed, JitError):
            rank.saved(own, 2)
        choice = chosen(directory, world=1)
        assert choice is not None and choice.path.read_text() in ("s0 of 1", "own"), f"call {at}"
        assert own.read_text() == "own"
        if not happened():
            assert choice.step == 2
            return
        shutil.rmtree(directory)
    pytest.fail("it has no end")


def test_a_file_system_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refused)
    complete(tmp_path, 3)

    assert taken(tmp_path) == (3, "s0 of 3") and not hidden(tmp_path)


def test_all_of_a_save_is_durable_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tree(path: Path) -> None:
        (path / "inner").mkdir(parents=True)
        (path / "inner" / "file").write_text("state")

    [rank] = opened(tmp_path, world=1)
    rank.attend(3)
    synced: list[int] = []
    renamed: list[int] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(number: int) -> None:
        real_fsync(number)
        synced.append(os.fstat(number).st_ino)

    def rename(source: Any, target: Any) -> None:
        real_rename(source, target)
        renamed.append(len(synced))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    payload = rank.save(3, tree, "a test")

    [count] = renamed
    folder = payload.parent
    inodes = [path.stat().st_ino for path in (payload / "inner" / "file", payload / "inner", payload)]
    assert set(inodes) <= set(synced[:count])
    assert synced[count - 2 :] == [
        path.stat().st_ino for path in (folder / "metadata.json", folder, tmp_path)
    ]


def test_what_is_announced_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    real = os.fsync

    def fsync(number: int) -> None:
        real(number)
        synced.add(os.fstat(number).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)
    opened(tmp_path / "ckpt", world=1)

    paths = [path for path in (tmp_path / "ckpt").rglob("*") if "attendance" not in str(path)]
    assert len(paths) == 5
    assert {path.stat().st_ino for path in paths} <= synced


# Hostile directories.


def damaged_somewhere(chance: random.Random, content: bytes) -> bytes:
    found = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(found) + 1)
        match chance.randrange(4):
            case 0 if place < len(found):
                found[place] ^= 1 << chance.randrange(8)
            case 1:
                del found[place : place + chance.randint(1, 40)]
            case 2:
                found[place:place] = chance.randbytes(chance.randint(1, 8))
            case _:
                found[place:place] = chance.choice([b"[" * 2000, b"{}", b"null", b'"', b"1" * 5000, b"NaN"])
    return bytes(found)


@pytest.mark.drawn(1)
def test_damage_anywhere_gives_what_was_saved_or_nothing(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    complete(tmp_path, 3)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size)
    assert len(files) >= 8
    for _ in range(300):
        path = chance.choice(files)
        content = path.read_bytes()
        path.write_bytes(damaged_somewhere(chance, content))
        try:
            assert taken(tmp_path) in (None, (3, "s0 of 3"))
        except JitError as error:
            assert path.name == "job.json", error
        path.write_bytes(content)
    assert taken(tmp_path) == (3, "s0 of 3")


HOSTILE: dict[str, list[Any]] = {
    "step": [-1, 2**70, 4, True, "3", None, 3.0],
    "rank": [-1, 1, 2, "0", [0]],
    "world_size": [0, -1, "2", 2**70],
    "shard": ["", "s1", "../x", "x" * 1000, None, "\ud800", 7],
    "attempt": ["", "other", None, {}],
    "job": ["", "other", None],
    "host": [None, "x" * 1000],
    "kind": ["periodic", "other", None],
    "algorithm": ["md5", None],
    "payload": ["", "..", ".", "/", "metadata.json", None, "payload/x"],
    "root": ["/", "/etc", "", ".", "/tmp/../etc", 7, "/\0"],
    "absent": [None, [7], [{"rank": -1, "host": ""}], [{"rank": 1}]],
    "reason": [None, []],
    "files": [
        {}, [], None, {"payload": None}, {"payload": []}, {"payload": [7]}, {"payload": [7, "0" * 15]},
        {"payload": [-1, "0" * 16]}, {"payload": ["7", "0" * 16]}, {"../payload": [7, "0" * 16]},
        {"/etc/passwd": [7, "0" * 16]}, {"payload/../../../x": [7, "0" * 16]}, {"payload//x": [7, "0" * 16]},
        {"payload/" + "x/" * 100 + "x": [7, "0" * 16]}, {"payload\0": [7, "0" * 16]}, {"": [7, "0" * 16]},
        {"payload": [7, "0" * 16]}, {f"payload/{number}": [7, "0" * 16] for number in range(10_001)},
    ],
    "format": [0, 2, None, "1"],
}  # fmt: skip


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", HOSTILE)
def test_metadata_that_is_in_order_but_hostile_does_not_count(tmp_path: Path, name: str) -> None:
    complete(tmp_path, 3)
    path = folders(tmp_path)[0] / "metadata.json"
    fields = unsealed(path.read_bytes())
    for value in HOSTILE[name]:
        path.write_bytes(sealed({**fields, name: value}))
        assert taken(tmp_path, rank=1) is None, f"{name}: {value!r:.60}"
    path.write_bytes(sealed({key: value for key, value in fields.items() if key != name}))
    assert taken(tmp_path, rank=1) is None

    path.write_bytes(sealed(fields))
    assert taken(tmp_path, rank=1) == (3, "s1 of 3")


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("was", "becomes"), [(b"a test", b"a tent"), (b"host-0", b"host-8")])
def test_metadata_with_a_plausible_change_does_not_count(tmp_path: Path, was: bytes, becomes: bytes) -> None:
    complete(tmp_path, 3)
    path = folders(tmp_path)[0] / "metadata.json"
    path.write_bytes(path.read_bytes().replace(was, becomes))

    choice = chosen(tmp_path)

    assert choice is None


@pytest.mark.drawn(1)
def test_metadata_beyond_a_mebibyte_is_not_read(tmp_path: Path) -> None:
    complete(tmp_path, 3)
    path = folders(tmp_path)[0] / "metadata.json"
    with path.open("ab") as file:
        file.write(b" " * reading.MOST_METADATA)

    assert taken(tmp_path) is None


def replaced_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def replaced_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("part", "replace"),
    [
        ("payload", replaced_by_link),
        ("payload", replaced_by_pipe),
        ("metadata.json", replaced_by_link),
        ("metadata.json", replaced_by_pipe),
        ("", replaced_by_link),
    ],
)
def test_links_are_not_followed_and_pipes_are_not_waited_for(
    tmp_path: Path, part: str, replace: Callable[[Path], None]
) -> None:
    complete(tmp_path, 3)
    replace(folders(tmp_path)[0] / part)

    assert taken(tmp_path) is None


def test_a_linked_job_file_is_refused(tmp_path: Path) -> None:
    ShardDirectory(tmp_path, identity())
    replaced_by_link(tmp_path / "job.json")
    with pytest.raises(JitError, match="symbolic link"):
        ShardDirectory(tmp_path, identity())
