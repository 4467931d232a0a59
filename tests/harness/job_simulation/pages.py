"""Control pages on their way between hosts: in place of `replay`, for logs that are simulated.

What the real ones copy block by block, these hand over group by group: a block of a state names a value that
was taken as it was then.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from simulation.log import Commit, Row
from simulation.log import Log as SimulatedLog
from simulation.programs import Program

from understudy import replay

BLOCK = 1024
"""Bytes, as in recovery/spanning/ranks/mirror.py."""
WORKER = ("tail_index", "worker_steps", "error_kind")
SERVER = (
    "cursor_index", "phase", "step", "call", "progress_ns", "freed_segments", "commit_count", "degraded",
    "replies_compared", "replies_different", "in_collective", "device_lost", "device_message", "last_words",
    "final_steps", "sealed", "waits_for", "wait_sequence", "snapshot_begun", "snapshot_failed", "joined",
    "validated_step", "validations_failed", "validation_message", "takes_snapshots",
)  # fmt: skip
ORDERS = (
    "snapshot_suspended", "log_kept_from", "order", "snapshot_ordered", "validate_step", "snapshot_floor",
    "floor_commit", "leased",
)  # fmt: skip
_NO_PROGRAM = Program()


class Mirrored(SimulatedLog):
    """The leader's copy of a log that is on another host."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, _NO_PROGRAM, lambda _: None)

    def extend(self) -> None:
        """Its worker is elsewhere."""

    def manifest(self, number: int) -> list[Row]:
        """As it was told: nobody overwrites it here."""
        commit: Commit = self.entry(number)
        if not commit.has_manifest:
            raise replay.LogError(f"the manifest of commit {number} is damaged")
        return commit.rows


class Pages:
    """As much of `replay` as is needed to tell of logs; one for a world."""

    LogError = replay.LogError
    COMMIT_RING = replay.COMMIT_RING

    def __init__(self, log_at: Callable[[str], SimulatedLog | None]) -> None:
        """`log_at`: the log that lies in a directory, if it is one of a worker."""
        self._log_at = log_at
        self._mirrored: dict[str, Mirrored] = {}
        self._values: list[Any] = []
        self._told: WeakKeyDictionary[SimulatedLog, list[tuple[Any, int]]] = WeakKeyDictionary()

    # ------------------------------------------------------------------ logs
    def create_log(self, directory: str, *, rank: int, **_: Any) -> None:
        """Of a rank of another host."""
        self._mirrored[directory] = Mirrored(rank)

    def Log(self, directory: str) -> SimulatedLog:
        """Raises LogError."""
        found = self._mirrored.get(directory) or self._log_at(directory)
        if found is None:
            raise replay.LogError(f"there is no log in {directory}")
        return found

    # ------------------------------------------------------------------ states
    def control_state(self, log: SimulatedLog) -> bytes:
        """All that worker and server have written."""
        groups = (
            log.session_state, tuple(getattr(log, name) for name in WORKER),
            tuple(_taken(getattr(log, name)) for name in SERVER), dict(log.ring), tuple(log.published),
        )  # fmt: skip
        told = self._told.setdefault(log, [(None, -1)] * len(groups))
        for place, value in enumerate(groups):
            if told[place][1] < 0 or told[place][0] != value:
                told[place] = value, len(self._values)
                self._values.append(value)
        return b"".join(b"%01023d\n" % number for _, number in told)

    def apply_control_state(self, log: SimulatedLog, state: bytes, clock_offset_ns: int) -> None:
        """As the real one: what it says of the session counts once."""
        numbers = [int(state[begin : begin + BLOCK]) for begin in range(0, len(state), BLOCK)]
        session_state, worker, server, ring, published = (self._values[number] for number in numbers)
        for names, values in ((WORKER, worker), (SERVER, server)):
            for name, value in zip(names, values, strict=True):
                setattr(log, name, _taken(value))
        log.progress_ns += clock_offset_ns
        log.ring, log.published = dict(ring), list(published)
        log.session_state = log.session_state or session_state

    def manifest_place(self, log: SimulatedLog, number: int) -> tuple[int, int]:
        """It comes with its commit."""
        raise replay.LogError("manifests go with their commits here")

    # ------------------------------------------------------------------ orders
    def control_orders(self, log: SimulatedLog) -> bytes:
        """What the leader wants of a log."""
        lost = log.lost_because if log.session_state == 1 else None
        return pickle.dumps((lost, *(getattr(log, name) for name in ORDERS)))

    def apply_control_orders(self, log: SimulatedLog, orders: bytes) -> None:
        """On the host where it is."""
        lost, *values = pickle.loads(orders)
        for name, value in zip(ORDERS, values, strict=True):
            setattr(log, name, value)
        if lost is not None:
            log.lose(lost)

    def __getattr__(self, name: str) -> Any:
        return getattr(replay, name)


def _taken(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value
