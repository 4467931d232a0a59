"""Which state a save describes: where a step ends, and its generators in files (paper 001 §3.2)."""

from __future__ import annotations

import copy
import os
import pickle
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from jit_training import Training

from understudy.jit import slots
from understudy.jit.boundaries import Boundary, Zone
from understudy.jit.generators import Generators
from understudy.jit.slots import SlotFile

pytestmark = pytest.mark.drawn(3)


@dataclass
class Recorded:
    """A boundary of this process, and what it has told."""

    boundary: Boundary
    said: list[str]
    kept: list[tuple[int, Generators]]

    @property
    def obstacle(self) -> str:
        found = self.boundary.obstacle()
        return found.sentence if found is not None else ""


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    said: list[str] = []
    kept: list[tuple[int, Generators]] = []
    boundary = Boundary(lambda: None, lambda step, states: kept.append((step, states)), said.append)
    boundary.install()
    yield Recorded(boundary, said, kept)
    boundary.remove()


def test_step_ends_with_the_optimizer_and_is_settled_by_the_next_forward_pass(recorded: Recorded) -> None:
    training = Training()
    assert "no step was completed" in recorded.obstacle
    training.step()
    assert recorded.boundary.step == 1
    assert "between the optimizer's step and the next forward pass" in recorded.obstacle
    training.loss()
    assert not recorded.obstacle
    recorded.boundary.go_on_from(7)
    training.step()
    assert recorded.boundary.step == 8


def test_call_of_boundary_replaces_the_optimizer_and_counts_the_first_step_once(recorded: Recorded) -> None:
    training, other = Training(), Training()
    recorded.boundary.go_on_from(10)
    for step in range(11, 14):
        training.step()
        other.step()
        if step > 11:
            assert "between the optimizer's step and jit.boundary()" in recorded.obstacle
        recorded.boundary.declare()
        assert (recorded.boundary.step, recorded.obstacle) == (step, "")
    assert not recorded.said


def test_generators_and_statistics_become_those_of_the_last_boundary(recorded: Recorded) -> None:
    training = Training()
    training.step()
    training.step()
    buffers, states = training.buffers(), Generators.now()
    training.loss().backward()
    random.random(), numpy.random.rand()
    assert recorded.boundary.moved()
    assert recorded.boundary.put_back() is None
    assert Generators.now() == states and not recorded.boundary.moved()
    assert all(torch.equal(buffers[name], now) for name, now in training.buffers().items())


def test_buffer_that_is_changed_for_the_first_time_is_named(recorded: Recorded) -> None:
    training = Training()
    training.model.register_buffer("late", torch.zeros(2))
    training.step()
    training.step()
    training.model.get_buffer("late").add_(1)
    assert "'late'" in (recorded.boundary.put_back() or "")


def test_fault_inside_the_optimizer_is_half_a_step_even_if_it_was_caught(recorded: Recorded) -> None:
    class Fails(torch.optim.SGD):
        fails = False

        def _init_group(self, *given: Any) -> Any:
            if self.fails:
                raise ValueError("chosen")
            return super()._init_group(*given)

    training = Training()
    training.optimizer = optimizer = Fails(training.model.parameters(), lr=0.1)
    training.step()
    optimizer.fails = True
    with pytest.raises(ValueError, match="chosen"):
        training.step()
    assert recorded.boundary.zone is Zone.UPDATING
    assert "half done" in recorded.obstacle
    optimizer.fails = False
    training.step()
    training.loss()
    assert (recorded.boundary.step, recorded.obstacle) == (2, "")


def test_optimizer_inside_another_one_is_one_step(recorded: Recorded) -> None:
    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            inner.step()

    torch.optim.SGD(Training().model.parameters(), lr=0.1)  # from here on PyTorch hooks SGD's step, too
    training, other = Training(), Training()
    inner = other.optimizer
    other.loss().backward()
    training.optimizer = Outer(training.model.parameters(), lr=0.1)
    training.step()
    assert recorded.boundary.step == 1
    training.loss()
    assert not recorded.obstacle and not recorded.said


def test_two_optimizers_without_a_boundary_are_told_once_and_nothing_is_saved(recorded: Recorded) -> None:
    one, two = Training(), Training()
    for _ in range(3):
        one.step()
        two.step()
    one.loss()
    (sentence,) = recorded.said
    assert "several optimizers" in sentence and "jit.boundary()" in sentence
    assert "several optimizers" in recorded.obstacle
    del two
    import gc

    gc.collect()
    assert not recorded.obstacle, "an optimizer that is gone does not count"


def test_generators_of_the_step_in_progress_are_known_when_its_backward_pass_begins(
    recorded: Recorded,
) -> None:
    training = Training()
    training.step()
    del recorded.kept[:]
    loss = training.loss()
    expected = Generators.now()
    loss.backward()
    assert recorded.kept == [(2, expected)]


def test_model_with_hooks_can_be_copied_and_pickled(recorded: Recorded) -> None:
    training = Training()
    training.step()
    training.loss()
    copied = pickle.loads(pickle.dumps(copy.deepcopy(training.model)))
    assert copied(torch.ones(2, 3)).shape == (2, 1)


def test_generators_are_found_by_step_in_the_newest_attempt_that_has_them(tmp_path: Path) -> None:
    first = SlotFile(tmp_path, "a/b")
    states = {}
    for step in range(1, 7):
        random.random(), torch.rand(1), numpy.random.rand()
        states[step] = Generators.now()
        first.write(step, states[step])
    torch.rand(1)
    SlotFile(tmp_path, "again").write(5, Generators.now())
    SlotFile(tmp_path, "third")
    assert slots.find(tmp_path, 6) == states[6]
    assert slots.find(tmp_path, 5) == Generators.now() != states[5]
    assert slots.find(tmp_path, 2) is None, "written over"
    found = slots.find(tmp_path, 3)
    assert found is not None
    found.put_back()
    assert Generators.now() == states[3]


@pytest.mark.parametrize("size", [0, 7, 40, 16384])
def test_damaged_slot_is_none(tmp_path: Path, size: int) -> None:
    file = SlotFile(tmp_path, "a")
    file.write(4, Generators.now())
    content = bytearray(file.path.read_bytes())
    if size == 16384:
        content[100] ^= 1
    else:
        del content[size:]
    file.path.write_bytes(content)
    assert slots.find(tmp_path, 4) is None


def test_slots_that_are_links_pipes_or_lie_are_not_read(tmp_path: Path) -> None:
    file = SlotFile(tmp_path / "a", "x")
    file.write(4, Generators.now())
    place = tmp_path / "b"
    place.mkdir()
    (place / "0000-link").symlink_to(file.path)
    os.mkfifo(place / "0001-pipe")
    (place / "0002-folder").mkdir()
    (place / "no-number").write_bytes(file.path.read_bytes())
    assert slots.find(place, 4) is None
    with pytest.raises(ValueError, match="cut short"):
        Generators.of(b"short")
    with pytest.raises(ValueError, match="lengths"):
        Generators.of(b"\xff" * 9000)


def test_newest_files_are_kept(tmp_path: Path) -> None:
    made = [SlotFile(tmp_path, str(n)).path for n in range(6)]
    slots.remove_old(tmp_path, 4)
    assert sorted(tmp_path.iterdir()) == made[2:]


def test_passes_inside_a_closure_are_settled_until_parameters_change(recorded: Recorded) -> None:
    """Lightning does all of a step in there; LBFGS calls it more than once."""
    for optimizer_of in (torch.optim.AdamW, torch.optim.LBFGS):
        training = Training()
        optimizer = optimizer_of(training.model.parameters(), lr=0.1)
        zones: list[Zone] = []

        def closure(
            training: Training = training, optimizer: Any = optimizer, zones: list[Zone] = zones
        ) -> torch.Tensor:
            zones.append(recorded.boundary.zone)
            optimizer.zero_grad()
            loss = training.loss()
            loss.backward()
            return loss

        recorded.boundary.declare()
        optimizer.step(closure)
        assert recorded.boundary.zone is Zone.UNSETTLED
        recorded.boundary.declare()
        assert zones[0] is Zone.SETTLED and set(zones[1:]) <= {Zone.UPDATING}
        recorded.boundary.declare()
        zones.clear()
        optimizer.step(closure=closure)
        assert zones[0] is Zone.SETTLED


def test_optimizer_of_somebody_else_may_change_parameters_in_front_of_its_closure(recorded: Recorded) -> None:
    class Perturbing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            return closure()

    training = Training()
    optimizer = Perturbing(training.model.parameters(), lr=0.1)
    zones: list[Zone] = []
    recorded.boundary.declare()
    optimizer.step(lambda: zones.append(recorded.boundary.zone))
    assert zones == [Zone.UPDATING]


def test_numbers_drawn_between_steps_belong_to_the_completed_one_if_the_script_says_so(
    recorded: Recorded,
) -> None:
    recorded.boundary.keep_generators()
    assert recorded.kept == [], "nothing is completed"
    recorded.boundary.declare()
    torch.rand(1)
    behind_evaluation = Generators.now()
    recorded.boundary.keep_generators()
    torch.rand(1)
    assert recorded.kept[-1] == (recorded.boundary.step, behind_evaluation)
    assert recorded.boundary.put_back() is None
    assert Generators.now() == behind_evaluation
