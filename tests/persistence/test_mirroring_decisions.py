"""Which sets proxyd hands to a job's uploader, and which slots stay meanwhile."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mirrors import RUN, Stores, contents_of
from test_persistence_decisions import made_up_commit

from understudy.recovery.base.errors import BadInput
from understudy.recovery.config.proxyd_settings import settings_of
from understudy.recovery.snapshots.persistence import Persistence
from understudy.recovery.snapshots.remote.mirror_messages import (
    Copied,
    Copy,
    Failed,
    Moved,
    Ready,
    Target,
    decode_answer,
    decode_copy,
    decode_target,
)
from understudy.recovery.snapshots.remote.mirroring import Mirroring
from understudy.recovery.snapshots.settings import MirrorSettings, PersistenceSettings
from understudy.recovery.snapshots.stores.catalogue import find_set
from understudy.recovery.snapshots.stores.retention import Retention
from understudy.recovery.snapshots.writing.request import Discard, Release, Written
from understudy.recovery.snapshots.writing.writer import RunStores
from understudy.recovery.state.counts import CopyCounts
from understudy.recovery.state.snapshot_leases import SnapshotLeases

OF = "understudy-1.rank-0"


class Rig:
    """A rank whose sets are durable when the test says so; writer and uploader only take notes."""

    def __init__(self) -> None:
        self.session = SimpleNamespace(
            rank=0, active=True, directory=Path("/dev/shm/understudy-1/job/rank-0"),
            durable=[], persist_note="", host="", world=1,
            mirrored_step=0, mirror_note="",
            log=SimpleNamespace(lease_snapshots=lambda _: None, describe_snapshot=lambda _: None),
        )  # fmt: skip
        self.counts = CopyCounts()
        job = SimpleNamespace(
            name="job",
            persist=CopyCounts(),
            mirror=self.counts,
            active_sessions=lambda: [self.session],
            span=None,
            leases=SnapshotLeases(),
        )
        settings = PersistenceSettings(Path("/x"), 1.0, slots=3, mirror=MirrorSettings("s3://bucket/x"))
        self.persistence = Persistence(cast(Any, job), settings)
        assert self.persistence.mirroring is not None
        self.mirroring: Mirroring = self.persistence.mirroring
        self.copies: list[int] = []
        self.mirroring._pipe = cast(Any, SimpleNamespace(write=self._note))

    def _note(self, line: bytes) -> None:
        copy = decode_copy(line)
        assert copy.run == OF
        self.copies.append(copy.serial)

    def begin(self, serial: int, now: float) -> None:
        sessions = cast(Any, [self.session])
        if self.persistence.due(sessions, now):
            self.persistence.announce(serial, None, sessions)
        self.persistence.offer(serial, sessions, {0: made_up_commit(serial, 10 * serial)}, now)

    def durable(self, serial: int, now: float = 0.0) -> None:
        self.begin(serial, now or 10.0 * serial)
        self.persistence.take(Written(serial, OF, 0, step=10 * serial), now or 10.0 * serial)

    def releases(self) -> list[tuple[int, int]]:
        """(newest complete, held) as told to the writer since the last call."""
        sent = list(self.persistence.writer._unsent)
        self.persistence.writer._unsent.clear()
        return [(one.serial, one.held) for one in sent if isinstance(one, Release)]

    def copied(self, serial: int) -> None:
        self.mirroring.take(Copied(serial, 10 * serial, bytes=5, seconds=1.0))


def test_the_newest_complete_set_goes_to_the_uploader_when_it_is_ready_and_others_are_skipped() -> None:
    rig = Rig()
    rig.durable(1)
    assert rig.copies == []
    rig.mirroring.take(Ready())
    assert rig.copies == [1]
    for serial in (2, 3, 4):
        rig.durable(serial)
    assert rig.copies == [1]
    rig.copied(1)
    assert rig.session.mirrored_step == 10
    rig.mirroring.take(Ready())
    assert rig.copies == [1, 4] and rig.counts.skipped == 2
    rig.mirroring.take(Ready())
    rig.copied(4)
    assert rig.copies == [1, 4] and rig.counts.copied == 2
    rig.durable(5)
    assert rig.copies == [1, 4, 5]


def test_the_slots_of_the_set_under_way_are_held_until_there_is_an_answer() -> None:
    rig = Rig()
    rig.mirroring.take(Ready())
    rig.durable(1)
    rig.durable(2)
    rig.durable(3)
    assert rig.releases() == [(1, 1), (2, 1), (3, 1)]
    rig.copied(1)
    assert rig.releases() == [(3, 0)]
    rig.durable(4)
    rig.mirroring.take(Ready())
    rig.durable(5)
    assert rig.releases() == [(4, 0), (5, 4)] and rig.copies == [1, 4]
    rig.mirroring.take(Failed("out of room"))
    assert rig.releases() == [(5, 0)]


def test_a_set_that_a_newer_one_overtook_is_discarded_while_another_is_held() -> None:
    rig = Rig()
    rig.mirroring.take(Ready())
    rig.durable(1)
    rig.begin(2, 20.0)
    rig.durable(3)
    rig.persistence.writer._unsent.clear()
    rig.persistence.take(Written(2, OF, 0, step=20), 31.0)
    assert rig.persistence.writer._unsent == [Discard(2, OF)]


def test_trouble_is_told_until_a_set_arrives_and_the_set_is_tried_again_unless_there_is_a_newer_one() -> None:
    rig = Rig()
    rig.mirroring.take(Ready())
    rig.durable(1)
    rig.mirroring.take(Failed("connection refused"))
    assert rig.session.mirror_note == "no snapshot reaches s3://bucket/x: connection refused"
    rig.mirroring.take(Ready())
    assert rig.copies == [1, 1] and rig.counts.skipped == 0
    rig.durable(2)
    rig.mirroring.take(Failed("connection refused"))
    rig.mirroring.take(Ready())
    assert rig.copies == [1, 1, 2] and (rig.counts.skipped, rig.counts.failures) == (1, 2)
    assert rig.session.mirror_note != ""
    rig.copied(2)
    assert rig.session.mirror_note == "" and rig.session.mirrored_step == 20


def test_sets_go_on_to_a_place_where_nothing_can_be_removed_and_that_is_told() -> None:
    rig = Rig()
    rig.mirroring.take(Ready())
    rig.durable(1)
    rig.copied(1)
    rig.mirroring.take(Failed("what is not to be kept there stays: Access Denied"))
    assert rig.session.mirror_note == (
        "not all is well at s3://bucket/x: what is not to be kept there stays: Access Denied"
    )
    rig.mirroring.take(Ready())
    rig.durable(2)
    assert rig.copies == [1, 2] and rig.counts.failures == 1


def test_bytes_count_when_they_are_handed_over() -> None:
    rig = Rig()
    rig.mirroring.take(Moved(100))
    rig.mirroring.take(Moved(1))
    assert rig.counts.bytes == 101


def test_a_remote_that_never_answers_costs_one_slot_and_nothing_else(tmp_path: Path) -> None:
    local = Stores(tmp_path, ranks=1, slots=4)  # --persist-slots 3, and one for the mirror
    local.put(1, run=RUN)
    held = find_set(tmp_path / "job" / RUN, 1)
    before = contents_of(held)
    stores = RunStores(tmp_path / "job" / RUN, [0], 1, 4)
    (of_rank,) = stores.of_rank.values()
    assert of_rank._current is not None
    for serial in range(2, 30):
        of_rank._current.persist(
            job="job", rank=0, world=1, step=serial, serial=serial, extents=[(1, 1, bytes([serial]) * 100)],
            timeout_s=0.0,
        )  # fmt: skip
        stores.release(serial, held=1)
        assert of_rank.serials == {1, serial} and of_rank._current.free_slots == 2
    assert contents_of(held) == before
    stores.release(29)
    assert of_rank.serials == {29}


def test_a_store_with_too_few_slots_to_hold_a_set_is_followed_by_another(tmp_path: Path) -> None:
    Stores(tmp_path, ranks=1, slots=3).put(1, run=RUN)
    (of_rank,) = RunStores(tmp_path / "job" / RUN, [0], 1, 4).of_rank.values()
    assert of_rank.fitting([100], 2).capacity == 4
    assert of_rank.serials == {1}


@pytest.mark.parametrize(
    "message",
    [Target("s3://b/x", 2, 100), Copy(7, OF), Ready(), Moved(5), Copied(7, 70, 5, 0.5), Failed("é")],
)
def test_messages_arrive_as_they_were_sent(message: Any) -> None:
    decoders: dict[type, Any] = {Target: decode_target, Copy: decode_copy}
    decode = decoders.get(type(message), decode_answer)
    line = message.encode()
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert decode(line) == message


@pytest.mark.parametrize(
    "options, sentence",
    [
        (("--mirror", "s3://bucket/x"), "is of no use without --persist"),
        (("--mirror", "/mnt/nfs"), "is no URL of a directory"),
        (("--mirror", "s3://"), "is no URL of a directory"),
        (("--mirror", "simplecache::s3://bucket/x"), "is no URL of a directory"),
        (("--mirror", "ftp://me:secret@host/x"), "give those by the environment"),
        (("--mirror", "memory://x"), "memory of one process"),
        (("--mirror", "nowhere://x"), "cannot be used"),
        (("--mirror", "file:///x", "--keep-last", "0"), "1 or more"),
        (("--mirror", "file:///x", "--keep-every", "-1"), "0 or more"),
        (("--keep-last", "5"), "none was named"),
    ],
)
def test_what_cannot_be_a_mirror_is_refused_with_a_sentence(
    tmp_path: Path, options: tuple[str, ...], sentence: str
) -> None:
    persist = () if "without --persist" in sentence else ("--persist", str(tmp_path / "store"))
    with pytest.raises(BadInput, match=sentence) as refused:
        settings_of(["--devices", "cpu:1", *persist, *options])
    assert "secret" not in str(refused.value)


def test_a_mirror_is_taken_over_from_the_command_line(tmp_path: Path) -> None:
    settings = settings_of(
        ["--devices", "cpu:1", "--persist", str(tmp_path), "--mirror", "file:///mnt/nfs",
         "--keep-last", "2", "--keep-every", "1000"]
    )  # fmt: skip
    assert settings.persist is not None
    assert settings.persist.mirror == MirrorSettings("file:///mnt/nfs", Retention(2, 1000))
    assert (settings.persist.in_flight, settings.persist.all_slots) == (2, 4)
