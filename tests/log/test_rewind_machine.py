"""Random programs with recoveries in them: everything has the bits that it has without any.

A Hypothesis state machine writes one program into three logs.  `survivor` is rewound in place, `victim` gets
fresh servers, snapshots and its peer's copies, and `undisturbed` just executes it, keeping nothing.  Every
reply, buffer and generator must have the same bits in all three.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from executor_harness import (
    ALLOCATE,
    COMMIT,
    DEVICE_TO_HOST,
    FREE,
    GENERATOR_FREE,
    GENERATOR_GET,
    GENERATOR_SET,
    HOST_TO_DEVICE,
    OPERATOR,
    OPERATOR_SYNC,
    PHASE,
    RESIZE,
    SEED,
    double,
)
from hypothesis import HealthCheck, event, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from rewound_rank import RewoundRank

EXAMPLES, MANY = 50, 180
STEPS = 40
BOOL, CONSTANT_DOUBLE, TENSOR_LIST, DOUBLE, GENERATOR = 8, 17, 4, 7, 11
FLOAT64, ITEM = 7, 8
"""c10::ScalarType, and its bytes."""
ARITHMETIC: tuple[tuple[str, list[int]], ...] = (
    ("aten::copy_", [BOOL]),
    ("aten::add_.Tensor", [CONSTANT_DOUBLE, double(1.0)]),
    ("aten::mul_.Tensor", []),
    ("aten::atan2_", []),
)
"""Operators that change their first argument by their second, and the key words behind both."""
GENERATORS = (1, 2)  # 0 is the process's own, which executors here share
LENGTHS = (2, 6, 8, 700)
NUMBERS = (0.0, -0.0, 1.5, -7e300, 5e-324, float("inf"), float("nan"))
STEP, AUTOMATIC = 0, 1
"""CommitKind."""
UPTO = st.integers(0, 255)
"""To be taken modulo the number of choices."""
BACK = st.one_of(st.just(0), UPTO)
"""How far back to go, 0 is the newest."""
OPERATIONS = (
    "allocate", "upload_a_part", "resize", "free", "read", "fill", "change_in_place",
    "change_several_in_place", "compute", "fail", "draw", "set_seed", "ask_generator", "set_generator",
    "free_generator",
)  # fmt: skip
Operation = tuple[str, int, int, int]
PROGRAM = st.lists(st.tuples(st.sampled_from(OPERATIONS), UPTO, UPTO, UPTO), max_size=8)


@dataclass(frozen=True)
class View:
    """Some numbers of a buffer: a tensor argument."""

    handle: int
    places: range

    @property
    def key(self) -> list[int]:
        """Its key words in a template."""
        return [1 | FLOAT64 << 8 | 1 << 16, self.places.start, len(self.places), self.places.step]

    def overlaps(self, other: View) -> bool:
        """Whether one write changes both."""
        return self.handle == other.handle and not set(self.places).isdisjoint(other.places)


def fresh(length: int) -> list[int]:
    """Output words of a new contiguous vector."""
    return [1 | 1 << 8, 0 | FLOAT64 << 8 | 1 << 16, 0, ITEM * length, length, 1]


def numbers(value: int, length: int) -> list[int]:
    """Payload words: as many different numbers."""
    return [double(value + place / 8) for place in range(length)]


class RewindMachine(RuleBasedStateMachine):
    """The program so far, and where its three executions stand.

    No rule has a precondition: how far a server has got is another matter each time, and Hypothesis wants to
    find the same choices when it tries a program again.
    """

    @initialize(optimizer_preimages=st.sampled_from([True, True, False]))
    def start(self, optimizer_preimages: bool) -> None:
        self.survivor = RewoundRank(True, optimizer_preimages)
        self.victim = RewoundRank(True, optimizer_preimages)
        self.undisturbed = RewoundRank(False, True)
        self.protected = (self.survivor, self.victim)
        self.everybody = (self.survivor, self.victim, self.undisturbed)
        self.written: dict[int, list[bool]] = {}  # of each number of each live buffer
        self.freed: list[int] = []
        self.next_handle = 1
        self.states: list[bytes] = []  # that generators had
        self.records: list[tuple[int, int]] = []  # step and call of each, both from 1
        self.step, self.calls = 1, 0
        self.parked = False
        self.stopped: set[RewoundRank] = set()  # where a call failed: they cannot just go on
        self.serial = self.relied = 0
        for number in range(1, 4):
            self.allocate(number, 1, number)

    def teardown(self) -> None:
        for rank in getattr(self, "everybody", ()):
            rank.close()

    # ------------------------------------------------------------------ writing the program
    def count(self, kind: int, aux: int) -> None:
        self.calls += 1
        self.records.append((self.step, self.calls))
        if kind == COMMIT and aux == 0:
            self.step, self.calls = self.step + 1, 0

    def append(self, kind: int, aux: int, body: Iterable[int] = ()) -> None:
        self.count(kind, aux)
        for rank in self.everybody:
            rank.append(kind, aux, [*body])

    def call(self, kind: int, aux: int, body: Iterable[int] = ()) -> bytes | str:
        self.count(kind, aux)
        answers = [rank.call(kind, aux, [*body]) for rank in self.everybody]
        assert len(set(answers)) == 1, answers
        return answers[0]

    def operator(
        self, name: str, key: list[int], values: list[int], outputs: list[int] | None = None
    ) -> None:
        self.count(OPERATOR, 0)
        for rank in self.everybody:
            rank.append(OPERATOR, rank.template(name, key, [0] if outputs is None else outputs), values)

    def call_operator(self, name: str, key: list[int], values: list[int]) -> bytes | str:
        self.count(OPERATOR_SYNC, 0)
        ranks = self.everybody
        answers = [rank.call(OPERATOR_SYNC, rank.template(name, key, []), values) for rank in ranks]
        assert len(set(answers)) == 1, answers
        return answers[0]

    @staticmethod
    def one_of(handles: Iterable[int], choice: int) -> int:
        """0 if there is none."""
        found = sorted(handles)
        return found[choice % len(found)] if found else 0

    def new_handle(self, reused: int) -> int:
        """One never had before or, now and then, one that was freed."""
        if reused % 4 == 0 and self.freed:
            return self.freed.pop(reused // 4 % len(self.freed))
        self.next_handle += 1
        return self.next_handle - 1

    def view(self, choice: int, length: int | None = None, readable: bool = True) -> View | None:
        """One of the views there are: whole buffers, halves, every second number; None if there is none."""
        found = []
        for handle, written in self.written.items():
            size = len(written)
            halves = (range(size // 2), range(size // 2, size), range(1, size, 2)) if size > 1 else ()
            for places in (range(size), *halves):
                if length in (None, len(places)) and (not readable or all(written[p] for p in places)):
                    found.append(View(handle, places))
        return found[choice % len(found)] if found else None

    def was_written(self, view: View) -> None:
        for place in view.places:
            self.written[view.handle][place] = True

    # ------------------------------------------------------------------ operations on buffers
    def allocate(self, size: int, reused: int, value: int) -> None:
        handle, length = self.new_handle(reused), LENGTHS[size % len(LENGTHS)]
        self.append(ALLOCATE, handle, [ITEM * length])
        self.written[handle] = [value % 4 != 0] * length
        if value % 4 != 0:
            self.append(HOST_TO_DEVICE, handle, [0, ITEM * length, *numbers(value, length)])

    def upload_a_part(self, choice: int, first: int, value: int) -> None:
        if handle := self.one_of(self.written, choice):
            begin = first % len(self.written[handle])
            length = min(4, len(self.written[handle]) - begin)
            self.append(HOST_TO_DEVICE, handle, [ITEM * begin, ITEM * length, *numbers(value, length)])
            self.was_written(View(handle, range(begin, begin + length)))

    def resize(self, choice: int, size: int, _: int) -> None:
        if handle := self.one_of(self.written, choice):
            length = LENGTHS[size % len(LENGTHS)]
            self.append(RESIZE, handle, [ITEM * length])
            written = self.written[handle]
            self.written[handle] = written[:length] + [False] * (length - len(written))

    def free(self, choice: int, at_once: int, _: int) -> None:
        if handle := self.one_of(self.written, choice):
            del self.written[handle]
            self.freed.append(handle)
            for rank in self.everybody:
                rank.harness.writer.free_later(handle)
            if at_once % 2 == 0:
                self.append(FREE, 0)

    def read(self, choice: int, *_: int) -> None:
        view = self.view(choice)
        if view and view.places.step == 1 and not self.parked:
            self.call(DEVICE_TO_HOST, view.handle, [ITEM * view.places.start, ITEM * len(view.places)])

    # ------------------------------------------------------------------ operators
    def fill(self, choice: int, value: int, _: int) -> None:
        if view := self.view(choice, readable=False):
            number = double(NUMBERS[value % len(NUMBERS)])
            self.operator("aten::fill_.Scalar", [*view.key, DOUBLE], [view.handle, number])
            self.was_written(view)

    def change_in_place(self, name: int, first: int, second: int) -> None:
        operator, constants = ARITHMETIC[name % len(ARITHMETIC)]
        to = self.view(first, readable=operator != "aten::copy_")
        by = to and self.view(second, length=len(to.places))
        if to and by and (to.key == by.key or not to.overlaps(by)):
            self.operator(operator, [*to.key, *by.key, *constants], [to.handle, by.handle])
            self.was_written(to)

    def change_several_in_place(self, first: int, second: int, factor: int) -> None:
        views = {v.handle: v for choice in (first, second) if (v := self.view(choice))}.values()
        if views:
            words = [word for view in views for word in view.key]
            key = [TENSOR_LIST | len(views) << 8, *words, CONSTANT_DOUBLE, double(factor / 64)]
            self.operator("aten::_foreach_mul_.Scalar", key, [view.handle for view in views], [])

    def compute(self, left: int, right: int, reused: int) -> None:
        a = self.view(left)
        b = a and self.view(right, length=len(a.places))
        if a and b:
            result = self.new_handle(reused)
            key = [*a.key, *b.key, CONSTANT_DOUBLE, double(0.5)]
            handles = [a.handle, b.handle, result]
            if reused % 2 == 0 and not self.parked:  # the first such call: the worker is told what it gave
                self.call_operator("aten::sub.Tensor", key, handles)
            else:
                self.operator("aten::sub.Tensor", key, handles, fresh(len(a.places)))
            self.written[result] = [True] * len(a.places)

    def fail(self, first: int, second: int, _: int) -> None:
        """A call that raises in the program, half-way."""
        a, b = self.view(first), self.view(second)
        if a and b and not a.overlaps(b) and len({1, len(a.places), len(b.places)}) == 3 and not self.parked:
            error = self.call_operator("aten::mul_.Tensor", [*a.key, *b.key], [a.handle, b.handle, 0])
            assert "must match" in str(error)

    # ------------------------------------------------------------------ random numbers
    def draw(self, choice: int, generator: int, _: int) -> None:
        if view := self.view(choice, readable=False):
            key = [*view.key, DOUBLE, DOUBLE, GENERATOR]
            values = [view.handle, double(0.0), double(1.0), GENERATORS[generator % 2]]
            self.operator("aten::normal_", key, values)
            self.was_written(view)

    def set_seed(self, generator: int, number: int, _: int) -> None:
        self.append(SEED, GENERATORS[generator % 2], [number])

    def ask_generator(self, generator: int, *_: int) -> None:
        if not self.parked:
            state = self.call(GENERATOR_GET, GENERATORS[generator % 2])
            assert isinstance(state, bytes), state
            self.states.append(state)

    def set_generator(self, generator: int, choice: int, _: int) -> None:
        if self.states:
            state = self.states[choice % len(self.states)]
            words = struct.unpack(f"<{len(state) // 8}Q", state)
            self.append(GENERATOR_SET, GENERATORS[generator % 2], [len(state), *words])

    def free_generator(self, generator: int, *_: int) -> None:
        self.append(GENERATOR_FREE, GENERATORS[generator % 2])

    # ------------------------------------------------------------------ rules: minibatches
    @rule(operations=PROGRAM)
    def work(self, operations: list[Operation]) -> None:
        for name, *choices in operations:
            getattr(self, name)(*choices)

    @rule(backward=PROGRAM, optimizer=PROGRAM, after=PROGRAM, replicas=st.booleans())
    def end_minibatch(
        self, backward: list[Operation], optimizer: list[Operation], after: list[Operation], replicas: bool
    ) -> None:
        if replicas:
            self.find_replicas()
        self.work(backward)
        self.append(PHASE, 1)
        self.work(optimizer)
        self.append(COMMIT, STEP)
        self.work(after)

    @rule()
    def commit_without_a_step(self) -> None:
        self.append(COMMIT, AUTOMATIC)

    @rule(share=st.integers(0, 4))
    def raise_floor(self, share: int) -> None:
        """As proxyd does once all ranks hold a cut."""
        self.settle_if_running()
        newest = min(rank.log.commit_count for rank in self.protected)
        for rank in self.protected:
            floor = rank.log.floor_commit
            rank.log.floor_commit = max(floor, floor + (newest - floor) * share // 4)

    @rule()
    def order_snapshot(self) -> None:
        if self.relied != self.serial:
            return
        self.serial += 1
        for rank in self.protected:
            rank.log.order_snapshot(self.serial)

    @rule()
    def rely_on_snapshot(self) -> None:
        """As proxyd does once all ranks have theirs."""
        self.settle_if_running()
        if all(any(s.serial == self.serial for s in rank.log.snapshots()) for rank in self.protected):
            self.relied = self.serial
            for rank in self.protected:
                rank.log.snapshot_floor = self.serial

    def find_replicas(self) -> None:
        """From the next commit on nobody shadows what both have, as proxyd allows once digests agree."""
        self.settle_if_running()
        alive = self.survivor.log.manifest(self.survivor.log.commit_count) if self.has_manifest() else []
        handles = [b.handle for b in alive if all(self.written.get(b.handle, [False]))]
        for rank in self.protected:
            rank.harness.executor.set_replicated(handles)

    def has_manifest(self) -> bool:
        commits = self.survivor.log.commits()
        return bool(commits) and commits[-1].has_manifest

    # ------------------------------------------------------------------ rules: faults
    def settle_if_running(self) -> None:
        if not self.parked:
            for rank in self.everybody:
                rank.settle()

    def stand_still(self) -> None:
        """Parked where the program has come to, or where they are parked already."""
        self.settle_if_running()
        for rank in self.protected:
            rank.park()
        self.parked = True

    @rule()
    def park(self) -> None:
        """From here on the worker runs ahead."""
        self.stand_still()

    @rule(choice=UPTO)
    def fail_at_a_record(self, choice: int) -> None:
        """In the midst of what there is to run, or to replay."""
        if not self.parked:
            return
        for rank in self.protected:
            ahead = range(rank.log.cursor_index, len(self.records))
            if len(ahead) > 0 and rank not in self.stopped:
                event("failed at a record")
                rank.stop_at(*self.records[ahead[choice % len(ahead)]])
                self.stopped.add(rank)

    @rule(choices=st.tuples(BACK, BACK), stay=st.booleans())
    def rewind_in_place(self, choices: tuple[int, int], stay: bool) -> None:
        self.stand_still()
        for rank, choice in zip(self.protected, choices, strict=True):
            if reach := rank.commits_to_rewind_to():
                event("rewound in place")
                rank.harness.executor.rewind(reach[-1 - choice % len(reach)])
                self.stopped.discard(rank)
        self.go_on(stay)

    @rule(choice=BACK, stay=st.booleans())
    def restart_and_copy(self, choice: int, stay: bool) -> None:
        """The victim's server dies; both go back to a commit, and the survivor's content fills the gaps."""
        self.stand_still()
        reach = [
            commit
            for commit in self.survivor.commits_to_rewind_to()
            if commit in self.victim.kept_commits() and self.victim.can_be_rebuilt_at(commit, self.survivor)
        ]
        if reach:
            commit = reach[-1 - choice % len(reach)]
            self.survivor.harness.executor.rewind(commit)
            copied = self.victim.rebuild_from(self.survivor, commit)
            event("restarted with copies" if copied else "restarted")
            self.stopped.clear()
        self.go_on(stay)

    @rule(choice=BACK, fresh_server=st.booleans(), both=st.booleans(), stay=st.booleans())
    def reload_snapshot(self, choice: int, fresh_server: bool, both: bool, stay: bool) -> None:
        self.stand_still()
        for rank in self.protected[: 1 + both]:
            if commits := rank.snapshots_in_reach():
                event("reloaded a snapshot")
                rank.reload(commits[-1 - choice % len(commits)], fresh_server)
                self.stopped.discard(rank)
        self.go_on(stay)

    @rule()
    def resume(self) -> None:
        if self.parked:
            self.go_on(stay=False)

    def go_on(self, stay: bool) -> None:
        if stay or self.stopped:
            return
        for rank in self.protected:
            rank.resume()
        self.parked = False
        self.compare()

    def compare(self) -> None:
        """State, replies and the absence of errors, once everything is done."""
        self.settle_if_running()
        for rank in self.everybody:
            assert rank.log.error_kind == 0, f"{rank.log.error_message} in {rank.log.error_operator}"
            assert rank.log.replies_different == 0
        sizes = {handle: ITEM * len(written) for handle, written in self.written.items()}
        contents = []
        for rank in self.everybody:
            rank.park()
            contents.append(rank.content(sizes))
            rank.resume()
        for handle, written in self.written.items():
            first, *others = [content[handle] for content in contents]
            for place in (place for place, known in enumerate(written) if known):
                bits = slice(ITEM * place, ITEM * (place + 1))
                assert all(other[bits] == first[bits] for other in others), f"number {place} of {handle}"
        for place in range(len(GENERATORS)):
            self.ask_generator(place)


@pytest.mark.parametrize("examples", [EXAMPLES, pytest.param(MANY, marks=pytest.mark.long)])
def test_a_rank_brought_back_to_any_commit_ends_as_one_that_was_never_disturbed(
    examples: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNDERSTUDY_SPIN_US", "1")  # a worker that has a core of its own wakes its server
    run_state_machine_as_test(
        seeded(seed)(RewindMachine),
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
