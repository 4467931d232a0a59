"""Random training jobs: data, tensor and pipeline parallel, replicated, sharded and rank-private state."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from simulation.programs import Combine, Communicator, Program, Writer, mix

SIZES = ((0.7, 2, 4), (0.28, 5, 8), (0.018, 9, 32), (0.002, 100, 256))
"""(share of the jobs, smallest world, largest world)"""


@dataclass(frozen=True)
class Shape:
    """What a job looks like; ranks are numbered data-major, pipeline-minor."""

    data: int
    tensor: int
    pipeline: int
    steps: int
    batches: int
    layers: int
    sharded: bool
    private: bool
    norm: bool
    everybody: bool
    barrier: bool
    crossing: bool
    keeps: bool
    reads: float
    automatic: float
    leaves: bool
    passing: bool

    @property
    def world(self) -> int:
        """Ranks."""
        return self.data * self.tensor * self.pipeline


def some_shape(chance: random.Random) -> Shape:
    """A job."""
    draw, low, high = chance.random(), 2, 8
    for share, smallest, largest in SIZES:
        if draw < share:
            low, high = smallest, largest
            break
        draw -= share
    factors = [
        (data, tensor, pipeline)
        for data in (*range(1, high + 1), *range(2, high + 1))
        for tensor in ((1, 2, 4) if data * 4 <= high * 2 else (1, 2))
        for pipeline in (1, 2, 3, 4)
        if low <= data * tensor * pipeline <= high
    ]
    data, tensor, pipeline = chance.choice(factors)
    many = data * tensor * pipeline > 32
    return Shape(
        data, tensor, pipeline,
        steps=chance.randint(1, 2) if many else chance.choice((1, 2, 3, 4, 6)),
        batches=chance.choice((1, 1, 2)),
        layers=chance.choice((1, 1, 2)),
        sharded=chance.random() < 0.3,
        private=chance.random() < 0.5,
        norm=chance.random() < 0.25,
        everybody=chance.random() < 0.6,
        barrier=chance.random() < 0.6,
        crossing=chance.random() < 0.15,
        keeps=chance.random() < 0.4,
        reads=chance.choice((0.0, 0.3, 1.0)),
        automatic=chance.choice((0.0, 0.0, 0.2)),
        leaves=chance.random() < 0.1,
        passing=chance.random() < 0.15,
    )  # fmt: skip


@dataclass
class _Rank:
    number: int
    stage: int
    data: Communicator | None = None
    tensor: Communicator | None = None
    pipe: Communicator | None = None
    parameters: list[int] = field(default_factory=list)
    momenta: list[int | None] = field(default_factory=list)
    statistics: int | None = None
    loss: int | None = None
    kept: list[tuple[int, int]] = field(default_factory=list)
    """(handle, step after which it goes)"""


class Job:
    """Writes the programs of a job of a given shape."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape = shape
        self._seed = seed
        self._chance = random.Random(seed)
        self._writer = Writer(shape.world, mix(seed, 1))
        self._ranks = [_Rank(number, number % shape.pipeline) for number in range(shape.world)]
        self._everybody: Communicator | None = None
        self._passing: Communicator | None = None
        self._order = list(range(shape.world))

    @property
    def groups(self) -> list[Communicator]:
        """Every communicator of the job, by number."""
        return self._writer.communicators

    def looks_replicated(self, rank: int) -> set[int]:
        """What a job that has run for long believes to have replicas."""
        if self._shape.data == 1:
            return set()
        mine = self._ranks[rank]
        return {*mine.parameters, *(handle for handle in mine.momenta if handle is not None)}

    def _shuffled(self) -> list[_Rank]:
        self._chance.shuffle(self._order)
        return [self._ranks[number] for number in self._order]

    def programs(self) -> list[Program]:
        """Write them."""
        self._groups()
        for rank in self._shuffled():
            self._begin(rank)
        if self._shape.private and self._chance.random() < 0.5:
            for group in self._of("data"):
                for index in range(self._shape.layers):
                    self._collect(group, Combine.BROADCAST, 0, index)
        for step in range(1, self._shape.steps + 1):
            for batch in range(self._shape.batches):
                self._batch(step, batch)
            self._step(step)
            if self._shape.passing and self._shape.world > 1:
                self._passing_group()
        if self._shape.barrier and self._everybody is not None:
            self._barrier()
        if self._shape.leaves:
            for rank in self._shuffled():
                if rank.data is not None:
                    self._writer.leave(rank.data, rank.number)
                    self._commit(rank, False)
        return self._writer.end()

    def _groups(self) -> None:
        shape, writer = self._shape, self._writer
        groups: list[tuple[str, Communicator]] = []
        if shape.everybody and shape.world > 1:
            self._everybody = writer.group(*range(shape.world))
        across = shape.tensor * shape.pipeline
        if shape.data > 1:
            groups += [("data", writer.group(*range(place, shape.world, across))) for place in range(across)]
        if shape.tensor > 1:
            groups += [
                ("tensor", writer.group(*range(copy * across + stage, (copy + 1) * across, shape.pipeline)))
                for copy in range(shape.data) for stage in range(shape.pipeline)
            ]  # fmt: skip
        if shape.pipeline > 1:
            groups += [
                ("pipe", writer.group(*range(first, first + shape.pipeline)))
                for first in range(0, shape.world, shape.pipeline)
            ]
        self._by_name = groups
        for name, group in groups:
            for number in group.ranks:
                setattr(self._ranks[number], name, group)
        for rank in self._shuffled():
            for joined in (self._everybody, rank.data, rank.tensor, rank.pipe):
                if joined is not None:
                    writer.join(joined, rank.number)

    def _of(self, name: str) -> list[Communicator]:
        return [group for kind, group in self._by_name if kind == name]

    def _begin(self, rank: _Rank) -> None:
        writer, shape = self._writer, self._shape
        place = rank.number % (shape.tensor * shape.pipeline)
        copy = rank.number // (shape.tensor * shape.pipeline)
        for index in range(shape.layers):
            rank.parameters.append(writer.new(rank.number, mix(self._seed, place, index)))
            mine = not shape.sharded or index % shape.data == copy
            rank.momenta.append(writer.new(rank.number, 0) if mine else None)
        if shape.private:
            rank.statistics = writer.new(rank.number, mix(self._seed, rank.number))

    def _collect(self, group: Communicator, kind: Combine, root: int, index: int) -> None:
        pairs = {n: (self._ranks[n].parameters[index],) * 2 for n in group.ranks}
        self._writer.collective(group, kind, root, pairs)

    def _batch(self, step: int, batch: int) -> None:
        """Forward through the stages, the tensor-parallel sums on the way."""
        writer, shape, chance = self._writer, self._shape, self._chance
        handed: dict[int, int] = {}
        for stage in range(shape.pipeline):
            here = [rank for rank in self._shuffled() if rank.stage == stage]
            for rank in here:
                number = rank.number
                inputs = [writer.new(number, mix(self._seed, step, batch, number))]
                inputs.append(writer.random(number))
                if stage and rank.pipe is not None:
                    buffer = writer.new(number, 0)
                    writer.receive(rank.pipe, number - 1, number, buffer)
                    inputs.append(buffer)
                made = writer.mix(number, None, *inputs, *rank.parameters)
                if rank.statistics is not None:
                    writer.mix(number, rank.statistics, rank.statistics, made)
                writer.free(number, *inputs)
                handed[number] = made
                if chance.random() < shape.automatic:
                    self._commit(rank, False)
            for group in self._of("tensor"):
                if self._ranks[group.ranks[0]].stage == stage:
                    pairs = {number: (handed[number],) * 2 for number in group.ranks}
                    writer.collective(group, Combine.ALL_REDUCE, 0, pairs)
            for rank in here:
                if rank.pipe is not None and stage + 1 < shape.pipeline:
                    buffered = shape.crossing or chance.random() < 0.3
                    writer.send(rank.pipe, rank.number, rank.number + 1, handed[rank.number], buffered)
        for rank in self._shuffled():
            if rank.loss is not None:
                writer.free(rank.number, rank.loss)
            rank.loss = writer.mix(rank.number, None, handed[rank.number])
            if chance.random() < shape.reads:
                writer.read(rank.number, rank.loss)
            writer.free(rank.number, handed[rank.number])

    def _step(self, step: int) -> None:
        """Gradients, their sums, the optimizer, the commit; sometimes something kept across commits."""
        writer, shape, chance = self._writer, self._shape, self._chance
        gradients: dict[int, list[int]] = {}
        for rank in self._shuffled():
            assert rank.loss is not None
            gradients[rank.number] = [
                writer.mix(rank.number, None, rank.loss, parameter) for parameter in rank.parameters
            ]
        for index in range(shape.layers):
            for group in self._of("data"):
                pairs = {number: (gradients[number][index],) * 2 for number in group.ranks}
                writer.collective(group, Combine.ALL_REDUCE, 0, pairs)
        if shape.data == 1 and shape.everybody and self._everybody is not None and chance.random() < 0.5:
            pairs = {rank.number: (gradients[rank.number][0],) * 2 for rank in self._ranks}
            writer.collective(self._everybody, Combine.REDUCE_SCATTER, 0, pairs)
        crossing = shape.crossing and self._exchange_begins(gradients)
        for rank in self._shuffled():
            writer.optimizer(rank.number)
        if shape.norm and self._everybody is not None:
            norms = {
                rank.number: writer.mix(rank.number, None, *gradients[rank.number]) for rank in self._ranks
            }
            writer.collective(self._everybody, Combine.ALL_REDUCE, 0, {n: (h, h) for n, h in norms.items()})
            for rank in self._shuffled():
                writer.mix(
                    rank.number, gradients[rank.number][0], gradients[rank.number][0], norms[rank.number]
                )
                writer.free(rank.number, norms[rank.number])
        for index in range(shape.layers):
            salt = mix(self._seed, step, index)
            for rank in self._shuffled():
                momentum, parameter = rank.momenta[index], rank.parameters[index]
                if momentum is not None:
                    writer.mix(rank.number, momentum, momentum, gradients[rank.number][index], salt=salt)
                    writer.mix(rank.number, parameter, parameter, momentum, salt=salt + 1)
            if shape.sharded:
                for group in self._of("data"):
                    self._collect(group, Combine.BROADCAST, index % shape.data, index)
        ending = self._shuffled()
        for rank in ending:
            self._commit(rank, True)
            writer.free(rank.number, *gradients[rank.number])
            if rank.loss is not None and chance.random() < shape.reads:
                writer.read(rank.number, rank.loss)
        if shape.keeps:
            self._keep(step)
        if crossing:
            self._exchange_ends()

    def _commit(self, rank: _Rank, step: bool) -> None:
        self._writer.commit(rank.number, step)

    def _keep(self, step: int) -> None:
        """Buffers that outlive steps: some are read again, some only freed, many look alike."""
        chance, writer = self._chance, self._writer
        content, lives, read = (
            chance.choice((0, 0, mix(self._seed, step))),
            chance.randint(1, 3),
            chance.random(),
        )
        odd = chance.randrange(self._shape.world) if chance.random() < 0.3 else -1
        for rank in self._shuffled():
            for handle, until in list(rank.kept):
                if step >= until:
                    rank.kept.remove((handle, until))
                    writer.free(rank.number, handle)
                elif read < 0.4 and rank.loss is not None:
                    writer.mix(rank.number, rank.loss, rank.loss, handle)
            if rank.number != odd:
                rank.kept.append((writer.new(rank.number, content), step + lives))

    def _passing_group(self) -> None:
        """A communicator that some ranks have for a while: it comes and goes between commits, or at once."""
        chance, writer = self._chance, self._writer
        if chance.random() < 0.3:
            self._brief_group()
        if self._passing is not None:
            for number in chance.sample(self._passing.ranks, len(self._passing.ranks)):
                writer.leave(self._passing, number)
            self._passing = None
            return
        size = chance.randint(2, min(4, self._shape.world))
        self._passing = writer.group(*sorted(chance.sample(range(self._shape.world), size)))
        for number in self._passing.ranks:
            writer.join(self._passing, number)
        pairs = {number: (self._ranks[number].parameters[0],) * 2 for number in self._passing.ranks}
        for _ in range(chance.randint(0, 2)):
            writer.collective(self._passing, Combine.ALL_REDUCE, 0, pairs)

    def _brief_group(self) -> None:
        """A communicator that no commit knows of, but as one that is gone."""
        chance, writer = self._chance, self._writer
        size = chance.randint(2, min(4, self._shape.world))
        group = writer.group(*sorted(chance.sample(range(self._shape.world), size)))
        for number in group.ranks:
            writer.join(group, number)
        for _ in range(chance.randint(1, 2)):
            writer.collective(
                group, Combine.ALL_REDUCE, 0, {n: (self._ranks[n].parameters[0],) * 2 for n in group.ranks}
            )
        for number in chance.sample(group.ranks, size):
            writer.leave(group, number)

    def _exchange_begins(self, gradients: dict[int, list[int]]) -> bool:
        """Buffered messages that are under way while both sides commit."""
        group = self._everybody
        if group is None:
            return False
        size = len(group.ranks)
        for rank in self._shuffled():
            self._writer.send(group, rank.number, (rank.number + 1) % size, gradients[rank.number][0], True)
        return True

    def _exchange_ends(self) -> None:
        group = self._everybody
        assert group is not None
        size = len(group.ranks)
        for rank in self._shuffled():
            buffer = self._writer.new(rank.number, 0)
            self._writer.receive(group, (rank.number - 1) % size, rank.number, buffer)
            if rank.loss is not None:
                self._writer.mix(rank.number, rank.loss, rank.loss, buffer)
            self._writer.free(rank.number, buffer)

    def _barrier(self) -> None:
        group = self._everybody
        assert group is not None
        made = {number: self._writer.new(number, 1) for number in group.ranks}
        self._writer.collective(group, Combine.ALL_REDUCE, 0, {n: (h, h) for n, h in made.items()})
        for number, handle in made.items():
            self._writer.read(number, handle)
            self._writer.free(number, handle)
