"""As many communicators as a program has: all are part of commits, snapshots, and what other hosts learn."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import proxied
import pytest
from executor_harness import COMMUNICATOR_CREATE, COMMUNICATOR_DESTROY, Harness

from understudy import replay
from understudy.protos import control_pb2 as pb
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY
from understudy.recovery.spanning.ranks.mirror import NO_REPLIES, Feed, Mirror

pytestmark = pytest.mark.drawn(2)

MOST = 4096
IN_PLACE = 32


def uids(commit: replay.Commit) -> list[int]:
    return sorted(low for low, *_ in commit.communicators)


def newest(h: Harness) -> int:
    """Serial of the newest snapshot."""
    return max((snapshot.serial for snapshot in h.log.snapshots()), default=0)


def many(row: bytes) -> bytes:
    """The same, naming more than a row of its length can."""
    return row[:60] + (MOST + 1).to_bytes(4, "little") + row[64:] + bytes(32 * MOST)


def create(h: Harness, count: int, first: int = 1) -> None:
    for number in range(first, first + count):
        h.writer.append(COMMUNICATOR_CREATE, number, [number, 9, 0, 2, 60_000])


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="understudy-test-", dir=SHARED_MEMORY) as name:
        yield Path(name)


@pytest.mark.parametrize("count", [IN_PLACE - 1, IN_PLACE, IN_PLACE + 1, 300])
def test_a_commit_and_its_snapshot_name_them_all(count: int) -> None:
    with Harness(snapshot_bytes=16 << 20) as h:
        create(h, count)
        h.log.order_snapshot(1)
        h.commit()
        h.synchronize()
        everyone = list(range(1, count + 1))
        (commit,) = h.log.commits()
        assert commit.complete and uids(commit) == everyone
        h.wait(lambda: h.log.snapshots() != [], "did not take the snapshot")
        assert uids(h.log.snapshots()[0].commit) == everyone
        copied = replay.copy_commit(h.log, 1)
        assert uids(copied.commit) == uids(replay.describe_row(copied.row)) == everyone
        for wrong in (
            copied.row[:-1],
            copied.row + bytes(32),
            copied.row[: 64 + 32 * 32][:-32],
            many(copied.row),
        ):
            with pytest.raises(replay.LogError):
                replay.describe_row(wrong)
        h.executor.park()
        for restore in ("restore", "restore_snapshot"):
            h.executor.detach()
            h.executor = h.new_executor()
            getattr(h.executor, restore)(1)
            assert uids(h.log.commits()[-1]) == everyone
        h.executor.resume()
        create(h, 5, first=count + 1)
        h.commit()
        h.synchronize()
        assert uids(h.log.commits()[-1]) == list(range(1, count + 6))


def test_one_more_than_are_kept_account_of_is_an_error_of_the_program() -> None:
    with Harness() as h:
        create(h, MOST)
        h.commit()
        h.synchronize()
        assert h.log.commits()[0].complete and len(uids(h.log.commits()[0])) == MOST
        create(h, 1, first=MOST + 1)
        with pytest.raises(
            RuntimeError, match="has 4096 communicators, as many as understudy keeps account of"
        ):
            h.synchronize()


def test_a_commit_that_cannot_name_them_all_is_none_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    """Those that were given up since the commit before count too."""
    with Harness() as h:
        create(h, MOST)
        h.writer.append(COMMUNICATOR_DESTROY, 1, [])
        create(h, 1, first=MOST + 1)
        h.commit()
        h.synchronize()
        assert h.log.commit_count == 1 and h.log.commits() == []
        with pytest.raises(replay.LogError, match="does not name all communicators"):
            replay.copy_commit(h.log, 1)
        h.commit()
        h.synchronize()
        assert [(commit.number, commit.complete) for commit in h.log.commits()] == [(2, True)]
    said = capfd.readouterr().err
    assert "uses 4097 communicators" in said and "a commit has room for 4096" in said
    assert "shadow area" not in said


def described(h: Harness, feed: Feed) -> pb.RankDescription:
    log = h.log
    return pb.RankDescription(
        rank=log.rank, world=log.world, sequence=feed.sequence, state=replay.control_state(log),
        orders=replay.control_orders(log),
        sizes=pb.LogSizes(
            segment_bytes=4 << 20, segment_count=8, dictionary_bytes=1 << 20, reply_bytes=NO_REPLIES,
            shadow_bytes=256 << 20, snapshot_bytes=16 << 20,
        ),
    )  # fmt: skip


def test_the_leading_host_learns_of_them_as_they_come_and_go(folder: Path) -> None:
    with Harness(snapshot_bytes=16 << 20) as h:
        feed = Feed(h.log)
        feed.begin()
        create(h, 3)
        h.synchronize()
        mirror = Mirror(folder, described(h, feed))
        count = 3
        for more in (40, 100, 0, 500):
            create(h, more, first=count + 1)
            count += more
            h.log.order_snapshot(h.log.snapshot_begun + 1)
            h.commit()
            h.synchronize()
            h.wait(lambda: newest(h) == h.log.snapshot_ordered, "did not take the snapshot")
            mirror.apply(feed.news(h.log.rank))
            assert [uids(one) for one in mirror.log.commits()] == [uids(one) for one in h.log.commits()]
            assert uids(mirror.log.commits()[-1]) == list(range(1, count + 1))
            theirs = [uids(one.commit) for one in mirror.log.snapshots()]
            assert theirs == [uids(one.commit) for one in h.log.snapshots()]
            assert mirror.log.started() == h.log.started()
        again = Feed(h.log)
        mirror.describe_anew(described(h, again))
        assert uids(mirror.log.commits()[-1]) == list(range(1, count + 1))
        cut = replay.control_state(h.log)[:-1]
        with pytest.raises(replay.LogError, match="names more communicators than it has"):
            replay.apply_control_state(mirror.log, cut, 0)


@pytest.mark.drawn(4)
def test_ranks_with_forty_groups_are_recovered(tmp_path: Path) -> None:
    command = proxied.ranks(2, proxied.WORKLOADS / "many_groups.py", str(tmp_path))
    drills = ("--drill", "kill-server rank=1 step=5 call=30", "--drill", "kill-server rank=0 step=8 call=2")
    undisturbed = proxied.run(command, folder=tmp_path)
    assert undisturbed.status == 0, undisturbed.output[-3000:]
    said = [(tmp_path / str(rank)).read_text() for rank in (0, 1)]
    struck = proxied.run(command, folder=tmp_path, options=drills)
    assert struck.status == 0, struck.output[-3000:]
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == said
    assert [recovery["recovered"] for recovery in struck.report["recoveries"]] == [True, True]
    assert {recovery["plan"] for recovery in struck.report["recoveries"]} == {"restart-copy-replay"}
    assert "communicators" not in struck.output
