"""Which faults a soak injects, where, and who orders those that strike during a recovery."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from understudy.recovery.base.control import blocking_channel, pb, rpc
from understudy.recovery.drills.spec import Drill

RANKS = 2
FIRST = 6
"""The first minibatch to be struck, from 1: shapes are learnt, replicas known."""
SPACING = 3
"""Minibatches from one scheduled fault to the next, at most: some strike before the peer is back."""
WEIGHTS = {
    "kill-server": 10, "call-error": 6, "sticky-error": 4, "driver-suspect": 5, "stop-server": 2,
    "collective-hang": 2, "network-partition": 2, "kill-spare": 3, "slow-rank": 2, "kill-all-servers": 2,
    "device-gone": 2,
}  # fmt: skip
"""How often each fault is chosen; a job of two ranks survives all of them.

Not bit-flip: a loss that the program has printed before the difference was found stays as it was.
"""
SPARE_DEVICES = 8
"""A device that is gone stays so: at most so many go."""
DURING_RECOVERY: tuple[str, ...] = (
    "kill-server",
    "kill-server",
    "stop-server",
    "kill-spare",
    "call-error",
    "driver-suspect",
)
IN_A_ROW = 3
"""At most so many, before the job must have been well again: proxyd gives up after eight rounds."""
ONCE_IN_A_ROW = ("call-error", "driver-suspect")
"""The third call that fails at one record is the program's own error, and ends it."""
LOOK_S = 0.002
ANSWER_S = 120.0


def schedule(chance: random.Random, count: int, calls: int, kinds: dict[str, int]) -> list[Drill]:
    """Faults at random records of random minibatches with `calls` records each, in order."""
    step, drills, gone = FIRST, [], 0
    for chosen in chance.choices(list(kinds), list(kinds.values()), k=count):
        gone += chosen == "device-gone"
        kind = chosen if chosen != "device-gone" or gone <= SPARE_DEVICES else "kill-server"
        drills.append(Drill(kind, chance.randrange(RANKS), step, chance.randint(1, calls)))
        step += chance.randint(1, SPACING)
    return drills


def minibatches(count: int) -> int:
    """Of a training that holds so many scheduled faults."""
    return FIRST + SPACING * count + 2


class Aggressor:
    """Orders faults while a rank is being recovered, each in another recovery, as long as some are left."""

    def __init__(self, socket: Path, chance: random.Random, count: int) -> None:
        self._socket = socket
        self._chance = chance
        self._left = count
        self._over = threading.Event()
        self._asked: list[threading.Thread] = []
        self.struck: Counter[str] = Counter()
        """What was ordered and had a server or record to strike."""

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Until the block ends."""
        watcher = threading.Thread(target=self._watch)
        watcher.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in (watcher, *self._asked):
                thread.join()

    def _watch(self) -> None:
        seen: set[int] = set()
        in_a_row, possible = 0, DURING_RECOVERY
        with blocking_channel(self._socket) as channel:
            daemon = rpc.DaemonStub(channel)
            while not self._over.wait(LOOK_S) and self._left:
                status = daemon.GetStatus(pb.StatusRequest(), timeout=ANSWER_S)
                recovering = [rank for rank in status.ranks if rank.state == "recovering"]
                if not recovering:
                    in_a_row, possible = 0, DURING_RECOVERY
                    continue
                generation = max(rank.generation for rank in recovering)
                if generation in seen or in_a_row == IN_A_ROW or self._chance.random() < 0.5:
                    continue
                seen.add(generation)
                in_a_row += 1
                drill = Drill(self._chance.choice(possible), self._chance.randrange(RANKS), 0, 0)
                if drill.kind in ONCE_IN_A_ROW:
                    possible = tuple(kind for kind in possible if kind not in ONCE_IN_A_ROW)
                self._left -= 1
                self._asked.append(threading.Thread(target=self._order, args=(drill,)))
                self._asked[-1].start()

    def _order(self, drill: Drill) -> None:
        """It is answered when what it caused is over."""
        with blocking_channel(self._socket) as channel:
            try:
                reply = rpc.DaemonStub(channel).OrderDrill(
                    pb.DrillRequest(drill=drill.message()), timeout=ANSWER_S
                )
            except grpc.RpcError:
                return
            if not reply.error:
                self.struck[drill.kind] += 1
