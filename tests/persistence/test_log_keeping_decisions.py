"""How long logs wait for storage, what is told of it, and when stored ones may go."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from understudy.recovery.daemon.offline_replay import NotReplayed, _check
from understudy.recovery.snapshots.log.log_keeping import LATE_S, LogKeeping
from understudy.recovery.snapshots.log.log_messages import (
    Copied,
    Drop,
    Follow,
    Rank,
    Trouble,
    decode,
)
from understudy.recovery.snapshots.log.log_reach import Laid
from understudy.recovery.snapshots.log.stored_log import StoredCommit
from understudy.recovery.snapshots.settings import PersistenceSettings
from understudy.recovery.state.counts import LogCounts

CAP = 1 << 20


class Rig:
    """A rank that has run up to a place of its log, and a pipe that only takes notes."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.commit = SimpleNamespace(log_offset=0)
        self.log = SimpleNamespace(
            cursor=0, segment_count=1, segment_bytes=CAP, log_uncopied_from=7, commits=lambda: [self.commit],
        )  # fmt: skip
        self.session = SimpleNamespace(
            rank=0, log=self.log, active=True, durable=[], logged_offset=0, logged_step=0, log_note=""
        )
        self.counts = LogCounts()
        job = SimpleNamespace(name="job", stored_log=self.counts, active_sessions=lambda: [self.session])
        self.keeping = LogKeeping(cast(Any, job), PersistenceSettings(Path("/x")), lambda _: "run")
        self.keeping._sessions = [cast(Any, self.session)]
        self.keeping._caught_up_s = {0: 0.0}
        self.keeping._pipe = cast(Any, SimpleNamespace(write=lambda line: self.sent.append(decode(line))))

    def run_to(self, offset: int) -> None:
        """The newest commit lies there, and all before it was run."""
        self.log.cursor = self.commit.log_offset = offset
        self.session.log_lag = offset - self.session.logged_offset

    def look(self, now: float) -> int:
        """From where on the log is kept then."""
        self.keeping.look(now)
        return cast(int, self.log.log_uncopied_from)


def test_a_log_stays_from_where_it_was_copied_to_as_long_as_storage_keeps_up() -> None:
    rig = Rig()
    rig.run_to(1000)
    assert rig.look(0.1) == 7, "what a proxyd that died knew counts until the copier says more"
    rig.keeping.take(Copied(0, 900, 3, 5000, 0))
    rig.run_to(1000)
    assert rig.look(0.2) == 900
    assert (rig.session.logged_step, rig.counts.bytes) == (3, 5000)
    rig.run_to(900 + CAP // 4)
    assert rig.look(0.3) == 0, "a quarter of the log waits: it is not kept for storage any longer"
    rig.keeping.take(Copied(0, CAP // 4, 9, 1, 1))
    rig.run_to(CAP // 4 + 10)
    assert rig.look(0.4) == CAP // 4
    assert rig.counts.gaps == 1


def test_storage_that_does_not_keep_up_or_fails_is_told_of_until_it_does() -> None:
    rig = Rig()
    rig.run_to(1000)
    rig.keeping.take(Copied(0, 500, 3, 0, 0))
    rig.run_to(1000)
    rig.look(LATE_S)
    assert rig.session.log_note == ""
    rig.look(LATE_S + 0.1)
    assert (
        rig.session.log_note == "the log does not reach /x: storage is slow, 500 bytes of the log wait for it"
    )
    rig.keeping.take(Trouble(0, "No space left on device"))
    assert "No space left on device" in rig.session.log_note
    assert rig.counts.failures == 1
    rig.keeping.take(Copied(0, 1000, 4, 0, 0))
    assert rig.session.log_note == ""


def test_stored_logs_before_the_newest_complete_set_go_once() -> None:
    rig = Rig()
    rig.run_to(1000)
    rig.look(0.1)
    assert rig.sent == []
    rig.session.durable = [SimpleNamespace(log_offset=300)]
    rig.look(0.2)
    rig.look(0.3)
    assert rig.sent == [Drop(0, 300)]
    rig.session.durable = [SimpleNamespace(log_offset=800)]
    rig.look(0.4)
    assert rig.sent == [Drop(0, 300), Drop(0, 800)]


def test_messages_arrive_as_they_were_sent_and_others_are_refused() -> None:
    sent = (Follow("cpu", (Rank(0, "/a", 2),)), Drop(1, 9), Copied(0, 1, 2, 3, 4), Trouble(0, "it hangs"))
    assert [decode(message.encode()) for message in sent] == list(sent)
    for line in (
        b"",
        b"{}",
        b"[]",
        b'{"drop": {}}',
        b'{"follow": {"driver": "cpu", "ranks": [3]}}',
        b'{"x": {}}',
    ):
        with pytest.raises(ValueError, match="is not what it should be"):
            decode(line)


def replayed(different: int = 0, step: int = 9) -> tuple[Any, Laid]:
    """A rank that has replayed to a commit."""
    was = SimpleNamespace(step=9, log_offset=100, record_index=10, communicators=[(1, 2, 3)])
    now = SimpleNamespace(step=step, log_offset=100, record_index=10, communicators=[(1, 2, 3)])
    contents = SimpleNamespace(commit=now, buffers=[(1, 8, 77, 0)])
    log = SimpleNamespace(
        replies_different=different, replies_compared=5, snapshot_contents=lambda serial: contents
    )
    return SimpleNamespace(rank=0, log=log), Laid(StoredCommit(cast(Any, was), (), b"", b""), b"")


def test_a_replay_counts_only_if_it_ends_where_the_training_was_with_the_values_that_it_had() -> None:
    assert _check(*_with_serial(replayed())) == 0
    with pytest.raises(NotReplayed, match="1 of 5 values that rank 0 read are others"):
        _check(*_with_serial(replayed(different=1)))
    with pytest.raises(NotReplayed, match="ended at another commit"):
        _check(*_with_serial(replayed(step=8)))


def _with_serial(of: tuple[Any, Laid]) -> tuple[Any, int, Laid]:
    return of[0], 3, of[1]
