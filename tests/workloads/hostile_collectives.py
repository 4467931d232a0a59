"""Records of collectives that make no sense, as a hostile worker would write them, to a device server whose
calls of NCCL are our own; prints how each of them is refused.

With SIMULATED_CUDA_LIBRARY in the environment, which names it; argv[2] is "own" (simulated_member.py).
"""

import os
from collections.abc import Sequence

from simulated_member import COMMUNICATOR, Member

from executor_harness import COLLECTIVE, FLOAT, GROUP_BEGIN, GROUP_END, LONG  # isort: skip - behind the device

(BROADCAST, ALL_REDUCE, REDUCE, ALL_GATHER, ALL_GATHER_BASE, GATHER, SCATTER, REDUCE_SCATTER,
 REDUCE_SCATTER_BASE, ALL_TO_ALL_BASE, ALL_TO_ALL, _, SEND, RECEIVE, RECEIVE_ANY) = range(15)  # fmt: skip
SHORT, BAND, SUM = 2, 5, 0
OURS, THEIRS = 0, 1
"""Ranks."""
Tensor = list[int]


def tensor(length: int, of_type: int = FLOAT, buffer: int = 2) -> Tensor:
    """Of a buffer of 16 floats."""
    return [1 | of_type << 8 | 1 << 16, buffer, 0, length, 1]


def number() -> Tensor:
    """Without a dimension that could be split."""
    return [1 | FLOAT << 8, 2, 0]


Record = tuple[int, Sequence[Tensor], Sequence[Tensor], dict[str, int], Sequence[int]]


def record(
    kind: int, inputs: Sequence[Tensor] = (), outputs: Sequence[Tensor] = (), *splits: int, **header: int
) -> Record:
    return kind, inputs, outputs, header, splits


FOUR, TWO, OTHER = tensor(4), tensor(2), tensor(2, LONG)  # the last two are no floats
FOUR_OTHERS = tensor(4, LONG)
RECORDS: dict[str, Record] = {
    "broadcast of none": record(BROADCAST),
    "broadcast of two": record(BROADCAST, (), [FOUR, FOUR]),
    "broadcast from nobody": record(BROADCAST, (), [FOUR], peer=2),
    "all-reduce of none": record(ALL_REDUCE),
    "all-reduce of shorts": record(ALL_REDUCE, (), [tensor(4, SHORT)]),
    "all-reduce of bits": record(ALL_REDUCE, (), [FOUR_OTHERS], reduction=BAND),
    "all-reduce in no way": record(ALL_REDUCE, (), [FOUR], reduction=99),
    "all-reduce of too much": record(ALL_REDUCE, (), [tensor(17)]),
    "all-reduce of no buffer": record(ALL_REDUCE, (), [tensor(4, buffer=99)]),
    "reduce of two": record(REDUCE, (), [FOUR, FOUR]),
    "reduce to nobody": record(REDUCE, (), [FOUR], peer=1 << 40),
    "all-gather into one": record(ALL_GATHER, [FOUR], [FOUR]),
    "all-gather of two": record(ALL_GATHER, [FOUR, FOUR], [FOUR] * 4),
    "all-gather into less": record(ALL_GATHER, [FOUR], [TWO, FOUR]),
    "all-gather into others": record(ALL_GATHER, [FOUR], [FOUR, FOUR_OTHERS]),
    "all-gather into a piece too small": record(ALL_GATHER_BASE, [FOUR], [FOUR]),
    "all-gather into a piece of others": record(ALL_GATHER_BASE, [TWO], [FOUR_OTHERS]),
    "gather of none": record(GATHER, [], [FOUR, FOUR]),
    "gather into none": record(GATHER, [FOUR]),
    "gather into three": record(GATHER, [FOUR], [FOUR] * 3),
    "gather into less": record(GATHER, [FOUR], [TWO, FOUR]),
    "gather into others": record(GATHER, [FOUR], [FOUR, FOUR_OTHERS]),
    "gather to nobody": record(GATHER, [FOUR], peer=2),
    "scatter from none": record(SCATTER, [], [FOUR]),
    "scatter into none": record(SCATTER, [FOUR, FOUR], []),
    "scatter into more": record(SCATTER, [TWO, TWO], [FOUR]),
    "scatter into others": record(SCATTER, [FOUR, FOUR], [FOUR_OTHERS]),
    "reduce-scatter of one": record(REDUCE_SCATTER, [FOUR], [FOUR]),
    "reduce-scatter into more": record(REDUCE_SCATTER, [TWO, FOUR], [FOUR]),
    "reduce-scatter into others": record(REDUCE_SCATTER, [FOUR, FOUR], [FOUR_OTHERS]),
    "reduce-scatter of a piece too small": record(REDUCE_SCATTER_BASE, [FOUR], [FOUR]),
    "reduce-scatter of a piece of others": record(REDUCE_SCATTER_BASE, [FOUR_OTHERS], [TWO]),
    "all-to-all in odd parts": record(ALL_TO_ALL_BASE, [tensor(3)], [FOUR]),
    "all-to-all of a number": record(ALL_TO_ALL_BASE, [number()], [number()]),
    "all-to-all into less": record(ALL_TO_ALL_BASE, [FOUR], [TWO]),
    "all-to-all into others": record(ALL_TO_ALL_BASE, [FOUR], [FOUR_OTHERS]),
    "all-to-all in parts of more": record(ALL_TO_ALL_BASE, [FOUR], [FOUR], 3, 3, 2, 2),
    "all-to-all in a part": record(ALL_TO_ALL_BASE, [FOUR], [FOUR], 4, 4),
    "all-to-all in parts without end": record(ALL_TO_ALL_BASE, [FOUR], [FOUR], *[1 << 63] * 4),
    "all-to-all of one": record(ALL_TO_ALL, [FOUR], [FOUR]),
    "all-to-all with less for itself": record(ALL_TO_ALL, [FOUR, FOUR], [TWO, FOUR]),
    "all-to-all with others for itself": record(ALL_TO_ALL, [FOUR, FOUR], [FOUR_OTHERS, FOUR]),
    "message to itself": record(SEND, [FOUR], peer=OURS),
    "message from itself": record(RECEIVE, [], [FOUR], peer=OURS),
    "message to nobody": record(SEND, [FOUR], peer=2),
    "message from anybody": record(RECEIVE_ANY, [], [FOUR, tensor(1, LONG)]),
    "messages of two": record(SEND, [FOUR, FOUR], peer=THEIRS, together=1),
    "messages of none": record(RECEIVE, [], [], peer=THEIRS, together=1),
    "unknown": record(17),
}  # fmt: skip


def write(h: Member, of: Record) -> None:
    kind, inputs, outputs, header, splits = of
    words = [kind, header.get("reduction", SUM), header.get("peer", OURS), 0, 1, len(inputs), len(outputs)]
    body = [word for one in (*inputs, *outputs) for word in one]

    def mark(group: int) -> None:
        if "together" in header:
            h.writer.append(COLLECTIVE, COMMUNICATOR, [group, *[0] * 7])

    mark(GROUP_BEGIN)
    h.writer.append(COLLECTIVE, COMMUNICATOR, [*words, len(splits), *body, *splits])
    mark(GROUP_END)


for name, one in RECORDS.items():
    with Member() as h:
        h.new(2, [0.0] * 16)
        h.all_reduce()
        h.other_comes()  # and needs this rank no more: it would block a stream that the next one is given
        h.synchronize()
        write(h, one)
        try:
            h.run_all()
            h.synchronize()
            answer = "taken"
        except (RuntimeError, AssertionError) as problem:
            answer = str(problem)
        print(f"{name}: {answer}", flush=True)
os._exit(0)  # the other ranks may still wait
