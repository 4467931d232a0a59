"""Small blocks of memory that a device server's thread keeps: nobody else's, never too small, never lost."""

from __future__ import annotations

import subprocess
from operator import attrgetter

import pytest
from compiled_programs import program
from executor_harness import FLOAT, OPERATOR, Harness, vector
from mistakes import Mistake, mistakes_of

BLOCKS = "kept_blocks"
LENGTH = 16  # floats: a block of 64 bytes


def kept_blocks(name: str, rounds: int, seed: int) -> subprocess.CompletedProcess[str]:
    words = [str(program(name)), str(rounds), str(seed)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def test_a_block_is_its_owners_alone_whoever_frees_it(seed: int) -> None:
    found = kept_blocks(BLOCKS, 100_000, seed)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
    assert found.stdout == "100000 rounds, 0 wrong\n"


@pytest.mark.parametrize("mistake", mistakes_of(BLOCKS), ids=attrgetter("name"))
def test_blocks_that_are_kept_wrongly_are_found_out(mistake: Mistake, seed: int) -> None:
    found = kept_blocks(mistake.built, 20_000, seed)
    assert found.returncode != 0
    assert mistake.violation in found.stdout + found.stderr, found.stdout[-2000:] + found.stderr[-4000:]


def test_a_result_that_nobody_has_written_holds_nothing_of_a_block_that_was_kept() -> None:
    # aten::empty: sizes, then dtype, layout, device, pin_memory, memory_format; a fresh result
    key = [12 | 1 << 8, LENGTH, 6, FLOAT, 0, 10, 0, 0]
    outputs = [1 | 1 << 8, FLOAT << 8 | 1 << 16, 0, 4 * LENGTH, LENGTH, 1]
    with Harness() as h:
        handles = range(1, 33)
        for handle in handles:
            h.new(handle, [7.0] * LENGTH)
        assert h.read(1, LENGTH) == (7.0,) * LENGTH
        for handle in handles:
            h.writer.free_later(handle)
        empty = h.template("aten::empty.memory_format", key, outputs)
        for handle in range(101, 133):
            h.writer.append(OPERATOR, empty, [handle])
        for handle in range(101, 133):
            assert h.read(handle, LENGTH) == (0.0,) * LENGTH


def test_a_result_lies_where_what_was_freed_lay_and_has_its_own_content() -> None:
    add = [*vector(LENGTH), *vector(LENGTH), 17, 0x3FF0000000000000]
    outputs = [1 | 1 << 8, FLOAT << 8 | 1 << 16, 0, 4 * LENGTH, LENGTH, 1]
    with Harness() as h:
        h.new(1, [1.0] * LENGTH)
        h.new(2, [2.0] * LENGTH)
        sum_of = h.template("aten::add.Tensor", add, outputs)
        for number in range(300):  # more than are kept, some alive at a time
            h.writer.append(OPERATOR, sum_of, [1000 + number - 1 if number else 1, 2, 1000 + number])
            if number >= 80:
                h.writer.free_later(1000 + number - 80)
        for number in range(220, 300):
            assert h.read(1000 + number, LENGTH) == (1.0 + 2.0 * (number + 1),) * LENGTH
