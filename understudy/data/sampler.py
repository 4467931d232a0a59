"""A sampler that goes on behind the last step that counts, on as many ranks as there are (paper 002 §4.2).

**What counts is what the training has consumed.** Workers of a `DataLoader` read ahead, so what the sampler
has handed out says nothing. It therefore never moves by being iterated: `advance()` moves it, once for each
step, called by the training (paper §4.8: a step counts when its update is done and the cursor has moved
once).

    for batch in loader:            # one epoch, from the cursor on
        ...; optimizer.step()
        sampler.advance()

`steps(loader)` does that itself, across epochs. It counts a batch *as it hands it out*, so that a checkpoint
taken behind `optimizer.step()` in the loop's body has this step in it, as the model has.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Sampler

from .plan import EpochPlan, whole_number
from .ranks import Ranks

T = TypeVar("T")


@dataclass(frozen=True)
class Step(Generic[T]):
    """A batch, with the place that it has in the run and the indices that this rank has of it."""

    epoch: int
    step: int
    global_step: int
    indices: list[int]
    batch: T


@dataclass(frozen=True)
class SamplerState:
    """What a checkpoint keeps of a sampler. No rank is in it: any number of ranks that divides B goes on."""

    epoch: int
    cursor_step: int
    plan: EpochPlan
    order: str
    """Fingerprint of the epoch's order."""

    def as_fields(self) -> dict[str, Any]:
        """{epoch, cursor_step, seed} as in the paper, and what they are about."""
        place = {"epoch": self.epoch, "cursor_step": self.cursor_step, "order": self.order}
        return place | self.plan.as_fields()

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> SamplerState:
        """Raises ValueError, in one sentence, for what no sampler has written."""
        try:
            if not isinstance(fields, Mapping):
                raise ValueError(f"It is a {type(fields).__name__}, not a dictionary.")
            plan = EpochPlan.of(fields)
            epoch, cursor = (whole_number(name, fields[name]) for name in ("epoch", "cursor_step"))
            if epoch < 0 or not 0 <= cursor < plan.steps:
                raise ValueError(
                    f"Step {cursor} of epoch {epoch} is no place in epochs of {plan.steps} steps."
                )
            if not isinstance(fields["order"], str):
                raise ValueError("Its fingerprint of the order is no text.")
        except KeyError as missing:
            raise ValueError(f"The sampler's state is damaged: it lacks the field {missing}.") from None
        except ValueError as error:
            raise ValueError(f"The sampler's state is damaged: {error}") from None
        return cls(epoch, cursor, plan, fields["order"])

    def differs_from(self, plan: EpochPlan) -> str | None:
        """Why a sampler with another plan cannot go on with this state; None if it can."""
        for name, of in (
            ("dataset_size", "data set of {} samples"),
            ("global_batch", "global batch of {}"),
            ("shuffle", "sampler with shuffle={}"),
        ):
            theirs, ours = getattr(self.plan, name), getattr(plan, name)
            if theirs != ours:
                return (
                    f"The state is that of a {of.format(theirs)}, and this sampler has {ours}; going on "
                    "would repeat samples or leave some out, so make the sampler as it was made then."
                )
        return None


class ResumableSampler(Sampler[int]):
    """Which samples this rank reads, from the step on that a checkpoint has.

        sampler = ResumableSampler(dataset, global_batch=64, seed=1)
        loader = DataLoader(dataset, batch_sampler=sampler.batches, num_workers=2, persistent_workers=True)
        loader = DataLoader(dataset, sampler=sampler, batch_size=sampler.local_batch)  # the same batches

    The global batch stays what it is whatever the number of ranks; each step's samples, over all ranks,
    depend on (seed, epoch, step) alone, so a run of N ranks may go on with M (eqs. 3 and 4; the paper leaves
    that open).

    What random augmentation does *in worker processes* cannot be gone on with: their generators start anew
    with each iteration of a loader. Derive it from (seed, epoch, index) where its bits matter.
    """

    def __init__(
        self,
        data: Sized | int,
        global_batch: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """`data`: a data set, or its size in samples. Rank and world size are the process group's by default.

        Raises ValueError where the ranks do not divide the global batch, or the data set does not fill one.
        """
        self.plan = EpochPlan(data if isinstance(data, int) else len(data), global_batch, seed, shuffle)
        if (rank is None) != (world_size is None):
            raise ValueError("Pass both rank and world_size, or neither.")
        ranks = Ranks.of() if rank is None or world_size is None else Ranks(rank, world_size)
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.local_batch = self.plan.local_batch(self.world_size)
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"Rank {self.rank} is none of the {self.world_size} ranks.")
        self.epoch, self.cursor_step = 0, 0
        self.batches = Batches(self)
        self._drawn: tuple[int, torch.Tensor] | None = None
        self._read_to_the_end: tuple[int, int] | None = None

    @property
    def global_step(self) -> int:
        """Steps that the training has consumed since its beginning."""
        return self.epoch * self.plan.steps + self.cursor_step

    def advance(self) -> None:
        """The training has consumed a step; behind the last one of an epoch, the next epoch begins."""
        self.cursor_step += 1
        if self.cursor_step == self.plan.steps:
            self.epoch, self.cursor_step = self.epoch + 1, 0

    def indices(self, epoch: int, step: int) -> list[int]:
        """This rank's samples of a step (eq. 4), whether it is past or to come."""
        return self.plan.share(self._order(epoch), step, self.rank, self.world_size).tolist()

    def __iter__(self) -> Iterator[int]:
        """The samples of what is left of the epoch. Iterating does not move the sampler."""
        return (index for batch in self.batches for index in batch)

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch, wherever the cursor is: len(loader) does not shrink."""
        return self.plan.steps * self.local_batch

    def steps(self, loader: DataLoader[Any], until: int | None = None) -> Iterator[Step[Any]]:
        """The batches of a loader that has this sampler, epoch after epoch, each counted as it is handed out.

        `until`: end before the step whose `global_step` this is. Take checkpoints behind `optimizer.step()`.
        The generator of the CPU is left alone when an epoch is begun or gone on with (a DataLoader draws from
        it whenever it is iterated, and a resumed run iterates once more), so that dropout repeats its bits.
        """
        self._check(loader)
        while until is None or self.global_step < until:
            epoch, first = self.epoch, self.cursor_step
            batches = self._begin(loader)
            for step in range(first, self.plan.steps):
                indices, number = self.indices(epoch, step), self.global_step
                batch = next(batches)
                self.advance()
                counted = (self.epoch, self.cursor_step)
                yield Step(epoch, step, number, indices, batch)
                if (self.epoch, self.cursor_step) != counted:
                    raise RuntimeError(
                        f"The sampler was moved from {counted} to {(self.epoch, self.cursor_step)} inside a "
                        "loop over steps(), which counts by itself; take advance() and load_state_dict() "
                        "out of it."
                    )
                if self.global_step == until:
                    return
            next(batches, None)  # tells workers that the epoch is over

    def state_dict(self) -> dict[str, Any]:
        """Where the training is: plain numbers and texts."""
        order = self.plan.fingerprint(self._order(self.epoch))
        return SamplerState(self.epoch, self.cursor_step, self.plan, order).as_fields()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there, with the state's seed. Raises ValueError, with nothing changed, if it does not fit."""
        found = SamplerState.of(state)
        if complaint := found.differs_from(self.plan):
            raise ValueError(complaint)
        order = found.plan.order(found.epoch)
        if found.plan.fingerprint(order) != found.order:
            raise ValueError(
                f"PyTorch {torch.__version__} draws another order of epoch {found.epoch} from seed "
                f"{found.plan.seed} than the state was written with; go on with the version that began, or "
                "begin an epoch anew."
            )
        self.plan = found.plan
        self.epoch, self.cursor_step = found.epoch, found.cursor_step
        self._drawn, self._read_to_the_end = (found.epoch, order), None

    def _order(self, epoch: int) -> torch.Tensor:
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = (epoch, self.plan.order(epoch))
        return self._drawn[1]

    def _left_of_epoch(self) -> Iterator[list[int]]:
        begun = (self.epoch, self.cursor_step)
        if begun == self._read_to_the_end:
            warnings.warn(
                f"The batches of epoch {begun[0]} are read a second time from step {begun[1]} on, because "
                "none of them was counted; call sampler.advance() behind each step, or loop over "
                "sampler.steps(loader).",
                stacklevel=3,
            )
        order = self._order(self.epoch)
        return self._shares(begun, order)

    def _shares(self, begun: tuple[int, int], order: torch.Tensor) -> Iterator[list[int]]:
        for step in range(begun[1], self.plan.steps):
            yield self.plan.share(order, step, self.rank, self.world_size).tolist()
        self._read_to_the_end = begun

    def _check(self, loader: DataLoader[Any]) -> None:
        by_batches = loader.batch_sampler is self.batches
        by_samples = loader.sampler is self and loader.batch_size == self.local_batch
        if not (by_batches or by_samples):
            raise ValueError(
                "The loader does not read what this sampler says; make it with "
                "batch_sampler=sampler.batches, or with sampler=sampler and "
                f"batch_size=sampler.local_batch, which is {self.local_batch}."
            )
        if loader.num_workers and not getattr(loader, "in_order", True):
            raise ValueError(
                "The loader has in_order=False, so that nobody knows which step a batch is of; leave it out."
            )

    def _begin(self, loader: DataLoader[Any]) -> Iterator[Any]:
        generator = torch.default_generator
        state = generator.get_state()
        try:  # what workers are seeded with depends on the place alone, too
            generator.manual_seed(self.plan.mixed("workers", self.rank, self.epoch, self.cursor_step))
            return iter(loader)
        finally:
            generator.set_state(state)


class Batches(Sampler[list[int]]):
    """A `ResumableSampler` as a `batch_sampler`: a list of indices for each step."""

    def __init__(self, sampler: ResumableSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return self.sampler._left_of_epoch()

    def __len__(self) -> int:
        """Steps of a whole epoch, wherever the cursor is."""
        return self.sampler.plan.steps
