"""Which samples belong to which step and rank: arithmetic alone, no position (paper 002 §3.3, §4.2)."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, SupportsIndex

import torch

_FINGERPRINTED = 1024
"""Indices of an epoch's order that its fingerprint covers: another way to permute differs among the first."""


@dataclass(frozen=True)
class EpochPlan:
    """The order of every epoch and its cut into steps, the same for each rank and each number of ranks.

    `dataset_size` is D and `global_batch` is B, both in samples. Raises ValueError where no epoch has a step.
    """

    dataset_size: int
    global_batch: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name in ("dataset_size", "global_batch", "seed"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        if not isinstance(self.shuffle, bool):
            raise ValueError(f"shuffle is {self.shuffle!r}; it must be True or False.")
        if self.global_batch < 1:
            raise ValueError(f"The global batch is {self.global_batch}; it must be at least 1.")
        if self.dataset_size < self.global_batch:
            raise ValueError(
                f"A data set of {self.dataset_size} samples does not fill one global batch of "
                f"{self.global_batch}; an epoch would have no steps. Choose a smaller global batch."
            )

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> EpochPlan:
        """The plan that a record describes; whatever else is in it is not looked at."""
        try:
            return cls(*(fields[name] for name in ("dataset_size", "global_batch", "seed", "shuffle")))
        except KeyError as missing:
            raise ValueError(f"It lacks the field {missing}.") from None

    @property
    def steps(self) -> int:
        """S = ⌊D / B⌋, the steps of each epoch (eq. 1)."""
        return self.dataset_size // self.global_batch

    @property
    def samples(self) -> int:
        """N = S · B, the samples of each epoch (eq. 1); D − N others wait for an epoch that draws them."""
        return self.steps * self.global_batch

    def order(self, epoch: int) -> torch.Tensor:
        """The N indices of an epoch in the order of their use, int64 (perm_e of eq. 3).

        Takes 8 · D bytes and is drawn anew with each call: it depends on (seed, epoch) alone.
        """
        if not self.shuffle:
            return torch.arange(self.samples)
        generator = torch.Generator().manual_seed(self.mixed("order", epoch))
        return torch.randperm(self.dataset_size, generator=generator)[: self.samples]

    def window(self, order: torch.Tensor, step: int) -> torch.Tensor:
        """The B indices of a step, of all ranks together (eq. 3)."""
        return order[step * self.global_batch : (step + 1) * self.global_batch]

    def share(self, order: torch.Tensor, step: int, rank: int, world_size: int) -> torch.Tensor:
        """The B / W indices of a step that are one rank's: those shares, joined, are the window (eq. 4)."""
        each = self.local_batch(world_size)
        return self.window(order, step)[rank * each : (rank + 1) * each]

    def local_batch(self, world_size: int) -> int:
        """B / W, a rank's samples of each step. Raises ValueError where the ranks do not divide B."""
        if world_size < 1:
            raise ValueError(f"The world size is {world_size}; it must be at least 1.")
        if self.global_batch % world_size:
            raise ValueError(
                f"A global batch of {self.global_batch} cannot be divided among {world_size} ranks; start "
                f"as many ranks as divide {self.global_batch}, which is kept so that no step changes."
            )
        return self.global_batch // world_size

    def fingerprint(self, order: torch.Tensor) -> str:
        """Of an epoch's order: another version of PyTorch may draw another one from the same seed."""
        first = " ".join(map(str, order[:_FINGERPRINTED].tolist()))
        return hashlib.blake2b(first.encode(), digest_size=8).hexdigest()

    def mixed(self, purpose: str, *numbers: int) -> int:
        """A seed of 63 bits. Seed 1 in epoch 2 is not seed 2 in epoch 1, as with a sum."""
        words = " ".join(map(str, (purpose, self.seed, *numbers)))
        return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big") >> 1

    def as_fields(self) -> dict[str, Any]:
        """What `of` takes."""
        return asdict(self)


def whole_number(name: str, value: SupportsIndex) -> int:
    """As an int, NumPy's and tensors too; not what is true, false, broken or text."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; it must be a whole number.") from None
