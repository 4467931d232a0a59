"""`recoveryctl log dump`: what it tells of records and buffers, of a log that anybody may have written."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from executor_harness import (
    ALLOCATE,
    COLLECTIVE,
    COMMIT,
    DEVICE_TO_HOST,
    FREE,
    HOST_TO_DEVICE,
    OPERATOR,
    OPERATOR_SYNC,
    PHASE,
    RESIZE,
    Harness,
    double,
    vector,
)

from understudy.recovery.commands import log as log_commands
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY
from understudy.recovery.text.log_text import Buffers, Origin, lines, log_table, sentence, state_names
from understudy.recovery.text.tables import make_console
from understudy.replay import Log, LogError, LogFiller, LogWalk, LogWriter, copy_records, create_log

ALL = 1 << 62
HANDLES_OF_A_SYNC_CALL = 1024
"""replay/csrc/log/handles.h"""
SIZES = {"segment_bytes": 4 << 20, "segment_count": 8, "dictionary_bytes": 4 << 20, "reply_bytes": 1 << 16,
         "shadow_bytes": 1 << 20}  # fmt: skip
Row = dict[str, Any]


class Written:
    """A log that nobody runs."""

    def __init__(self, directory: str) -> None:
        create_log(directory, **SIZES, proxyd_pid=os.getpid())
        self.directory = directory
        self.log, self.writer = Log(directory), LogWriter(directory)

    def operator(self, name: str, key: list[int], body: list[int], outputs: list[int] | None = None) -> None:
        self.writer.append(OPERATOR, self.writer.put_template(name, key, outputs or []), body)

    def rows(self, first: int = 0, end: int = ALL) -> list[Row]:
        return LogWalk(self.log).rows(first, end, ALL)

    def told(self, first: int = 0, end: int = ALL, state: dict[int, str] | None = None) -> list[str]:
        """The sentences below a table of these records."""
        walk = LogWalk(self.log)
        return log_commands.buffer_lines(walk.rows(first, end, ALL), walk, state or {})


@pytest.fixture
def written() -> Iterator[Written]:
    directory = tempfile.mkdtemp(prefix="understudy-test-", dir=SHARED_MEMORY)
    yield Written(directory)
    shutil.rmtree(directory)


def fresh(*sizes: int, dtype: int = 6) -> list[int]:
    """Output words of one new tensor."""
    return [1 | 1 << 8, dtype << 8 | len(sizes) << 16, 0, 4096, *sizes, *([1] * len(sizes))]


def named(row: Row) -> list[tuple[int, str, tuple[int, ...]]]:
    return [(use["handle"], use.get("type", ""), tuple(use.get("size", ()))) for use in row["buffers"]]


# ------------------------------------------------------------------ who made what
def test_a_buffer_is_told_with_its_type_its_size_who_made_it_and_since_when_it_is_gone(
    written: Written,
) -> None:
    written.writer.append(ALLOCATE, 1, [128])
    written.operator("aten::mm", [*vector(8), *vector(8)], [1, 1, 2], fresh(4, 8))
    written.operator("aten::relu", [1 | 6 << 8 | 2 << 16, 0, 4, 8, 8, 1], [2, 3], fresh(4, 8, dtype=15))
    written.writer.free_later(2)
    written.writer.append(FREE, 0, [])
    written.writer.append(PHASE, 1, [])
    assert written.told() == [
        "buffer 1 (float32 [8], made by record 0 allocate)",
        "buffer 2 (float32 [4, 8], made by record 1 aten::mm, gone since record 3)",
        "buffer 3 (bfloat16 [4, 8], made by record 2 aten::relu)",
    ]
    assert written.told(2, 3) == written.told()[1:], "also by records that are not shown"
    (second,) = written.rows(1, 2)
    assert [use["made_by"] for use in second["buffers"]] == [0, 0, 1]


def test_a_buffer_that_no_record_names_as_a_tensor_is_told_with_its_bytes(written: Written) -> None:
    written.writer.append(ALLOCATE, 1, [3072])
    written.writer.append(HOST_TO_DEVICE, 1, [0, 8, 77])
    written.writer.append(RESIZE, 1, [4096])
    assert written.told() == ["buffer 1 (3.0 KiB, made by record 0 allocate)"]
    assert written.told(2) == ["buffer 1 (4.0 KiB, made by record 0 allocate)"]


def test_results_of_a_call_that_was_waited_for_are_known_by_the_handles_set_aside_for_them(
    written: Written,
) -> None:
    for first in (1000, 5000):
        template = written.writer.put_template("aten::nonzero", vector(), [])
        written.writer.append(OPERATOR_SYNC, template, [0, 0, 7, first])
    last = 1000 + HANDLES_OF_A_SYNC_CALL - 1
    written.operator("aten::neg_", [*vector(), *vector(), *vector(), *vector()], [1000, last, last + 1, 5001])
    assert [use.get("made_by") for use in written.rows(2)[0]["buffers"]] == [0, 0, None, 1]
    assert "made by record 0 aten::nonzero" in written.told(2)[0]


def test_tensors_of_a_collective_are_named(written: Written) -> None:
    tensors = [w for h in (5, 6) for w in (1 | 7 << 8 | 2 << 16, h, 0, 3, 4, 4, 1)]
    written.writer.append(COLLECTIVE, 7, [1, 0, 0, 0, 9, 1, 1, 0, *tensors])
    (row,) = written.rows()
    assert (row["operator"], named(row)) == ("all-reduce", [(5, "float64", (3, 4)), (6, "float64", (3, 4))])


RAW = [1 | 4 << 8 | 1 << 16, 50, 0, 2, 1]
"""A dense tensor that is written out in a record: int64 [2] in buffer 50."""


@pytest.mark.parametrize(
    ("key", "values", "inside"),
    [
        ([0], [], 0),  # none
        ([2], [], 0),  # undefined
        ([3 | 6 << 8 | 1 << 16, 3], [1, 2], 0),  # three floats of the CPU, padded
        ([4 | 2 << 8, *vector(), 2], [50], 1),  # a list of tensors
        ([5 | 2 << 8, 2, *vector()], [50], 1),
        ([6, 12], [], 0),
        ([7], [double(0.5)], 0),
        ([8 | 1 << 8], [], 0),
        ([9 | 9 << 8, 1, 2], [], 0),  # nine letters
        ([10], [], 0),
        ([11], [3], 0),
        ([12 | 2 << 8, 1, 2], [], 0),
        ([13 | 3 << 8], [1, 2, 3], 0),
        ([14 | 2 << 8, 1, 0], [], 0),
        ([15 | 3 << 8, 6, 12, 7, 16], [1, 2, 3], 0),  # scalars
        ([16], [1, 2], 0),
        ([17, 5], [], 0),
        ([18], [], 0),
        ([19 | 6 << 8 | 2 << 16 | 1 << 24, 4, 4], [1, *RAW, *RAW], 2),
        ([20 | 6 << 8 | 2 << 16 | 2 << 24, 4, 4], [*RAW, *RAW, *RAW], 3),
        ([21 | 6 << 8 | 2 << 16], [2, *RAW, *range(10)], 1),  # two components of two dimensions
    ],
)
def test_what_lies_behind_an_argument_of_any_kind_is_read_where_it_is(
    written: Written, key: list[int], values: list[int], inside: int
) -> None:
    written.operator("aten::any", [*key, *vector(5)], [*values, 7, 8], fresh(6))
    (row,) = written.rows()
    assert "unreadable" not in row
    assert named(row)[inside:] == [(7, "float32", (5,)), (8, "float32", (6,))]
    assert [use["handle"] for use in row["buffers"][:inside]] == [50] * inside


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:.*quantize_per_tensor")
def test_element_types_have_the_numbers_and_sizes_that_pytorch_gives_them(written: Written) -> None:
    number_of = torch.jit.CompilationUnit("def f(x):\n  return x.dtype\n").f
    types = {d for name in dir(torch) if isinstance(d := getattr(torch, name), torch.dtype)}
    for dtype in sorted(types, key=str):
        number = number_of(torch.empty(0, dtype=dtype))
        host = [3 | number << 8 | 1 << 16, 8]  # eight elements of it, in words
        written.operator("aten::f", [*host, *vector(3, dtype=number)], [*([0] * dtype.itemsize), 7])
        row = written.rows()[-1]
        assert named(row) == [(7, str(dtype).removeprefix("torch."), (3,))]
    assert len(types) >= 40


# ------------------------------------------------------------------ what is not known is not made up
def test_a_log_that_does_not_begin_at_the_beginning_says_what_is_older(
    written: Written, folder: Path
) -> None:
    written.writer.append(PHASE, 0, [])
    begins = written.log.tail
    written.writer.append(DEVICE_TO_HOST, 4, [0, 0, 0, 16])
    content = copy_records(written.log, begins, written.log.tail)
    create_log(str(folder), **SIZES)
    later = Log(str(folder))
    filler = LogFiller(later, begins)
    filler.put_records(content)
    filler.finish([], 2)
    walk = LogWalk(later)
    rows = walk.rows(0, ALL, ALL)
    assert log_commands.buffer_lines(rows, walk, {}) == [
        "buffer 4 (16 B, older than record 1, where this log begins)"
    ]


def test_what_is_let_go_of_while_it_is_read_is_passed_over(seed: int) -> None:
    """A living log is read; nothing that took a record's place is taken for it."""
    chance = random.Random(seed)
    with Harness(protect=False, segment_count=2) as h:

        def step() -> None:
            h.writer.append(ALLOCATE, 2, [1 << 19])
            h.writer.append(HOST_TO_DEVICE, 2, [0, 1 << 19, *([0] * (1 << 16))])
            h.writer.free_later(2)
            h.commit()

        step()
        walk, met = LogWalk(h.log), []
        met += walk.rows(0, ALL, 1)
        for _ in range(40):  # 20 MB through a log of 8 MB
            step()
        h.synchronize()
        assert h.log.freed_segments >= 3
        met += walk.rows(0, ALL, ALL)
        assert [row["index"] for row in met] == [0], "it ends where the log ended that it was of"
        for _ in range(20):
            walk = LogWalk(h.log)
            begins = walk.rows(0, ALL, chance.randrange(1, 4))
            step()
            rest = walk.rows(0, ALL, ALL)
            indexes = [row["index"] for row in [*begins, *rest]]
            assert indexes == sorted(set(indexes))
            assert {row["kind"] for row in rest} <= {"allocate", "host-to-device", "commit", "synchronize"}


def test_a_record_whose_arguments_make_no_sense_is_shown_without_them(written: Written) -> None:
    written.writer.append(ALLOCATE, 1, [16])
    for key, body in (
        (vector(dtype=200), [1]),  # no such element type
        ([*vector()[:1], 0], [1]),  # a template that ends amid a tensor
        (vector(), []),  # a record that does
        ([4 | (1 << 50) << 8], [1]),  # a list of a quadrillion
        ([4 | 1 << 8] * 9, [1]),  # nested deeper than any
        ([99], [1]),
        ([3 | 6 << 8 | 2 << 16, 1 << 40, 1 << 40], [1]),  # whose size overflows
        ([9 | ((1 << 56) - 1) << 8], [1]),
        ([19 | 6 << 8], [1, 2, 3]),
    ):
        written.operator("aten::odd", key, body)
    written.writer.append(OPERATOR, 1 << 40, [1])  # no such template
    written.writer.append(COLLECTIVE, 7, [1, 0, 0, 0, 1, 1 << 60, 1 << 60, 0])
    written.writer.append(COLLECTIVE, 7, [1])
    written.writer.append(HOST_TO_DEVICE, 1, [])
    rows = written.rows()
    assert [row.get("unreadable", False) for row in rows] == [False, *([True] * (len(rows) - 1))]
    assert len(rows) == 14
    walk = LogWalk(written.log)
    log_table(walk.rows(0, ALL, ALL), 0, 0, 0)
    assert not walk.knows_all, "they may have made buffers"


def test_any_words_at_all_are_read_or_refused(written: Written, seed: int) -> None:
    chance = random.Random(seed)

    def words(most: int) -> list[int]:
        odd = [0, 1, 6 << 8 | 1 << 16 | 1, 4 | 2 << 8, 2**64 - 1, 1 << 63]
        tag = chance.randrange(22) | chance.randrange(1 << 20) << 8
        return [chance.choice([*odd, tag, chance.randrange(64)]) for _ in range(chance.randrange(most))]

    templates = [written.writer.put_template("aten::any", words(30), words(20)) for _ in range(200)]
    for _ in range(2000):
        kind = chance.choice(
            [OPERATOR, OPERATOR, OPERATOR_SYNC, COLLECTIVE, ALLOCATE, DEVICE_TO_HOST, RESIZE]
        )
        for _ in range(chance.randrange(3)):
            written.writer.free_later(chance.randrange(64))
        written.writer.append(kind, chance.choice(templates), words(20))
    rows = written.rows()
    assert len(rows) == 2000
    assert all(len(row["buffers"]) <= 128 for row in rows)
    assert len(written.told()) <= log_commands.MOST_BUFFERS + 1
    make_console().print(log_table(rows[:100], 0, 2000, 0))


def test_a_record_with_thousands_of_buffers_is_cut_short_and_says_so(written: Written) -> None:
    count = 5000
    written.operator("aten::_foreach_neg_", [4 | count << 8, *(vector() * count)], list(range(1, count + 1)))
    (row,) = written.rows()
    assert (len(row["buffers"]), row["buffers_left_out"]) == (128, count - 128)
    make_console().print(log_table([row], 0, 1, 0))
    told = written.told()
    assert told == [*told[:128]] and len(told) == 128


def test_names_of_operators_cannot_draw_on_a_terminal(
    written: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    written.operator("aten::[bold]x\x1b[31m", vector(), [1])
    make_console().print(log_table(written.rows(), 0, 1, 0))
    printed = capsys.readouterr().out
    assert "aten::[bold]x?[31m" in printed and "\x1b" not in printed


# ------------------------------------------------------------------ names of the state
def describe(directory: Path, serial: int, content: object) -> None:
    (directory / f"client-{serial}").write_text(json.dumps(content))


def tensor(handle: int) -> dict[str, Any]:
    return {"dtype": "float32", "size": [2], "stride": [1], "handle": handle, "offset": 0}


STATE = {
    "modules": [
        {"class": "GPT", "state": {"wte.weight": tensor(3), "head.weight": tensor(3), "x": tensor(0)}},
    ],
    "optimizers": [
        {"class": "AdamW", "groups": [], "parameters": [[0, "wte.weight"], None],
         "state": {"0": {"step": tensor(0), "exp_avg": tensor(8)}, "1": {"exp_avg": tensor(9)}}},
    ],
}  # fmt: skip


def test_parameters_and_optimizer_state_are_called_what_the_worker_calls_them(
    written: Written, folder: Path
) -> None:
    describe(folder, 9, {"modules": [], "optimizers": []})
    describe(folder, 10, STATE)
    names = state_names(folder)
    assert names == {3: "GPT wte.weight = GPT head.weight", 8: "AdamW exp_avg of wte.weight",
                     9: "AdamW exp_avg of parameter 1"}  # fmt: skip
    written.writer.append(ALLOCATE, 8, [16])
    assert written.told(state=names) == [
        "buffer 8 (AdamW exp_avg of wte.weight, 16 B, made by record 0 allocate)"
    ]


def test_a_description_that_makes_no_sense_gives_no_names_and_the_one_before_does(folder: Path) -> None:
    assert state_names(folder) == {} == state_names(folder / "nowhere")
    describe(folder, 1, STATE)
    (folder / "client-2").write_bytes(b"\xff\xfe{")
    describe(folder, 3, {"modules": [{"class": 1, "state": 7}]})
    (folder / "client-4").symlink_to(folder / "client-1")
    (folder / "client-\u0665").write_text("{}")
    (folder / "client-x").write_text("{}")
    assert 3 in state_names(folder)
    describe(
        folder,
        5,
        {"modules": [{"class": "\x1b[2J" + "x" * 1000, "state": {"a": tensor(1)}}], "optimizers": []},
    )
    (name,) = state_names(folder).values()
    assert "\x1b" not in name and len(name) <= 120


# ------------------------------------------------------------------ the command's own part
def test_json_is_a_line_a_record_in_pages_of_one_pass(
    written: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    for handle in range(1, 3 * log_commands.AT_A_TIME):
        written.writer.append(ALLOCATE, handle, [8])
    log_commands.dump_json(LogWalk(written.log), 5, ALL, {7: "GPT wte.weight"})
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["index"] for row in rows] == list(range(5, 3 * log_commands.AT_A_TIME - 1))
    assert rows[1]["buffers"] == [
        {"handle": 7, "bytes": 8, "made_by": 6, "made_by_call": "allocate", "state": "GPT wte.weight"}
    ]


def test_a_table_shows_what_a_record_names_and_what_it_makes(
    written: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    written.operator("aten::mm", [*vector(8), *vector(8)], [1, 5, 2], fresh(4, 8))
    written.writer.append(COMMIT, 1, [])
    make_console().print(log_table(written.rows(), 3, 2, 1))
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()
    ]
    assert [cells[i][5] for i in (-3, -2)] == ["1 5 → 2", "1"]


def test_more_buffers_than_a_screen_takes_are_counted() -> None:
    buffers = Buffers()
    uses = [{"handle": handle, "bytes": 8} for handle in range(5)]
    buffers.note({"index": 0, "frees": [], "buffers": uses})
    told = lines(buffers.found.values(), Origin(0, False), {}, most=3)
    assert told[:3] == [sentence(buffer, Origin(0, False), {}) for buffer in list(buffers.found.values())[:3]]
    assert told[0] == "buffer 0 (8 B)" and told[3] == "and 2 more buffers: --json names them with each record"


def test_a_log_that_claims_more_records_than_it_has_room_for_is_not_walked(written: Written) -> None:
    written.writer.append(PHASE, 0, [])
    control = Path(written.directory) / "control"
    place = control.read_bytes().index(struct.pack("<QQ", written.log.tail, written.log.tail_index))
    with control.open("r+b") as file:
        file.seek(place)
        file.write(struct.pack("<Q", 1 << 50))
    with pytest.raises(LogError, match="claims to hold more"):
        LogWalk(Log(written.directory)).rows(0, ALL, ALL)
