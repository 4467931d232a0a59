"""A program that shows a difference, made as small as it can be while it still does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from programs import Program


def shrunk(program: Program, differs: Callable[[Program], bool]) -> Program:
    """By leaving out pieces, steps, and lines of steps and of setups, as long as anything can be left out."""
    best = program
    while (
        less := next((one for one in _smaller(best) if _compiles(one) and differs(one)), None)
    ) is not None:
        best = less
    return best


def _smaller(program: Program) -> Iterator[Program]:
    """Those that lack one thing, what is most first."""
    pieces = program.pieces
    if len(pieces) > 2:
        yield from (replace(program, pieces=(piece,)) for piece in pieces)
    if len(pieces) > 1:
        yield from (replace(program, pieces=pieces[:at] + pieces[at + 1 :]) for at in range(len(pieces)))
    yield from (replace(program, steps=steps) for steps in (1, 2, 3, 5) if steps < program.steps)
    for at, piece in enumerate(pieces):
        fewer = [replace(piece, step=lines) for lines in _lacking_one(piece.step) if lines]
        fewer += [replace(piece, setup=lines) for lines in _lacking_one(piece.setup)]
        fewer += [replace(piece, final=lines) for lines in _lacking_one(piece.final)]
        yield from (replace(program, pieces=(*pieces[:at], less, *pieces[at + 1 :])) for less in fewer)


def _lacking_one(lines: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (lines[:at] + lines[at + 1 :] for at in range(len(lines)))


def _compiles(program: Program) -> bool:
    try:
        compile(program.source(), "script", "exec")
    except SyntaxError:
        return False
    return True
