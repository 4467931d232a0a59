"""State by way of storage that hosts share: for who knows the job's token, once, and exactly as it was."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from small_disks import tiny_file_system
from test_remote_state import TOKEN
from test_state_copy import Buffers, empty

from understudy.protos import control_pb2 as pb
from understudy.proxy_server.remote_state import Asker, StateNotFetched
from understudy.proxy_server.shared_files import clear_leftovers, new_name
from understudy.proxy_server.shared_state import PREFIX, SharedDirectory, StateNotWritten, fetch_shared
from understudy.proxy_server.state_copy import CHUNK_BYTES, Wanted

ASKER = Asker("j", 3, TOKEN)
RANK = 1
STATE = b"the state of a rank"


def always() -> bool:
    return True


def left(directory: Path, theirs: Any, wanted: list[Wanted], asker: Asker = ASKER) -> str:
    """By host a; answers where."""
    ranges = [pb.StateRange(handle=one.source_handle, bytes=one.bytes) for one in wanted]
    name, count = SharedDirectory(directory, "a").write(asker, RANK, ranges, theirs, always)
    assert (directory / name).stat().st_size == count
    return PREFIX + name


def fetch(address: str, directory: Path | None, wanted: list[Wanted], ours: Any = None, **other: Any) -> Any:
    asker = Asker(other.get("job", "j"), other.get("generation", 3), other.get("token", TOKEN))
    ours = ours if ours is not None else empty(wanted)
    return fetch_shared(address, directory, other.get("rank", RANK), asker, wanted, ours)


def small(directory: Path) -> tuple[str, list[Wanted]]:
    wanted = [Wanted(1, len(STATE), (7,))]
    return left(directory, Buffers({1: bytearray(STATE)}), wanted), wanted


def test_buffers_of_all_sizes_arrive_as_they_were_and_leave_nothing(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    sizes = [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES - 5, *[7] * 300]
    theirs = Buffers({number: bytearray(chance.randbytes(size)) for number, size in enumerate(sizes, 1)})
    wanted = [Wanted(n, size, (10**5 * n, 10**5 * n + 1)) for n, size in enumerate(sizes, 1)]
    chance.shuffle(wanted)
    ours = empty(wanted)
    assert fetch(left(tmp_path, theirs, wanted), tmp_path, wanted, ours) == (2 * sum(sizes), [])
    for handle, content in ours.contents.items():
        assert content == theirs.contents[handle // 10**5], handle
    assert os.listdir(tmp_path) == []


def test_content_that_is_not_there_is_told_of_once(tmp_path: Path) -> None:
    wanted = [Wanted(1, 2 * CHUNK_BYTES, (7, 8)), Wanted(2, 5, (9,))]
    theirs = Buffers({1: bytearray(2 * CHUNK_BYTES), 2: bytearray(b"there")})
    theirs.gone = {1}
    ours = empty(wanted)
    assert fetch(left(tmp_path, theirs, wanted), tmp_path, wanted, ours) == (5, [7, 8])
    assert ours.gone == {7, 8} and ours.contents[9] == b"there"


# ------------------------------------------------------------------ who may
def test_nobody_else_can_read_what_lies_there(tmp_path: Path) -> None:
    address, _ = small(tmp_path)
    file = tmp_path / address.removeprefix(PREFIX)
    assert STATE not in file.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "other",
    [{"token": b"x" * 32}, {"token": b""}, {"job": "k"}, {"rank": 0}, {"generation": 2}, {"generation": 4}],
    ids=str,
)
def test_what_was_written_for_something_else_is_refused(other: dict[str, Any], tmp_path: Path) -> None:
    address, wanted = small(tmp_path)
    with pytest.raises(StateNotFetched, match="not as it was written, or not of this recovery"):
        fetch(address, tmp_path, wanted, **other)


def test_a_file_under_the_name_of_another_one_is_refused(tmp_path: Path) -> None:
    (mine, wanted), (other, _) = small(tmp_path), small(tmp_path)
    (tmp_path / mine.removeprefix(PREFIX)).rename(tmp_path / other.removeprefix(PREFIX))
    with pytest.raises(StateNotFetched, match="not of this recovery"):
        fetch(other, tmp_path, wanted)


def test_only_a_file_that_nobody_else_can_touch_is_opened(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(STATE)
    wanted = [Wanted(1, 5, (7,))]
    for make, why in (
        (lambda path: path.symlink_to(elsewhere), "Too many levels of symbolic links"),
        (lambda path: os.mkfifo(path, 0o600), "not a file that only this user can write"),
        (lambda path: path.mkdir(0o700), "not a file|Is a directory"),
        (
            lambda path: (path.write_bytes(STATE), path.chmod(0o620)),
            "not a file that only this user can write",
        ),
        (lambda path: None, "No such file or directory"),
    ):
        name = new_name("a")
        make(tmp_path / name)
        with pytest.raises(
            StateNotFetched, match=f"the state of rank 1 could not be had from .*{name}: .*{why}"
        ):
            fetch(PREFIX + name, tmp_path, wanted)
    assert elsewhere.read_bytes() == STATE


def test_an_address_that_leads_elsewhere_and_a_host_without_such_storage_are_told(tmp_path: Path) -> None:
    for name in ("", "../a", "/etc/passwd", "a.1.2-x.state", new_name("a") + "/", "../" + new_name("a")):
        with pytest.raises(StateNotFetched, match="is no file of state on shared storage"):
            fetch(PREFIX + name, tmp_path, [])
    with pytest.raises(StateNotFetched, match="this host has no --shared-directory"):
        fetch(PREFIX + new_name("a"), None, [])


# ------------------------------------------------------------------ what comes
def records_of(content: bytes) -> list[bytes]:
    found = []
    while content:
        (count,) = struct.unpack_from("<I", content)
        found.append(content[: 4 + count])
        content = content[4 + count :]
    return found


def test_a_file_that_was_changed_in_any_place_is_refused(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    wanted = [Wanted(1, 2 * CHUNK_BYTES, (7,)), Wanted(2, 9, (8,))]
    theirs = Buffers({1: bytearray(chance.randbytes(2 * CHUNK_BYTES)), 2: bytearray(b"the other")})
    whole = (tmp_path / left(tmp_path, theirs, wanted).removeprefix(PREFIX)).read_bytes()
    records = records_of(whole)
    assert len(records) == 3

    def flipped(place: int) -> bytes:
        return whole[:place] + bytes([whole[place] ^ 1 << chance.randrange(8)]) + whole[place + 1 :]

    changes = [flipped(chance.randrange(len(whole))) for _ in range(30)]
    changes += [flipped(place) for place in range(5)]
    changes += [whole[: chance.randrange(len(whole))] for _ in range(30)]
    changes += [b"", b"\xff" * 40, records[1] + records[0] + records[2], records[0] * 2 + records[2]]
    changes += [records[0] + records[2], struct.pack("<I", 0) + whole]
    for number, changed in enumerate(changes):
        address = left(tmp_path, theirs, wanted)
        (tmp_path / address.removeprefix(PREFIX)).write_bytes(changed)
        with pytest.raises(StateNotFetched, match=r"ends too soon|not as it was written|not what was asked"):
            fetch(address, tmp_path, wanted)
            pytest.fail(f"change {number} was not seen")


def test_what_was_written_in_another_order_than_is_asked_for_is_refused(tmp_path: Path) -> None:
    wanted = [Wanted(1, 5, (7,)), Wanted(2, 5, (8,))]
    theirs = Buffers({1: bytearray(b"first"), 2: bytearray(b"other")})
    with pytest.raises(StateNotFetched, match="it is not what was asked for"):
        fetch(left(tmp_path, theirs, wanted[::-1]), tmp_path, wanted)
    with pytest.raises(StateNotFetched, match="it ends too soon"):
        fetch(left(tmp_path, theirs, wanted[:1]), tmp_path, wanted)


# ------------------------------------------------------------------ what is left
def test_what_is_not_read_goes_when_the_recovery_is_over(tmp_path: Path) -> None:
    directory = SharedDirectory(tmp_path, "a")
    ranges = [pb.StateRange(handle=1, bytes=len(STATE))]
    for _ in range(2):
        directory.write(ASKER, RANK, ranges, Buffers({1: bytearray(STATE)}), always)
    assert len(os.listdir(tmp_path)) == 2
    directory.forget()
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_told_and_nothing_is_left_on_it(tmp_path: Path) -> None:
    size = 4 * CHUNK_BYTES
    with tiny_file_system(tmp_path, "1M") as tiny:
        with pytest.raises(StateNotWritten, match=r"rank 1 cannot be written to .*: No space left on device"):
            left(tiny, Buffers({1: bytearray(size)}), [Wanted(1, size, (7,))])
        assert os.listdir(tiny) == []


def test_a_directory_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(StateNotWritten, match="No such file or directory"):
        small(tmp_path / "gone")


class Refusing(Buffers):
    """As an executor that runs."""

    def read_state(self, handle: int, offset: int, count: int) -> bytes:
        raise RuntimeError("the executor is not parked")


def test_what_the_executor_refuses_or_nobody_wants_any_more_is_told_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    with pytest.raises(StateNotWritten, match="rank 1 cannot be written: the executor is not parked"):
        left(tmp_path, Refusing({1: bytearray(5)}), [Wanted(1, 5, (7,))])
    with pytest.raises(StateNotWritten, match="buffer 1 is not that large"):
        left(tmp_path, Buffers({1: bytearray(5)}), [Wanted(1, 6, (7,))])
    answers = iter([True, False])
    ranges = [pb.StateRange(handle=1, bytes=2 * CHUNK_BYTES)]
    with pytest.raises(StateNotWritten, match="nobody waits for it any more"):
        SharedDirectory(tmp_path, "a").write(
            ASKER, RANK, ranges, Buffers({1: bytearray(2 * CHUNK_BYTES)}), lambda: next(answers)
        )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("how", ["at the next start", "by the next who writes"])
def test_what_dead_processes_of_this_host_left_is_removed_and_nothing_else(how: str, tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    tag = "0" * 32
    dead, reused, others = (
        f"a.{child}.5-{tag}.state",
        f"a.{os.getpid()}.5-{tag}.state",
        f"b.{child}.5-{tag}.state",
    )
    keeps = sorted([new_name("a"), others, "notes.txt", f"a.{child}.5-{tag}.state.bak"])
    for name in (dead, reused, *keeps):
        (tmp_path / name).touch()
    if how == "at the next start":
        clear_leftovers(tmp_path, "a")
    else:
        address, _ = small(tmp_path)
        (tmp_path / address.removeprefix(PREFIX)).unlink()
    assert sorted(os.listdir(tmp_path)) == keeps
