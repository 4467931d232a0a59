"""Sparse tensors in records: rebuilt, changed in place, rewound; checked as if the worker were hostile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from executor_harness import (
    ALLOCATE,
    FLOAT,
    HOST_TO_DEVICE,
    LONG,
    OPERATOR,
    OPERATOR_SYNC,
    Harness,
    double,
    vector,
)

from understudy.replay import RemoteError

SPARSE, COMPRESSED, NESTED = 19, 20, 21  # Tag
CSR, CSC = 2, 4  # c10::Layout
DENSE, INDICES, VALUES, OFFSETS = 1, 2, 3, 4  # handles


def sparse(sizes: Sequence[int], *, dims: int | None = None, dtype: int = FLOAT) -> list[int]:
    """Key words of a sparse argument; all its dimensions are sparse ones unless `dims` says how many."""
    return [SPARSE | dtype << 8 | len(sizes) << 16 | (len(sizes) if dims is None else dims) << 24, *sizes]


def compressed(sizes: Sequence[int], layout: int = CSR) -> list[int]:
    return [COMPRESSED | FLOAT << 8 | len(sizes) << 16 | layout << 24, *sizes]


def components(*each: tuple[list[int], list[int], int], length: int = 3) -> list[int]:
    """Value words of a nested tensor over VALUES; of each component sizes, strides and offset."""
    words = [len(each), *raw(VALUES, [length])]
    words += [word for sizes, _, _ in each for word in sizes]
    words += [word for _, strides, _ in each for word in strides]
    return [*words, *(offset for _, _, offset in each)]


def raw(handle: int, sizes: Sequence[int], *, dtype: int = FLOAT, offset: int = 0) -> list[int]:
    """Value words of a piece: contiguous."""
    strides = [1] * len(sizes)
    for i in range(len(sizes) - 2, -1, -1):
        strides[i] = strides[i + 1] * sizes[i + 1]
    return [1 | dtype << 8 | len(sizes) << 16, handle, offset, *sizes, *strides]


def pieces(nnz: int = 3, *, coalesced: int = 1) -> list[int]:
    """Value words of a sparse vector of `nnz` numbers."""
    return [coalesced, *raw(INDICES, [1, nnz], dtype=LONG), *raw(VALUES, [nnz])]


def prepare(h: Harness, indices: Sequence[int] = (0, 2, 3), offsets: Sequence[int] = (0, 2, 3)) -> None:
    h.new(DENSE, [1, 1, 1, 1])
    for handle, numbers in ((INDICES, indices), (OFFSETS, offsets)):
        h.writer.append(ALLOCATE, handle, [8 * len(numbers)])
        words = [number % 2**64 for number in numbers]
        h.writer.append(HOST_TO_DEVICE, handle, [0, 8 * len(numbers), *words])
    h.new(VALUES, [10, 20, 30])


def add_to_dense(h: Harness, key: list[int], values: list[int]) -> None:
    """dense += sparse, the one thing that runs asynchronously."""
    template = h.template("aten::add_.Tensor", [*vector(), *key, 17, double(1.0)])
    h.writer.append(OPERATOR, template, [DENSE, *values])


def to_dense(h: Harness, key: list[int], values: list[int]) -> None:
    h.writer.call(OPERATOR_SYNC, h.template("aten::_to_dense", [*key, 0, 0], []), [*values, 1000])


def padded(h: Harness, values: list[int], *, dims: int = 1) -> None:
    key = [NESTED | FLOAT << 8 | dims << 16, 17, double(0.0), 0]
    h.writer.call(OPERATOR_SYNC, h.template("aten::to_padded_tensor", key, []), [*values, 1000])


def negate(h: Harness) -> None:
    h.writer.call(OPERATOR_SYNC, h.template("aten::neg_", sparse([4]), []), [*pieces(), 1000])


def test_a_sparse_argument_is_rebuilt_from_its_pieces() -> None:
    with Harness() as h:
        prepare(h)
        add_to_dense(h, sparse([4]), pieces())
        assert h.read(DENSE) == (11, 1, 21, 31)
        add_to_dense(h, sparse([4]), pieces(2))  # the same template serves any number of elements
        assert h.read(DENSE) == (21, 1, 41, 31)


def test_a_nested_argument_is_rebuilt_and_its_result_described() -> None:
    with Harness() as h:
        prepare(h)
        padded(h, components(([1], [1], 0), ([2], [1], 1)))
        assert h.read(1000) == (10, 0, 20, 30)


@pytest.mark.cpu_driver
def test_positions_of_picked_elements_are_looked_into() -> None:
    """`torch.sparse.mm(..., "amax")`: its backward kernel would read wherever they point."""
    with Harness() as h:
        prepare(h, indices=(0, 1, 1), offsets=(0, 2, 3))
        matrix = [1 | FLOAT << 8 | 2 << 16, 0, 2, 2, 2, 1]
        picked = [1 | LONG << 8 | 2 << 16, 0, 2, 2, 2, 1]
        amax = [9 | 4 << 8, int.from_bytes(b"amax\0\0\0\0", "little")]
        key = [*compressed([2, 2]), *matrix, *matrix, *amax, *picked, 14 | 2 << 8, 1, 1]
        backward = h.template("aten::_sparse_mm_reduce_impl_backward", key, [])
        h.writer.append(ALLOCATE, 5, [32])
        h.writer.append(HOST_TO_DEVICE, 5, [0, 32, 0, 1, 2, 4])
        with pytest.raises(RemoteError, match="outside the 3 elements"):
            h.writer.call(OPERATOR_SYNC, backward, [*parts(), DENSE, DENSE, 5, 1000])
        assert h.read(DENSE) == (1, 1, 1, 1), "the session goes on"


def test_an_operator_that_changes_a_sparse_tensor_changes_its_buffers_and_is_rewound() -> None:
    with Harness() as h:
        prepare(h)
        h.commit()
        negate(h)
        assert h.read(VALUES, 3) == (-10, -20, -30)
        h.executor.park()
        h.executor.rewind(1)
        h.executor.resume()
        assert h.read(VALUES, 3) == (-10, -20, -30)
        assert (h.log.replies_compared, h.log.replies_different) == (2, 0)


def test_a_fresh_server_replays_operators_on_sparse_tensors() -> None:
    with Harness() as h:
        prepare(h)
        h.commit()
        negate(h)
        add_to_dense(h, sparse([4]), pieces())
        assert h.read(DENSE) == (-9, 1, -19, -29)
        h.executor.park()
        h.executor = h.new_executor()
        h.executor.restore(1)
        h.executor.resume()
        assert h.read(DENSE) == (-9, 1, -19, -29)
        assert (h.log.replies_compared, h.log.replies_different) == (2, 0)


def parts(rows: int = 2, nnz: int = 3, *, dtype: int = LONG) -> list[int]:
    """Value words of a compressed matrix."""
    return [*raw(OFFSETS, [rows + 1], dtype=dtype), *raw(INDICES, [nnz], dtype=dtype), *raw(VALUES, [nnz])]


# A script can make such tensors with PyTorch's unchecked calls: the call fails, the session goes on.
# Indices, offsets of rows, the argument's words (key, values), and what the error says.
VECTOR, MATRIX = (sparse([4]), pieces()), (compressed([2, 2]), parts())
UNSORTED = (sparse([4]), pieces(coalesced=0))
Argument = tuple[list[int], list[int]]
WRONG_CONTENT: dict[str, tuple[Sequence[int], Sequence[int], Argument, str]] = {
    "an index behind the end": ((0, 2, 4), (), VECTOR, "index 4 in a dimension of size 4"),
    "a negative index": ((0, 2, -1), (), UNSORTED, "index -1 in a dimension of size 4"),
    "an index in an empty dimension": ((0, 0, 0), (), (sparse([0]), pieces()), "dimension of size 0"),
    "indices not in order, said to be coalesced": ((2, 0, 3), (), VECTOR, "marked as coalesced"),
    "indices not unique, said to be coalesced": ((0, 0, 3), (), VECTOR, "marked as coalesced"),
    "a column behind the end": ((0, 1, 2), (0, 2, 3), MATRIX, "index 2 in a dimension of 2"),
    "a negative column": ((0, -1, 1), (0, 2, 3), MATRIX, "index -1 in a dimension of 2"),
    "a row behind the end": (
        (0, 1, 2),
        (0, 2, 3),
        (compressed([2, 2], CSC), parts()),
        "index 2 in a dimension",
    ),
    "offsets that fall": ((0, 1, 1), (0, 4, 3), MATRIX, "do not rise from 0 to 3"),
    "offsets that end too late": ((0, 1, 1), (0, 2, 4), MATRIX, "do not rise from 0 to 3"),
    "offsets that begin too late": ((0, 1, 1), (1, 2, 3), MATRIX, "do not rise from 0 to 3"),
}


@pytest.mark.parametrize("what", WRONG_CONTENT)
def test_content_that_would_lead_a_kernel_outside_its_buffers_fails_the_call(what: str) -> None:
    indices, offsets, (key, values), message = WRONG_CONTENT[what]
    with Harness() as h:
        prepare(h, indices, offsets or (0, 2, 3))
        with pytest.raises(RemoteError, match=message):
            to_dense(h, key, values)
        assert h.read(DENSE) == (1, 1, 1, 1), "the session goes on"


MALFORMED: dict[str, Callable[[Harness], None]] = {
    "more sparse dimensions than dimensions": lambda h: to_dense(h, sparse([4], dims=2), pieces()),
    "a negative size": lambda h: to_dense(h, sparse([2**64 - 1]), pieces()),
    "sizes that overflow": lambda h: to_dense(h, sparse([1 << 40, 1 << 40]), pieces()),
    "an unknown element type": lambda h: to_dense(h, sparse([4], dtype=200), pieces()),
    "an unknown layout": lambda h: to_dense(h, compressed([2, 2], 99), parts()),
    "a strided layout": lambda h: to_dense(h, compressed([2, 2], 0), parts()),
    "values of another type": lambda h: to_dense(h, sparse([4], dtype=LONG), pieces()),
    "fewer values than indices": lambda h: to_dense(
        h, sparse([4]), [1, *raw(INDICES, [1, 3], dtype=LONG), *raw(VALUES, [2])]
    ),
    "indices of floats": lambda h: to_dense(h, sparse([4]), [1, *raw(VALUES, [1, 3]), *raw(VALUES, [3])]),
    "indices with one row too many": lambda h: to_dense(
        h, sparse([4]), [1, *raw(INDICES, [3, 1], dtype=LONG), *raw(VALUES, [1])]
    ),
    "values without an element dimension": lambda h: to_dense(
        h, sparse([4]), [1, *raw(INDICES, [1, 1], dtype=LONG), *raw(VALUES, [])]
    ),
    "dense dimensions that do not fit": lambda h: to_dense(
        h, sparse([4, 2], dims=1), [1, *raw(INDICES, [1, 1], dtype=LONG), *raw(VALUES, [1, 3])]
    ),
    "indices behind the end of their buffer": lambda h: to_dense(h, sparse([4]), pieces(1000)),
    "a piece that is not a tensor": lambda h: to_dense(h, sparse([4]), [1, 7, 7, 7]),
    "no pieces": lambda h: to_dense(h, sparse([4]), []),
    "an unknown handle": lambda h: to_dense(
        h, sparse([4]), [1, *raw(99, [1, 3], dtype=LONG), *raw(VALUES, [3])]
    ),
    "too few offsets": lambda h: to_dense(h, compressed([3, 2]), parts()),
    "batches that do not fit": lambda h: to_dense(h, compressed([5, 2, 2]), parts()),
    "too few sizes": lambda h: to_dense(h, compressed([2]), parts()),
    "a component behind the end of its buffer": lambda h: padded(h, components(([2], [1], 0), ([2], [1], 2))),
    "a component with a negative size": lambda h: padded(h, components(([2**64 - 1], [1], 0))),
    "a component with a negative offset": lambda h: padded(h, components(([1], [1], 2**64 - 1))),
    "a component whose size overflows": lambda h: padded(
        h, components(([1 << 32, 1 << 32], [0, 0], 0)), dims=2
    ),
    "fewer components than announced": lambda h: padded(h, [1 << 40, *components(([1], [1], 0))[1:]]),
    "a nested buffer larger than its storage": lambda h: padded(h, components(([1], [1], 0), length=1000)),
    "offsets of floats": lambda h: to_dense(
        h,
        compressed([2, 2]),
        [*raw(VALUES, [3]), *raw(INDICES, [3], dtype=LONG), *raw(VALUES, [3])],
    ),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_sparse_argument_ends_its_own_session_with_an_error(what: str) -> None:
    with Harness() as h, Harness() as bystander:
        prepare(h)
        prepare(bystander)
        with pytest.raises(RemoteError):
            MALFORMED[what](h)
        with pytest.raises(RemoteError):
            h.synchronize()
        assert bystander.read(DENSE) == (1, 1, 1, 1)
