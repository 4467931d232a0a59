"""The rewind rules (design section 6), over byte strings: no process, no PyTorch."""

from __future__ import annotations

import random
from typing import Any

import pytest

from understudy.replay import ByteTable, RewindError


def table_at_commit_one(**contents: bytes) -> ByteTable:
    table = ByteTable()
    for name, content in contents.items():
        table.create(ord(name), content)
    table.commit()
    return table


def test_a_state_buffer_written_since_the_commit_gets_its_content_back() -> None:
    table = table_at_commit_one(a=b"old")
    table.write(ord("a"), b"new")
    table.rewind(1)
    assert table.read(ord("a")) == b"old"


def test_a_transient_buffer_is_forgotten() -> None:
    table = table_at_commit_one(a=b"state")
    table.create(ord("t"), b"transient")
    table.rewind(1)
    assert table.handles() == [ord("a")]


def test_a_state_buffer_freed_after_it_was_read_comes_back_with_its_content() -> None:
    table = table_at_commit_one(a=b"batch")
    table.read(ord("a"))
    table.free(ord("a"))
    table.rewind(1)
    assert table.read(ord("a")) == b"batch"


def test_a_state_buffer_freed_unread_comes_back_in_name_only() -> None:
    table = table_at_commit_one(a=b"gradient")
    table.free(ord("a"))
    assert table.undo_bytes == 0
    table.rewind(1)
    assert table.handles() == [ord("a")]
    with pytest.raises(RewindError, match="was not kept"):
        table.read(ord("a"))
    table.free(ord("a"))  # what replay does with it


def test_a_buffer_freed_unread_is_kept_when_an_older_commit_may_still_read_it() -> None:
    table = table_at_commit_one(a=b"metric")
    table.read(ord("a"))
    table.commit()
    table.free(ord("a"))  # unread since commit 2, but a rewind to commit 1 reads it
    table.rewind(1)
    assert table.read(ord("a")) == b"metric"


def test_a_buffer_may_be_resized_and_rewound() -> None:
    table = table_at_commit_one(a=b"four")
    table.replace(ord("a"), b"much longer")
    table.rewind(1)
    assert table.read(ord("a")) == b"four"
    assert table.live_bytes == 4


def test_a_handle_given_again_names_its_former_buffer_after_a_rewind() -> None:
    table = table_at_commit_one(a=b"old")
    table.write(ord("a"), b"new")
    table.free(ord("a"))
    table.create(ord("a"), b"another")
    table.commit()
    table.free(ord("a"))
    table.create(ord("a"), b"and another")
    table.rewind(1)
    assert table.read(ord("a")) == b"old"
    assert (table.live_bytes, table.undo_bytes) == (3, 0)


def test_several_epochs_are_undone_in_order() -> None:
    table = table_at_commit_one(a=b"1")
    for step in (b"2", b"3", b"4"):
        table.write(ord("a"), step)
        table.write(ord("a"), step + b"'")
        table.commit()
    table.rewind(2)
    assert table.read(ord("a")) == b"2'"
    table.rewind(1)
    assert table.read(ord("a")) == b"1"


def test_what_the_floor_released_is_out_of_reach_and_costs_nothing() -> None:
    table = table_at_commit_one(a=b"1")
    table.write(ord("a"), b"2")
    table.commit()
    table.release(2)
    assert table.undo_bytes == 0
    with pytest.raises(RewindError, match="out of reach"):
        table.rewind(1)


def test_a_phase_without_pre_images_puts_earlier_commits_out_of_reach() -> None:
    table = table_at_commit_one(a=b"1")
    table.preimages(False)
    table.write(ord("a"), b"2")
    assert table.oldest > table.epoch
    with pytest.raises(RewindError, match="out of reach"):
        table.rewind(1)
    table.preimages(True)
    table.commit()
    table.write(ord("a"), b"3")
    table.rewind(2)
    assert table.read(ord("a")) == b"2"


def test_an_unprotected_rank_keeps_nothing() -> None:
    table = ByteTable()
    table.protect(False)
    table.create(1, b"x")
    table.commit()
    table.write(1, b"y")
    assert table.undo_bytes == 0
    with pytest.raises(RewindError):
        table.rewind(1)


def test_unknown_and_doubly_created_handles_are_refused() -> None:
    table = ByteTable()
    table.create(1, b"x")
    with pytest.raises(RewindError, match="created twice"):
        table.create(1, b"y")
    for broken in (lambda: table.read(2), lambda: table.write(2, b""), lambda: table.free(2)):
        with pytest.raises(RewindError):
            broken()


def mix(a: bytes, b: bytes) -> bytes:
    return bytes((x * 31 + y + 7) % 256 for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("seed", range(200))
def test_any_history_rewinds_to_any_commit_in_reach_and_replays_to_the_same_state(seed: int) -> None:
    """Random programs: after a rewind the same operations give the same contents, at every step."""
    rng = random.Random(seed)
    table = ByteTable()
    alive: set[int] = set()
    next_handle = 1
    program: list[tuple[Any, ...]] = []
    commits = {0: 0}  # commit -> length of the program there
    floor = 0

    def run(operation: tuple[Any, ...]) -> None:
        match operation:
            case ("create", handle, content):
                table.create(handle, content)
            case ("mix", target, source):  # reads both, writes one: content depends on history
                table.write(target, mix(table.read(target), table.read(source)))
            case ("free", handle):
                table.free(handle)
            case ("commit",):
                table.commit()

    def state() -> dict[int, bytes]:
        return {handle: table.read(handle) for handle in sorted(alive)}

    operation: tuple[Any, ...]
    for _ in range(120):
        choice = rng.random()
        if choice < 0.3 or not alive:
            operation = ("create", next_handle, rng.randbytes(8))
            alive.add(next_handle)
            next_handle += 1
        elif choice < 0.7:
            operation = ("mix", rng.choice(sorted(alive)), rng.choice(sorted(alive)))
        elif choice < 0.85:
            handle = rng.choice(sorted(alive))
            alive.discard(handle)
            operation = ("free", handle)
        else:
            operation = ("commit",)
        run(operation)
        program.append(operation)
        if operation == ("commit",):
            commits[table.epoch] = len(program)
            if rng.random() < 0.3:
                floor = rng.randint(floor, table.epoch)
                table.release(floor)
        if rng.random() < 0.08:
            target = rng.randint(table.oldest, table.epoch)
            table.rewind(target)
            for again in program[commits[target] :]:
                run(again)
    reference = ByteTable()
    for step in program:
        match step:
            case ("create", handle, content):
                reference.create(handle, content)
            case ("mix", target, source):
                reference.write(target, mix(reference.read(target), reference.read(source)))
            case ("free", handle):
                reference.free(handle)
            case ("commit",):
                reference.commit()
    assert state() == {handle: reference.read(handle) for handle in sorted(alive)}
    assert table.live_bytes == reference.live_bytes


def test_a_write_that_is_tried_again_behind_a_failed_copy_is_undone_too() -> None:
    table = table_at_commit_one(a=b"old", b=b"small")
    table.fail_copies(True)
    with pytest.raises(MemoryError):
        table.write(ord("a"), b"new")
    table.fail_copies(False)
    table.write(ord("a"), b"newer")
    table.rewind(1)
    assert table.read(ord("a")) == b"old"


def test_where_there_is_no_room_for_a_copy_the_program_goes_on_and_the_commit_is_out_of_reach() -> None:
    table = table_at_commit_one(a=b"1234", b=b"1", c=b"12", d=b"1")
    for name in "cd":
        table.read(ord(name))
    table.write(ord("b"), b"2")
    table.free(ord("c"))
    table.limit_copies(2)
    table.write(ord("a"), b"5678")
    assert (table.read(ord("a")), table.undo_bytes, table.oldest) == (b"5678", 0, 2)
    table.write(ord("b"), b"3")
    table.free(ord("d"))
    assert table.undo_bytes == 0
    with pytest.raises(RewindError, match="out of reach"):
        table.rewind(1)
    table.limit_copies(100)
    assert table.commit() == 2
    table.write(ord("a"), b"9999")
    table.free(ord("b"))
    table.rewind(2)
    assert (table.read(ord("a")), sorted(table.handles())) == (b"5678", [ord("a"), ord("b")])
