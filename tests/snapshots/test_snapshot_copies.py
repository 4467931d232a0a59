"""Snapshots that are copied beside the records which change and free what they are of."""

from __future__ import annotations

import mmap
import random
import struct
from functools import partial
from pathlib import Path

import pytest
from executor_harness import ALLOCATE, FREE, OPERATOR, PHASE, Harness, double, vector

LIMIT = 64 << 20
LENGTHS = (1, 50, 3_000, 100_000, 400_000)
"""Of vectors; the copier's pieces hold 65,536 elements."""


class Program:
    """Random records, and what each commit's buffers held."""

    def __init__(self, h: Harness, chance: random.Random) -> None:
        self._h, self._chance = h, chance
        self._fill = {n: h.template("aten::fill_.Scalar", [*vector(n), 7], [0]) for n in LENGTHS}
        self._values: dict[int, tuple[int, int]] = {}
        self._next = 1
        self.of_commit: dict[int, dict[int, tuple[int, int]]] = {}
        """Commit -> handle -> length and value."""
        for length in (*LENGTHS, *LENGTHS):
            self._make(length)

    @property
    def alive(self) -> set[int]:
        return set(self._values)

    def _make(self, length: int) -> None:
        self._h.writer.append(ALLOCATE, self._next, [4 * length])
        self._set(self._next, length)
        self._next += 1

    def _set(self, handle: int, length: int) -> None:
        value = self._chance.randrange(1 << 20)
        self._h.writer.append(OPERATOR, self._fill[length], [handle, double(float(value))])
        self._values[handle] = length, value

    def change(self) -> None:
        """Some buffers, in any order: written, or freed and replaced by another of their size."""
        for handle in self._chance.sample(sorted(self._values), self._chance.randrange(len(self._values))):
            length, _ = self._values[handle]
            if self._chance.random() < 0.2:
                del self._values[handle]
                self._h.writer.free_later(handle)
                self._h.writer.append(FREE, 0, [])
                self._make(length)
            else:
                self._set(handle, length)

    def commit(self) -> int:
        self._h.commit()
        self._h.writer.append(PHASE, 0, [])  # what is freed from here on belongs to the commit
        number = len(self.of_commit) + 1
        self.of_commit[number] = dict(self._values)
        return number


def is_published(h: Harness, serial: int) -> bool:
    return any(one.serial == serial for one in h.log.snapshots())


@pytest.mark.parametrize("snapshots", [400, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.timeout(600)
def test_every_snapshot_is_of_its_commit_beside_changes_frees_and_rewinds(seed: int, snapshots: int) -> None:
    chance = random.Random(seed)
    with Harness(snapshot_bytes=LIMIT) as h:
        program = Program(h, chance)
        program.commit()
        with open(Path(h.directory, "snapshot"), "rb") as file:
            area = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        rewound = 0
        for serial in range(1, snapshots + 1):
            program.change()
            h.synchronize()
            h.log.order_snapshot(serial)
            number = program.commit()
            program.change()
            if chance.random() < 0.2:
                while chance.random() < 0.9 and not is_published(h, serial):
                    pass
                h.executor.park()
                if h.log.commit_count >= number - 1:
                    h.executor.rewind(number - 1)
                    rewound += 1
                h.executor.resume()
            h.synchronize()
            h.wait(partial(is_published, h, serial), f"did not publish snapshot {serial}")
            (found,) = [one for one in h.log.snapshots() if one.serial == serial]
            assert found.commit.number == number
            expected = program.of_commit[number]
            rows = {handle: (size, at) for handle, size, _, at in h.log.snapshot_contents(serial).buffers}
            # A rewind brings what was freed untouched back without its content: the replay frees it again.
            missing = expected.keys() - rows.keys()
            assert rows.keys() <= expected.keys()
            assert not missing & program.alive and (rewound or not missing)
            for handle, (size, at) in rows.items():
                length, value = expected[handle]
                assert size == 4 * length
                assert area[at : at + size] == struct.pack("<f", value) * length, (serial, handle)
            h.log.snapshot_floor = serial
            h.log.floor_commit = number
        assert rewound > 0
        h.executor.park()
        other = h.new_executor()
        other.restore_snapshot(number)  # which compares all with the manifest's digests
        h.executor = other
        assert h.log.snapshot_failed == 0


def test_session_ends_while_its_snapshot_is_being_copied() -> None:
    """And the next server finds nothing of it."""
    for _ in range(20):
        with Harness(snapshot_bytes=LIMIT) as h:
            h.writer.append(ALLOCATE, 1, [32 << 20])
            h.synchronize()
            h.log.order_snapshot(1)
            h.commit()
            h.writer.append(PHASE, 0, [])
            h.run_all()
            h.executor.detach()
            assert all(one.commit.number == 1 for one in h.log.snapshots())
            h.executor = h.new_executor()
