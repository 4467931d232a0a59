"""The sampler: which samples each rank gets, and where a restarted run goes on (paper 002 §3.3, §4.2)."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from understudy.data import EpochPlan, ResumableSampler

SIZES = st.integers(min_value=1, max_value=24)


class Numbers(Dataset[int]):
    """Yields what it is asked for."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def samplers(plan: EpochPlan, ranks: int, state: dict[str, Any] | None = None) -> list[ResumableSampler]:
    """Those of all ranks, after a state has been loaded."""
    made = [
        ResumableSampler(
            plan.dataset_size,
            plan.global_batch,
            rank=rank,
            world_size=ranks,
            seed=plan.seed,
            shuffle=plan.shuffle,
        )
        for rank in range(ranks)
    ]
    for sampler in made:
        if state is not None:
            sampler.load_state_dict(state)
    return made


def train(of_ranks: list[ResumableSampler], steps: int) -> list[list[int]]:
    """The samples of so many steps, each of all ranks together, as if one trained on them."""
    found: list[list[int]] = []
    while len(found) < steps:
        for parts in zip(*(sampler.batches for sampler in of_ranks), strict=True):
            found.append([index for part in parts for index in part])
            for sampler in of_ranks:
                sampler.advance()
            if len(found) == steps:
                break
    return found


@st.composite
def resumed_runs(draw: st.DrawFn) -> tuple[EpochPlan, int, int, int, int]:
    """A plan, N, M, the steps before the restart, and those in all."""
    before, after, each = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    batch = before * after * each
    plan = EpochPlan(
        draw(st.integers(batch, 5 * batch)), batch, draw(st.integers(0, 2**40)), draw(st.booleans())
    )
    total = draw(st.integers(1, 3 * plan.steps + 2))
    return plan, before, after, draw(st.integers(0, total)), total


@settings(max_examples=150, deadline=None)
@given(resumed_runs())
def test_n_ranks_cut_at_any_step_go_on_as_m_ranks_with_the_samples_of_each_step(
    run: tuple[EpochPlan, int, int, int, int],
) -> None:
    plan, before, after, cut, total = run
    undisturbed = train(samplers(plan, 1), total)

    first = samplers(plan, before)
    used = train(first, cut)
    states = [sampler.state_dict() for sampler in first]
    used += train(samplers(plan, after, states[0]), total - cut)

    assert all(state == states[0] for state in states), "the state has nothing of a rank"
    assert used == undisturbed


@settings(max_examples=150, deadline=None)
@given(resumed_runs())
def test_each_epoch_has_each_sample_at_most_once_and_leaves_out_less_than_a_batch(
    run: tuple[EpochPlan, int, int, int, int],
) -> None:
    plan, ranks, _, _, _ = run

    used = train(samplers(plan, ranks), 2 * plan.steps)

    for epoch in (used[: plan.steps], used[plan.steps :]):
        counted = Counter(index for step in epoch for index in step)
        assert set(counted.values()) == {1}
        assert counted.keys() <= set(range(plan.dataset_size))
        assert plan.dataset_size - len(counted) == plan.dataset_size % plan.global_batch


def test_the_state_is_the_papers_and_says_what_it_is_about() -> None:
    sampler = ResumableSampler(20, 6, rank=0, world_size=2, seed=3)
    for _ in range(4):
        sampler.advance()

    state = sampler.state_dict()

    assert (state["epoch"], state["cursor_step"], state["seed"]) == (1, 1, 3)
    assert state.keys() - {"epoch", "cursor_step", "seed"} == {
        "dataset_size",
        "global_batch",
        "shuffle",
        "order",
    }
    assert sampler.global_step == 4


def test_without_shuffling_samples_come_in_their_order_and_with_it_each_epoch_has_its_own() -> None:
    plain, shuffled = EpochPlan(10, 3, shuffle=False), EpochPlan(10, 3, seed=1)

    assert plain.order(5).tolist() == list(range(9))
    assert shuffled.order(0).tolist() != shuffled.order(1).tolist()
    assert shuffled.order(1).tolist() == EpochPlan(10, 3, seed=1).order(1).tolist()
    assert shuffled.order(1).tolist() != EpochPlan(10, 3, seed=2).order(0).tolist(), (
        "seed and epoch do not add"
    )


def test_drawing_an_order_leaves_the_generator_of_the_script_alone() -> None:
    before = torch.get_rng_state()

    train(samplers(EpochPlan(12, 4), 2), 5)

    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("as_batches", [True, False])
@pytest.mark.parametrize("persistent", [None, False, True])
def test_a_loader_that_reads_ahead_goes_on_behind_the_batch_that_was_consumed(
    as_batches: bool, persistent: bool | None
) -> None:
    def loader(sampler: ResumableSampler) -> DataLoader[int]:
        workers: dict[str, Any] = {}
        if persistent is not None:
            workers = {"num_workers": 1, "persistent_workers": persistent, "prefetch_factor": 4}
        if as_batches:
            return DataLoader(Numbers(23), batch_sampler=sampler.batches, **workers)
        return DataLoader(Numbers(23), sampler=sampler, batch_size=sampler.local_batch, **workers)

    def consumed(sampler: ResumableSampler, until: int) -> list[list[int]]:
        return [step.batch.tolist() for step in sampler.steps(loader(sampler), until)]

    whole = consumed(ResumableSampler(23, 4, rank=1, world_size=2), 12)
    first = ResumableSampler(23, 4, rank=1, world_size=2)
    used = consumed(first, 7)
    second = ResumableSampler(23, 4, rank=1, world_size=2)
    second.load_state_dict(first.state_dict())
    used += consumed(second, 12)

    assert used == whole
    assert whole == [second.indices(*divmod(number, 5)) for number in range(12)]


def test_a_plain_loop_that_advances_itself_counts_the_same() -> None:
    sampler = ResumableSampler(23, 4, rank=0, world_size=1, seed=9)
    loader = DataLoader(Numbers(23), batch_sampler=sampler.batches, generator=torch.Generator())
    used = []
    for _ in range(2):
        for batch in loader:
            used.append(batch.tolist())
            sampler.advance()

    assert used == [sampler.indices(*divmod(number, 5)) for number in range(10)]
    assert (sampler.epoch, sampler.cursor_step) == (2, 0)


def test_the_length_of_a_loader_is_that_of_a_whole_epoch_wherever_it_is() -> None:
    sampler = ResumableSampler(Numbers(23), 4, rank=0, world_size=2)
    by_batches = DataLoader(Numbers(23), batch_sampler=sampler.batches)
    by_samples = DataLoader(Numbers(23), sampler=sampler, batch_size=2)
    sampler.advance()

    assert (len(by_batches), len(by_samples), len(list(by_batches)), len(list(by_samples))) == (5, 5, 4, 4)


def test_beginning_an_epoch_or_going_on_in_one_draws_nothing_from_the_generator_of_the_cpu() -> None:
    sampler = ResumableSampler(8, 2, rank=0, world_size=1)
    loader = DataLoader(Numbers(8), batch_sampler=sampler.batches)
    before = torch.get_rng_state()

    for _ in sampler.steps(loader, 9):
        assert torch.equal(before, torch.get_rng_state())

    iter(loader)
    assert not torch.equal(before, torch.get_rng_state()), "a DataLoader alone does draw"


def test_an_epoch_that_is_read_twice_because_nobody_counted_is_told() -> None:
    sampler = ResumableSampler(8, 2, rank=0, world_size=1)
    loader = DataLoader(Numbers(8), batch_sampler=sampler.batches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = [batch.tolist() for batch in loader]

    with pytest.warns(UserWarning, match=r"read a second time from step 0 on.*call sampler\.advance"):
        second = [batch.tolist() for batch in loader]

    assert first == second


def test_moving_the_sampler_inside_a_loop_that_counts_is_refused() -> None:
    sampler = ResumableSampler(8, 2, rank=0, world_size=1)
    loop: Iterator[Any] = sampler.steps(DataLoader(Numbers(8), batch_sampler=sampler.batches))
    next(loop)
    sampler.advance()

    with pytest.raises(RuntimeError, match=r"moved from \(0, 1\) to \(0, 2\) inside a loop over steps"):
        next(loop)


def test_loaders_that_do_not_read_what_the_sampler_says_are_refused() -> None:
    sampler, other = (ResumableSampler(8, 4, rank=0, world_size=2) for _ in range(2))
    for loader in (
        DataLoader(Numbers(8), batch_size=2),
        DataLoader(Numbers(8), batch_sampler=other.batches),
        DataLoader(Numbers(8), sampler=sampler, batch_size=4),
    ):
        with pytest.raises(
            ValueError, match=r"does not read what this sampler says.*local_batch, which is 2"
        ):
            next(sampler.steps(loader))
    unordered = DataLoader(Numbers(8), batch_sampler=sampler.batches, num_workers=1, in_order=False)
    with pytest.raises(ValueError, match="in_order=False"):
        next(sampler.steps(unordered))


@given(SIZES, SIZES)
def test_a_global_batch_that_ranks_do_not_divide_is_refused_in_one_sentence(batch: int, ranks: int) -> None:
    assume(batch % ranks)

    with pytest.raises(
        ValueError, match=rf"^A global batch of {batch} cannot be divided among {ranks} ranks"
    ):
        ResumableSampler(100, batch, rank=0, world_size=ranks)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"data": 3, "global_batch": 4}, "A data set of 3 samples does not fill one global batch of 4"),
        ({"data": 3, "global_batch": 0}, "The global batch is 0"),
        ({"data": 3, "global_batch": 1.5}, "global_batch is 1.5; it must be a whole number"),
        ({"data": 3, "global_batch": True}, "global_batch is True"),
        ({"data": 3, "global_batch": 1, "seed": "x"}, "seed is 'x'"),
        ({"data": 3, "global_batch": 1, "shuffle": 1}, "shuffle is 1"),
        ({"data": 4, "global_batch": 4, "rank": 2}, "Rank 2 is none of the 2 ranks"),
        ({"data": 4, "global_batch": 4, "rank": None}, "Pass both rank and world_size"),
        ({"data": 4, "global_batch": 4, "world_size": 0}, "The world size is 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ResumableSampler(**{"rank": 0, "world_size": 2, **arguments})


def test_a_rank_that_cannot_know_of_the_others_yet_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(RuntimeError, match=r"WORLD_SIZE is 2.*init_process_group first"):
        ResumableSampler(8, 2)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dataset_size": 25}, "that of a data set of 25 samples, and this sampler has 24"),
        ({"global_batch": 8}, "that of a global batch of 8, and this sampler has 4"),
        ({"shuffle": False}, "that of a sampler with shuffle=False, and this sampler has True"),
        ({"order": "00"}, "draws another order of epoch 1"),
        ({"cursor_step": 6}, "damaged: Step 6 of epoch 1 is no place in epochs of 6 steps"),
        ({"cursor_step": -1}, "damaged: Step -1"),
        ({"epoch": -1}, "damaged"),
        ({"epoch": "1"}, "damaged: epoch is '1'"),
        ({"seed": None}, "damaged: seed is None"),
        ({"dataset_size": 10**400}, "that of a data set of 1000"),
        ({"order": 3}, "damaged: Its fingerprint"),
        ({"global_batch": 0}, "damaged: The global batch is 0"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(
    change: dict[str, Any], sentence: str
) -> None:
    writer = ResumableSampler(24, 4, rank=0, world_size=1, seed=7)
    for _ in range(8):
        writer.advance()
    state = writer.state_dict()
    reader = ResumableSampler(24, 4, rank=0, world_size=1)
    before = reader.state_dict()

    with pytest.raises(ValueError, match=sentence):
        reader.load_state_dict(state | change)

    assert reader.state_dict() == before
    reader.load_state_dict(state)
    assert reader.state_dict() == state


@pytest.mark.parametrize("field", ["epoch", "cursor_step", "seed", "dataset_size", "order"])
def test_a_state_without_one_of_its_fields_is_damaged(field: str) -> None:
    sampler = ResumableSampler(24, 4, rank=0, world_size=1)
    state = sampler.state_dict()
    del state[field]

    with pytest.raises(ValueError, match=rf"damaged.*lacks the field '{field}'"):
        sampler.load_state_dict(state)
    with pytest.raises(ValueError, match="damaged: It is a list"):
        sampler.load_state_dict([])  # type: ignore[arg-type]
