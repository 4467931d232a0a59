"""Random programs (odd/): a sample of what `make odd` runs in full, and the campaign's own parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pieces import MAKERS, Piece
from programs import Program, generate
from shrinking import shrunk
from trials import Difference, Trial

pytestmark = pytest.mark.drawn(5)

SAMPLE = (20000, 20001, 20003, 20011)
"""New programs are the campaign's: what it finds is mended, and not met by whoever runs the tests."""


def piece(*step: str, setup: tuple[str, ...] = ()) -> Piece:
    return Piece("made", setup, step)


@pytest.mark.parametrize("number", SAMPLE)
def test_a_random_program_sees_what_it_sees_without_us(number: int, tmp_path: Path) -> None:
    program = generate(number)
    print(program.source())
    trial = Trial(program, tmp_path)
    assert [one.told() for one in (trial.undisturbed(), trial.faulted(0)) if one] == []
    assert trial.struck == 1


@pytest.mark.drawn(1)
def test_every_kind_of_piece_is_source_that_compiles_and_a_seed_gives_one_program() -> None:
    kinds: set[str] = set()
    for number in range(300):
        program = generate(number)
        compile(program.source(), "script", "exec")
        assert program == generate(number)
        kinds |= {one.kind for one in program.pieces}
    assert kinds == MAKERS.keys()


@pytest.mark.drawn(2)
def test_what_a_program_sees_differently_is_found(tmp_path: Path) -> None:
    """`on_device` is what must not matter."""
    program = Program(0, 1, 2, (piece("say(step, 7)", "say(step, on_device)"),))
    found = Trial(program, tmp_path).undisturbed()
    assert isinstance(found, Difference)
    assert (found.rank, found.place, found.native, found.ours) == (0, 2, "1 False", "1 True")


@pytest.mark.drawn(1)
def test_a_program_that_differs_is_made_as_small_as_it_can_be() -> None:
    def differs(program: Program) -> bool:
        lines = [line for one in program.pieces for line in one.step]
        return "b()" in lines and program.steps >= 2

    pieces = piece("a()", "b()", "c()", setup=("x = 1",)), piece("d()"), piece("if e():", "    f()")
    large = Program(0, 2, 12, pieces)
    least = shrunk(large, differs)
    assert least == replace(large, steps=2, pieces=(piece("b()"),))
