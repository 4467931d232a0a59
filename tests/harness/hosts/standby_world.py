"""What the simulation of standbys happens in: virtual time, the cluster's store, and a watchful eye on it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from simulation.virtual_time import VirtualLoop
from standbys import image

from understudy.protos import control_pb2 as pb
from understudy.recovery.membership.job_leadership import key_of, records_of
from understudy.recovery.membership.records import read
from understudy.recovery.membership.stores.embedded import StoreMachine
from understudy.recovery.membership.stores.store import Change, Put, Unchanged
from understudy.recovery.rendezvous.store import Store
from understudy.recovery.spanning.ranks.image_file import ImageFile, Taken

LEADER, RECORDS = key_of("c", "j"), records_of("c", "j")


class Loop(VirtualLoop):
    """Work for threads is done at once."""

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except OSError as problem:
            done.set_exception(problem)
        return done


class Lost(grpc.aio.AioRpcError):
    """No answer from another host."""

    def __init__(self) -> None:
        super().__init__(grpc.StatusCode.DEADLINE_EXCEEDED, grpc.aio.Metadata(), grpc.aio.Metadata(), "lost")


@dataclass
class Outcome:
    """Of one seed."""

    violations: list[str] = field(default_factory=list)
    writes: int = 0
    acts: int = 0
    named: int = 0
    ended: int = 0
    led_on: int = 0
    led_on_twice: int = 0
    gave_way: int = 0


def taken(folder: Path, rank: int, parts: Sequence[pb.WorkerPart]) -> Taken:
    """An image as it was fetched from another host."""
    file = ImageFile(folder / f"rank-{rank}", "j", rank)
    for part in parts:
        file.take(part)
    file.finish()
    file.close()
    return file.taken()


class World:
    """The cluster's store, and everybody's watchful eye on it."""

    def __init__(self, seed: int, loop: VirtualLoop, folder: Path) -> None:
        self.chance = random.Random(seed)
        self.loop, self.folder = loop, folder
        self.machine = StoreMachine()
        self.outcome = Outcome()
        self.rough = True
        self.answered: set[str] = set()
        self.acted = 0
        """The newest of what was decided and is done."""
        self.known: int | None = None
        """The newest of what was decided, as whoever leads knows it; None: it does not yet."""
        self.leader = "a"
        """Whose the job is."""
        self.led: list[str] = ["a"]
        self.since = 0.0
        self.store_of: dict[str, Store] = {}
        self.token = b""
        self.parts = {rank: image(folder, rank) for rank in range(3)}
        """Of workers: rank 0 is on host a, 1 on b and 2 on c."""
        self.fetched = {rank: taken(folder, rank, self.parts[rank]) for rank in (1, 2)}
        """Images that the leader has of workers on other hosts."""
        self.answered_at = 0.0
        """When whoever led then last answered a write."""
        self.given_up: set[str] = set()
        """Hosts whose ranks go on elsewhere, by the record."""

    def transact(self, conditions: Sequence[Unchanged], changes: Sequence[Change]) -> int:
        """As the machine, and looked at."""
        revision = self.machine.transact(conditions, changes)
        for change in changes if revision else ():
            if not isinstance(change, Put):
                continue
            if change.key.startswith(RECORDS):
                batch = pb.JobRecordBatch.FromString(change.value[1:])
                self.outcome.named += batch.HasField("images")
                self.outcome.ended += bool(batch.over)
                self.given_up |= {one.host for one in batch.known.span.given_up}
            elif change.key == LEADER and (host := read(change.value, pb.JobLeader).host) != self.leader:
                self.claimed(host)
        return revision

    def claimed(self, host: str) -> None:
        """Another host than before."""
        if host in self.given_up or host == "a":
            self.violate(f"{host} has claimed a job that {self.leader} leads")
        self.led.append(host)
        self.outcome.led_on += 1
        self.outcome.led_on_twice += len(self.led) > 2
        self.leader, self.since, self.known = host, self.loop.time(), None

    def answer(self, host: str, request: str) -> None:
        """A worker hears that its write was done."""
        self.outcome.writes += 1
        self.answered.add(request)
        self.answered_at = self.loop.time() if host == self.leader else self.answered_at
        if self.known is not None and self.store_of[self.leader].done(request) is None:
            self.violate(f"{host} has answered a write that {self.leader}, which leads, lacks")

    def goes_on(self, host: str, known: int) -> None:
        """It has what it was left."""
        if host != self.leader:
            return  # it was too slow, and another one leads by now
        self.known = known
        missing = {one for one in self.answered if self.store_of[host].done(one) is None}
        if missing:
            self.violate(f"{host} leads the job on and lacks {len(missing)} writes that were answered")
        self._compare(host)

    def act(self, host: str, number: int) -> None:
        """What was decided is done."""
        self.outcome.acts += 1
        self.acted = max(self.acted, number)
        if host == self.leader and self.known is not None:
            self.known = max(self.known, number)
        self._compare(host)

    def _compare(self, host: str) -> None:
        if self.known is not None and self.acted > self.known:
            self.violate(f"{self.leader} leads the job on and knows of decision {self.known} and not of "
                         f"{self.acted}, which was done (seen by {host})")  # fmt: skip

    def violate(self, what: str) -> None:
        self.outcome.violations.append(f"{what}, at {self.loop.time():.2f} s")
