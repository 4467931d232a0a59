"""Random programs: chosen by a seed, written out as a script that runs natively and on the device."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import operator_pieces  # noqa: F401 - their makers
import process_pieces  # noqa: F401
import tensor_pieces  # noqa: F401
import training_pieces  # noqa: F401
from pieces import MAKERS, Piece

WORKLOADS = Path(__file__).resolve().parent.parent / "tests" / "workloads" / "odd"
ALONE = 0.4
"""So many programs have one rank."""
REFUSED = "REFUSED"
"""In a line: what the README says that the virtual device does not do."""

HEAD = """\
import sys
sys.path.insert(0, {workloads!r})
import torch
import torch.distributed as dist
from odd_program import begin, device, on_device, rank, say, world


def caught(step, error):
    refused = isinstance(error, NotImplementedError) and "virtual device" in str(error)
    say(step, "{refused} " + str(error).splitlines()[0] if refused else type(error).__name__)


begin()
"""
TAIL = """\
pieces = [{pieces}]
for piece in pieces:
    next(piece)
for step in range(1, {steps} + 1):
    for piece in pieces:
        piece.send(step)
for piece in pieces:
    piece.send(None)
say("end")
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Program:
    """`source` is all there is to it; the rest is for whoever makes it smaller."""

    seed: int
    ranks: int
    steps: int
    pieces: tuple[Piece, ...]

    def source(self) -> str:
        """Runs as `script FOLDER`, see odd_program.py."""
        written = [_function(number, piece) for number, piece in enumerate(self.pieces)]
        calls = ", ".join(f"piece{number}()" for number in range(len(self.pieces)))
        head = HEAD.format(workloads=str(WORKLOADS), refused=REFUSED)
        return "\n\n".join([head, *written, TAIL.format(pieces=calls, steps=self.steps)])


def _function(number: int, piece: Piece) -> str:
    """A generator, in whose variables the piece's state lives."""
    lines = [f"def piece{number}():  # {piece.kind}", *_indented(piece.setup, 1), "    while True:"]
    lines += ["        step = yield", "        try:", "            if step is None:"]
    lines += [*_indented(piece.final or ("pass",), 4), "            else:", *_indented(piece.step, 4)]
    lines += ["        except Exception as error:", "            caught(step, error)"]
    return "\n".join(lines)


def _indented(lines: tuple[str, ...], depth: int) -> list[str]:
    return ["    " * depth + line for line in lines]


def generate(seed: int) -> Program:
    """The program of a seed."""
    chance = random.Random(seed)
    ranks = 1 if chance.random() < ALONE else 2
    kinds = sorted(MAKERS)
    pieces: list[Piece] = []
    for _ in range(chance.randint(2, 6)):
        piece = MAKERS[chance.choice(kinds)](chance)
        if piece.ranks <= ranks:
            pieces.append(piece)
    if not any(piece.kind in ("training", "data_parallel") for piece in pieces) and chance.random() < 0.8:
        pieces.append(MAKERS["training"](chance))
    if not pieces:
        pieces.append(MAKERS["tensor"](chance))
    chance.shuffle(pieces)
    return Program(seed, ranks, chance.randint(5, 12), tuple(pieces))
