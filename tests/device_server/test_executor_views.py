"""Tensors that the executor keeps over a buffer from call to call: they never outlive what they describe."""

from __future__ import annotations

import random

import pytest
import torch
from executor_harness import ALLOCATE, FREE, HOST_TO_DEVICE, OPERATOR, RESIZE, SYNCHRONIZE, Harness, vector

from understudy.replay import RemoteError

INT, INT_LIST, NONE = 6, 12, 0


def integer(value: int) -> list[int]:
    return [INT, value]


def matrix(rows: int, columns: int) -> list[int]:
    """Key words of a contiguous 2-d float tensor."""
    return [1 | 6 << 8 | 2 << 16, 0, rows, columns, columns, 1]


def fresh_vector(length: int) -> list[int]:
    """Output words of one new contiguous float vector."""
    return [1 | 1 << 8, 0 | 6 << 8 | 1 << 16, 0, 4 * length, length, 1]


def square(h: Harness, source: int, target: int, length: int = 4) -> None:
    """target = source * source, a new buffer: reads `source` through the view that add() writes."""
    template = h.template("aten::mul.Tensor", [*vector(length), *vector(length)], fresh_vector(length))
    h.writer.append(OPERATOR, template, [source, source, target])


def test_an_operator_that_changes_its_argument_s_shape_does_not_change_it_for_later_calls() -> None:
    with Harness() as h:
        h.new(1, [1, 2, 3, 4, 5, 6])
        transpose = h.template("aten::t_", matrix(2, 3))
        first_row = h.template(
            "aten::select_copy.int", [*matrix(2, 3), *integer(0), *integer(0)], fresh_vector(3)
        )
        for round_ in range(3):
            h.writer.append(OPERATOR, transpose, [1])
            h.writer.append(OPERATOR, first_row, [1, 10 + round_])
            assert h.read(10 + round_, 3) == (1, 2, 3)


def test_an_argument_that_an_operator_made_larger_is_read_in_its_old_shape_by_other_calls() -> None:
    with Harness() as h:
        h.new(1, [1, 2, 3, 4])
        square(h, 1, 2)
        resize = h.template("aten::resize_", [*vector(4), INT_LIST | 1 << 8, 64, NONE])
        h.writer.append(OPERATOR, resize, [1])
        square(h, 1, 3)
        assert h.read(2) == h.read(3) == (1, 4, 9, 16)


def test_what_an_operator_conjugates_lazily_is_conjugated_in_memory() -> None:
    with Harness() as h:
        no = 8
        one_by_one = [1 | 9 << 8 | 2 << 16, 0, 1, 1, 1, 1]  # complex64
        pivots = [1 | 3 << 8 | 1 << 16, 0, 1, 1]  # int32
        h.new(1, [2, 1])  # LU = [[2 + i]]
        h.new(3, [1, 0])  # B = [[1]]
        h.new(4, [0, 0])
        h.writer.append(ALLOCATE, 2, [4])
        h.writer.append(HOST_TO_DEVICE, 2, [0, 4, 1])
        key = [*one_by_one, *pivots, *one_by_one, no, no, *one_by_one]  # left, adjoint
        solve = h.template("aten::linalg_lu_solve.out", key)
        for _ in range(2):
            h.writer.append(OPERATOR, solve, [1, 2, 3, 4])
            assert h.read(4, 2) == pytest.approx((0.4, -0.2))


@pytest.mark.cpu_driver
def test_an_operator_that_fails_half_way_leaves_no_changed_view_behind() -> None:
    with Harness() as h:
        h.new(1, [1, 2, 3, 4])
        h.new(2, [0, 0])
        square(h, 1, 3)
        # resizes `out`, then refuses: index 7 is outside
        key = [*vector(4), *integer(0), *vector(1, 0, 4), *vector(2)]
        out = h.template("aten::index_select.out", key)
        h.writer.append(ALLOCATE, 5, [8])
        h.writer.append(7 - 1, 5, [0, 8, 7])  # the index
        h.writer.append(OPERATOR, out, [1, 5, 2])
        with pytest.raises(RemoteError, match="index"):
            h.synchronize()


def test_a_resized_buffer_is_seen_in_its_new_memory() -> None:
    with Harness() as h:
        h.new(1, [1, 2, 3, 4])
        square(h, 1, 2)
        h.writer.append(RESIZE, 1, [32])
        h.add(1, 1)
        square(h, 1, 3)
        assert h.read(3) == (4, 16, 36, 64)
        h.writer.append(RESIZE, 1, [8])
        square(h, 1, 4)
        with pytest.raises(RemoteError, match="reaches 16 bytes into a buffer of 8"):
            h.synchronize()


def test_a_handle_that_is_free_again_refers_to_its_new_memory() -> None:
    with Harness() as h:
        for round_ in range(4):
            h.new(1, [round_] * 4)
            square(h, 1, 2)
            assert h.read(2) == (round_**2,) * 4
            h.writer.free_later(1)
            h.writer.free_later(2)
            h.writer.append(FREE, 0, [])


def test_after_a_rewind_reads_see_the_pre_image() -> None:
    with Harness() as h:
        h.new(1, [1, 1, 1, 1])
        h.new(2, [2, 2, 2, 2])
        square(h, 1, 3)
        h.commit()
        h.add(1, 2)
        square(h, 1, 4)
        assert h.read(4) == (9, 9, 9, 9)
        h.executor.park()
        h.executor.rewind(1)
        h.executor.resume()
        h.writer.call(SYNCHRONIZE, 0, [])
        assert h.read(4) == (9, 9, 9, 9)
        assert h.read(1) == (3, 3, 3, 3)
        assert h.log.replies_different == 0


@pytest.mark.parametrize("turn", range(2))
def test_any_mix_of_calls_gives_what_plain_tensors_give(seed: int, turn: int) -> None:
    rng = random.Random(2 * seed + turn)
    with Harness() as h:
        expected: dict[int, torch.Tensor] = {}
        next_handle = 1
        for _ in range(400):
            what = rng.choice(["new", "add", "square", "free", "commit", "rewind"] if expected else ["new"])
            handle = rng.choice(list(expected)) if expected else 0
            if what == "new":
                values = [float(rng.randrange(3)) for _ in range(4)]
                h.new(next_handle, values)
                expected[next_handle] = torch.tensor(values)
                next_handle += 1
            elif what == "add":
                other = rng.choice(list(expected))
                h.add(handle, other)
                expected[handle] = (expected[handle] + expected[other]).remainder(1 << 20)
                if expected[handle].max() > 1 << 18:
                    h.writer.free_later(handle)
                    del expected[handle]
            elif what == "square" and expected[handle].max() < 256:
                square(h, handle, next_handle)
                expected[next_handle] = expected[handle] ** 2
                next_handle += 1
            elif what == "free" and len(expected) > 3:
                h.writer.free_later(handle)
                del expected[handle]
            elif what == "commit":
                h.commit()
            elif what == "rewind":
                h.synchronize()
                h.executor.park()
                commits = [row.number for row in h.log.commits()]
                if commits:
                    h.executor.rewind(commits[-1])
                h.executor.resume()
                assert h.read(handle) == tuple(expected[handle].tolist())
        for handle, values_ in expected.items():
            assert h.read(handle) == tuple(values_.tolist()), handle
        assert h.log.replies_different == 0
