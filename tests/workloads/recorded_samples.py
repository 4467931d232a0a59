"""Loaders of all kinds in one training, which writes down itself what it was handed and what it has copied.

Each line that it writes is JSON: {"ids": what the batch says of itself} or {"payload": hex of all that was
copied up to an optimizer's step}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

OUT = Path(sys.argv[1])
PARTS = sys.argv[2].split(",")
copied: list[bytes] = []
file = OUT.open("w", buffering=1)


class Numbered(Dataset[tuple[int, torch.Tensor]]):
    """Its samples say which they are."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> tuple[Any, torch.Tensor]:
        if isinstance(index, int) and index == 1000:
            raise ValueError("this one cannot be read")
        return index, torch.full((4,), float(index if isinstance(index, int) else 0))


class Stream(IterableDataset[tuple[int, torch.Tensor]]):
    def __init__(self, values: list[float]) -> None:
        self.values = values

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        return ((-1, torch.full((4,), value)) for value in self.values)


class AheadByOne(DataLoader[Any]):
    """Reads one batch ahead, and leaves out the first."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        next(batches)
        ahead = next(batches)
        for following in batches:
            yield ahead
            ahead = following
        yield ahead


class Scaled(DataLoader[Any]):
    """Makes batches anew."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return ([ids, 2 * values] for ids, values in super().__iter__())


torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
copied += [model.weight.detach().numpy().tobytes(), model.bias.detach().numpy().tobytes()]
model = model.to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def handed(ids: Any) -> None:
    known = ids.tolist() if isinstance(ids, torch.Tensor) else [ids] if isinstance(ids, int) else ids
    file.write(json.dumps({"ids": None if known[0] == -1 else list(known)}) + "\n")


def loss_of(values: torch.Tensor) -> torch.Tensor:
    copied.append(values.numpy().tobytes())
    return model(values.to("cuda")).square().mean()


def step(optimize: bool = True) -> None:
    if optimize:
        optimizer.step()
    file.write(json.dumps({"payload": b"".join(copied).hex()}) + "\n")
    copied.clear()
    optimizer.zero_grad()


def train(loader: Any, accumulated: int = 1) -> None:
    for number, (ids, values) in enumerate(loader, 1):
        handed(ids)
        loss_of(values).backward()
        if number % accumulated == 0:
            step()


def workers() -> None:
    """Persistent ones, of which what they have read ahead is never handed out as the loop is left."""
    loader = DataLoader(Numbered(40), 4, shuffle=True, num_workers=2, persistent_workers=True)
    for number, (ids, values) in enumerate(loader):
        handed(ids)
        loss_of(values).backward()
        step()
        if number == 2:
            break
    train(loader)


def workers_out_of_order() -> None:
    train(DataLoader(Numbered(12), 2, num_workers=2, in_order=False))


def accumulated() -> None:
    train(DataLoader(Numbered(24), 3, shuffle=True, drop_last=True), accumulated=2)


def evaluated() -> None:
    """Between steps, on a loader that is made anew each time."""
    for ids, values in DataLoader(Numbered(9), 3, shuffle=True):
        handed(ids)
        loss_of(values).backward()
        step()
        for others, more in DataLoader(Numbered(4), 2):
            handed(others)
            with torch.no_grad():
                loss_of(more)


def nested() -> None:
    loader = DataLoader(Numbered(4), 2)
    for ids, _ in loader:
        handed(ids)
        train(loader)


def singly() -> None:
    train(DataLoader(Numbered(3), batch_size=None))
    train(DataLoader(Numbered(6), batch_sampler=BatchSampler(SequentialSampler(range(6)), 4, False)))


def failing() -> None:
    """A sample cannot be read, in a worker and without: the batch is not handed out, and the next one is."""
    for count in (0, 1):
        batches = iter(DataLoader(Numbered(4), batch_sampler=[[0, 1], [1000, 2], [3]], num_workers=count))
        for _ in range(3):
            try:
                ids, values = next(batches)
            except ValueError:
                continue
            handed(ids)
            loss_of(values).backward()
            step()


def own_class() -> None:
    train(AheadByOne(Numbered(10), 2))


def unknown() -> None:
    for _, values in Scaled(Numbered(4), 2):
        handed(-1)
        loss_of(values).backward()
        step()
    train(DataLoader(Stream([1.0, 2.0, 3.0]), 2))


def scaled_gradients() -> None:
    """GradScaler leaves the second step out; its copies are those of the minibatch that then ends."""
    global copied
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    for number, (ids, values) in enumerate(DataLoader(Numbered(6), 2)):
        handed(ids)
        loss = loss_of(values)
        scaler.scale(loss * float("inf") if number == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if number != 1:
            file.write(json.dumps({"payload": None}) + "\n")  # the scaler copies numbers of its own
            copied = []
        optimizer.zero_grad()


class Twice(BatchSampler):
    """Yields its second batch once more."""

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(super().__iter__()):
            yield from [batch] * (1 + (number == 1))


def repeating() -> None:
    train(DataLoader(Numbered(8), batch_sampler=Twice(SequentialSampler(range(8)), 2, False)))
    train(DataLoader(Stream([1.0, 2.0, 3.0, 2.0])))
    for ids, values in DataLoader(Numbered(2)):
        handed(ids)
        for _ in range(2):
            loss_of(values).backward()
            step()


for part in PARTS:
    globals()[part]()
