"""What of the generators of random numbers a step keeps, and when it asks for it anew."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch

from understudy.jit import generators
from understudy.jit.generators import Generators


def _go_back_in_numpy() -> None:
    """With a normal number in store where there was none, and at the same place of the Mersenne Twister."""
    numpy.random.set_state(with_one_in_store)
    numpy.random.randn()
    Generators.now()
    numpy.random.set_state(with_one_in_store)


def _go_back_in_python() -> None:
    random.gauss(0, 1)
    state = random.getstate()
    random.gauss(0, 1)
    Generators.now()
    random.setstate(state)


numpy.random.randn()
with_one_in_store = numpy.random.get_state()
DRAWS: tuple[Callable[[], object], ...] = (
    random.random,
    lambda: random.gauss(0, 1),
    lambda: random.normalvariate(0, 1),
    lambda: random.getrandbits(1),
    lambda: random.shuffle([1, 2]),
    lambda: random.seed(3),
    _go_back_in_python,
    numpy.random.rand,
    numpy.random.randn,
    lambda: numpy.random.bytes(1),
    lambda: numpy.random.permutation(2),
    lambda: numpy.random.binomial(3, 0.5),
    lambda: numpy.random.seed(3),
    _go_back_in_numpy,
    lambda: numpy.random.shuffle([1, 2]),
    lambda: torch.rand(1),
    lambda: torch.randn(1),
    lambda: torch.manual_seed(3),
)


def _states() -> tuple[str, str, str]:
    """By the functions of Python, NumPy and PyTorch themselves."""
    numbers = numpy.random.get_state(legacy=True)
    return (
        repr(random.getstate()),
        repr((numbers[0], numbers[1].tolist(), *numbers[2:])),
        repr(torch.get_rng_state().tolist()),
    )


def test_whatever_draws_or_seeds_is_seen_and_can_be_put_back() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for number in range(400):
        draw = DRAWS[number] if number < len(DRAWS) else chance.choice(DRAWS)
        draw()
        kept, states = Generators.now(), _states()
        for _ in range(chance.randrange(3)):
            chance.choice(DRAWS)()
            Generators.now()
        Generators.of(kept.packed).put_back()
        assert _states() == states, (seed, number)
        assert Generators.now() == kept, (seed, number)


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand, lambda: torch.rand(1)])
def test_a_generator_is_asked_in_full_only_behind_a_draw(
    draw: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    random.seed(1)  # with a normal number in store Python's is asked every time
    Generators.now()
    asked: list[str] = []
    for name in ("_PYTHONS", "_NUMPYS"):
        remembered = getattr(generators, name)

        def read(name: str = name, read: Callable[[], bytes] = remembered._read) -> bytes:
            asked.append(name)
            return read()

        monkeypatch.setattr(remembered, "_read", read)
    Generators.now()
    draw()
    assert asked == []
    Generators.now(), Generators.now()
    expected = {random.random: ["_PYTHONS"], numpy.random.rand: ["_NUMPYS"]}
    assert asked == expected.get(draw, [])


def test_a_state_that_does_not_lie_in_the_objects_memory_is_read_every_time() -> None:
    states = iter((b"first" * 500, b"second" * 500))
    remembered = generators._Remembered(lambda: next(states), slice(0, 2500))
    owner = random.Random(1)
    assert remembered.packed((owner,)) == b"first" * 500
    assert remembered.packed((owner,)) == b"second" * 500


def test_another_bit_generator_of_numpy_is_left_alone() -> None:
    numpy.random.seed(1)  # a normal number in store would be lost
    before, usual = Generators.now(), numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    try:
        without = Generators.now()
        assert len(without.packed) < len(before.packed)
        state = numpy.random.get_state(legacy=False)
        numpy.random.rand()
        assert Generators.now() == without
        before.put_back()
        assert numpy.random.get_state(legacy=False) != state
    finally:
        numpy.random.set_bit_generator(usual)
    assert Generators.now() == before
