"""What stands in for a rank's log in shared memory: it outlives the device servers that run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simulation.programs import Program, mix
from understudy import replay

if TYPE_CHECKING:
    from simulation.snapshots import Snapshot

RING = 64
BUFFER_BYTES = 8
SEGMENT_RECORDS = 24
"""Records that one segment of a log holds."""


@dataclass(frozen=True)
class Row:
    """One line of a manifest, as `replay.Log.manifest` answers it."""

    handle: int
    bytes: int
    digest: int | None
    shadowed: bool


@dataclass(eq=False)
class Commit:
    """A commit as `replay.Log.commits` answers it, and what the shadow area holds for it."""

    number: int
    step: int
    complete: bool
    has_manifest: bool
    communicators: list[tuple[int, int, int]]
    members: list[int]
    index: int
    rows: list[Row] = field(default_factory=list)
    shadows: dict[int, bytes] = field(default_factory=dict)
    lost: frozenset[int] = frozenset()
    """Handles of which only name and size are known."""
    random: int = 0
    joined: dict[int, tuple[int, dict[tuple[int, int], int]]] = field(default_factory=dict)
    optimizer: bool = False
    """Whether an optimizer step without pre-images begins right behind it."""
    step_digest: int = 0
    call: int = 0
    """Where in a minibatch it was made; 0 at its end."""
    readable: bool = True
    """False once its shadows may have been overwritten."""

    @property
    def record_index(self) -> int:
        """As `replay.Commit` calls it."""
        return self.index

    @property
    def log_offset(self) -> int:
        """Likewise: each record has a byte."""
        return self.index


class Log:
    """One rank's log: its program, how far the worker has written it, and what servers publish."""

    live_buffers = undo_bytes = shadow_used_bytes = 0
    snapshot_used_bytes = snapshots_taken = snapshot_ns = 0
    median_calls_per_step = median_bytes_per_step = 0
    recent_calls: tuple[str, ...] = ()
    """Nothing of it matters here."""

    def __init__(self, rank: int, program: Program, on_lost: Callable[[Log], None]) -> None:
        self.rank = rank
        self.program = program
        self.tail_index = 0
        self.cursor_index = 0
        self.phase = 0
        self.step = 1
        self.call = 0
        self.progress_ns = 0
        self.freed_segments = 0
        self.floor_commit = 0
        self.commit_count = 0
        self.session_state = 0
        self.error_kind = 0
        self.degraded = 0
        self.replies_compared = 0
        self.replies_different = 0
        self.in_collective = self.wait_sequence = 0
        self.waits_for = (0, 0)
        """The communicator of the collective that its server waits for; none: it waits for something else."""
        self.device_lost = 0
        self.device_message = ""
        self.last_words = ""
        """What its server says as it dies."""
        self.takes_snapshots = False
        self.snapshot_floor = self.snapshot_begun = self.snapshot_ordered = self.snapshot_failed = 0
        self.snapshot_suspended = False
        self.final_steps = self.sealed = 0
        self.log_kept_from = self.worker_steps = 0
        self.order: tuple[int, int | None] = (0, None)
        """Serial of the newest order of a snapshot, and after how many steps; None: at the next commit."""
        self.published: list[Snapshot] = []
        self.leased: tuple[int, ...] = ()
        """Serials of snapshots that stay, whatever the floor is."""
        self.backpressure = self.live_bytes = 0
        self.segment_bytes, self.segment_count = SEGMENT_RECORDS, 1 << 20
        self.dictionary_begin, self.dictionary_tail, self.dictionary_bytes = 0, 0, 1 << 20
        self.validate_step = 0
        self.validated_step = 0
        self.validations_failed = 0
        self.validation_message = ""
        self.lost_because = ""
        self.ring: dict[int, Commit] = {}
        self.told: dict[int, int] = {}
        self.joined: list[tuple[int, int, int, int]] = []
        """Communicators that its server has: (uid, 0, collectives begun, members)."""
        self._on_lost = on_lost
        self.waits = sorted(program.reads)
        self.extend()

    @property
    def cursor(self) -> int:
        """As `log_offset`: each record has a byte."""
        return self.cursor_index

    @property
    def tail(self) -> int:
        """Likewise."""
        return self.tail_index

    @property
    def lost_message(self) -> str:
        """As of shared memory."""
        return self.lost_because

    def supervise(self, pid: int, started: int) -> None:
        """A proxyd that follows another one says so."""

    def extend(self) -> None:
        """The worker writes on until it needs a value that it has not been told."""
        while self.waits and self.waits[0] in self.told:
            del self.waits[0]
        self.tail_index = self.waits[0] + 1 if self.waits else len(self.program.records)

    def started(self) -> list[tuple[int, int, int, int]]:
        """As `replay.Log.started`."""
        return self.joined

    def commits(self) -> list[Commit]:
        """Those that are still in the ring, oldest first."""
        first = max(1, self.commit_count - RING + 1)
        found = (self.ring.get(number % RING) for number in range(first, self.commit_count + 1))
        return [commit for commit in found if commit is not None and commit.number <= self.commit_count]

    def commit_rows(self) -> list[tuple[Commit, bool, bool, bool, int]]:
        """As `replay.Log.commit_rows`: another where the server has changed one."""
        return [
            (commit, commit.complete, commit.has_manifest, commit.optimizer, commit.step_digest)
            for commit in self.commits()
        ]

    @staticmethod
    def commit_of(row: tuple[Commit, bool, bool, bool, int]) -> Commit:
        """By such a row."""
        return row[0]

    def entry(self, number: int) -> Commit:
        """One of them; raises replay.LogError."""
        commit = self.ring.get(number % RING)
        if commit is None or commit.number != number or number > self.commit_count:
            raise replay.LogError(f"commit {number} is no longer known")
        return commit

    def manifest(self, number: int) -> list[Row]:
        """Buffers alive at a commit."""
        commit = self.entry(number)
        overwritten = not commit.readable and mix(self.rank, number) % 2  # its content goes at any time
        if not commit.has_manifest or overwritten:
            raise replay.LogError(f"the manifest of commit {number} is damaged")
        return commit.rows

    def digests(self, number: int, handles: list[int]) -> list[int | None]:
        """Of these buffers at a commit."""
        if number == 0:
            return [None] * len(handles)
        known = {row.handle: row.digest for row in self.manifest(number)}
        return [known.get(handle) for handle in handles]

    def snapshots(self) -> list[Snapshot]:
        """Those that are whole, oldest first."""
        return list(self.published)

    def lease_snapshots(self, serials: Sequence[int]) -> None:
        """As `replay.Log`."""
        self.leased = tuple(serials)

    def order_snapshot(self, serial: int, step: int | None) -> None:
        """Ask for one after so many steps."""
        self.order, self.snapshot_ordered = (serial, step), serial

    def drills(self) -> list[tuple[int, ...]]:
        """None are ordered here."""
        return []

    def take_last_words(self) -> str:
        """As of shared memory."""
        words, self.last_words = self.last_words, ""
        return words

    def lose(self, message: str) -> None:
        """Its worker will raise `message`."""
        if self.session_state == 0:
            self.session_state = 1
            self.lost_because = message
            self._on_lost(self)
