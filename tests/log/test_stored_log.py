"""The stored log: what comes back of it is a prefix that ends in a commit, byte for byte, or nothing."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from executor_harness import FREE, PHASE, Harness, double

from understudy import replay
from understudy.recovery.snapshots.log.log_copier import LogOfRank
from understudy.recovery.snapshots.log.log_reach import Laid, RankReach, _read_rank, lay_out, log_sizes
from understudy.recovery.snapshots.log.stored_log import (
    About,
    BadLog,
    Chain,
    Frame,
    Kind,
    read_commit,
    read_frames,
)
from understudy.recovery.snapshots.stores.layout import LogFile, log_path, logs_of
from understudy.recovery.snapshots.writing.described_changes import BadChanges, Descriptions

SEED = int(os.environ.get("UNDERSTUDY_TEST_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
STEPS = 8
NONSENSE = 600


@dataclass(frozen=True)
class Stored:
    """A training's log: its files, the commits that were made, and the bytes of its records."""

    run: Path
    files: list[LogFile]
    commits: list[replay.Commit]
    records: bytes
    """From the beginning."""

    @property
    def start(self) -> replay.Commit:
        return self.commits[0]


def about(h: Harness) -> About:
    return About("job", "run", 0, 2, "cpu", 1, h.log.segment_bytes, h.log.dictionary_bytes)


def copier(h: Harness, run: Path) -> LogOfRank:
    run.mkdir(parents=True, exist_ok=True)
    return LogOfRank(run, about(h), Path(h.directory))


def described(step: int) -> dict[str, object]:
    return {
        "optimizers": [{"lr": 0.1**step, "step": step, "state": list(range(step % 3, 40))}],
        "same": "x" * 99,
    }


def step(h: Harness, number: int) -> None:
    """A minibatch of a training that knows a new operator each time, and frees what it made."""
    Path(h.directory, f"step-{number}").write_text(json.dumps(described(number)))
    h.new(100 + number, [number, 1.0, 2.0, 3.0])
    h.add(1, 100 + number)
    h.template(f"aten::never_{number}", [17, double(number)])
    h.commit()
    h.writer.free_later(100 + number)
    h.writer.append(PHASE, 0, [])  # does something: the commit takes effect


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    run = tmp_path_factory.mktemp("stored") / "job" / "run"
    with Harness() as h:
        log = copier(h, run)
        h.new(1, [0.0, 0.0, 0.0, 0.0])
        for number in range(1, STEPS + 1):
            step(h, number)
            h.read(1)
            assert log.copy()
        log.close()
        end = h.log.commits()[-1].log_offset
        return Stored(run, logs_of(run), h.log.commits(), replay.copy_records(h.log, 0, end))


def read(stored: Stored, content: bytes, folder: Path) -> RankReach:
    """Of another content of the first file."""
    path = folder / stored.files[0].path.name
    path.write_bytes(content)
    return _read_rank(0, stored.start, [replace(stored.files[0], path=path)])


@pytest.fixture
def fresh() -> Iterator[Callable[[RankReach, int], replay.Log]]:
    """Makes logs for the way to a step."""
    made: list[str] = []

    def make(reach: RankReach, step: int) -> replay.Log:
        made.append(tempfile.mkdtemp(prefix="understudy-test-", dir="/dev/shm"))
        replay.create_log(made[-1], **log_sizes(reach, step))
        return replay.Log(made[-1])

    yield make
    for directory in made:
        shutil.rmtree(directory)


def laid(reach: RankReach, step: int, log: replay.Log) -> tuple[Laid, bytes]:
    found = lay_out(reach, step, log)
    return found, replay.copy_records(log, reach.start.log_offset, found.goal.commit.log_offset)


def test_every_step_of_a_stored_log_comes_back_with_its_records_and_what_its_buffers_are_called(
    stored: Stored, fresh: Callable[[RankReach, int], replay.Log]
) -> None:
    reach = _read_rank(0, stored.start, stored.files)
    assert reach.notes == [] and sorted(reach.goals) == list(range(2, STEPS + 1))
    for commit in stored.commits[1:]:
        log = fresh(reach, commit.step)
        found, records = laid(reach, commit.step, log)
        assert records == stored.records[stored.start.log_offset : commit.log_offset]
        assert json.loads(found.description) == described(commit.step)
        assert found.goal.manifest and found.goal.frees == (100 + commit.step,)
        (last,) = log.dump(commit.record_index)
        assert (last["kind"], last["frees"]) == ("phase", [100 + commit.step])
        assert {row["operator"] for row in log.dump() if "operator" in row} == {"aten::add_.Tensor"}


def frames_of(content: bytes) -> list[Frame]:
    return list(read_frames(BytesIO(content), len(content)))


def end_before(frames: list[Frame], byte: int, begin: int) -> int:
    """The log offset of the last commit whose frame ends there or before."""
    return max([begin, *(f.number for f in frames if f.kind is Kind.COMMIT and f.end <= byte)])


@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.long)])
def test_wherever_a_file_is_cut_it_ends_in_the_commit_before(
    stored: Stored, tmp_path: Path, stride: int
) -> None:
    content = stored.files[0].path.read_bytes()
    frames = frames_of(content)
    for size in range(0, len(content), stride):
        reach = read(stored, content[:size], tmp_path)
        assert reach.end == max(end_before(frames, size, 0), stored.start.log_offset), size
        assert reach.files == [] or reach.end >= stored.start.log_offset


@pytest.mark.parametrize("flips", [1000, pytest.param(20_000, marks=pytest.mark.long)])
def test_whatever_bit_is_flipped_nothing_behind_it_counts(
    stored: Stored, tmp_path: Path, fresh: Callable[[RankReach, int], replay.Log], flips: int
) -> None:
    chance = random.Random(SEED)
    content = stored.files[0].path.read_bytes()
    frames = frames_of(content)
    for number in range(flips):
        bit = chance.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        intact = max([0, *(f.end for f in frames if f.end <= bit // 8)])
        reach = read(stored, bytes(flipped), tmp_path)
        assert reach.end == max(end_before(frames, intact, 0), stored.start.log_offset), (
            f"seed {SEED}, bit {bit}"
        )
        if number % 100 == 0 and reach.goals:
            newest = max(reach.goals)
            _, records = laid(reach, newest, fresh(reach, newest))
            offset = reach.goals[newest].commit.log_offset
            assert records == stored.records[stored.start.log_offset : offset], f"seed {SEED}, bit {bit}"


def test_frames_that_are_whole_and_make_no_sense_are_refused_or_harm_nobody(
    stored: Stored, tmp_path: Path, fresh: Callable[[RankReach, int], replay.Log]
) -> None:
    """Storage that somebody else has written: all checksums are right."""
    chance = random.Random(SEED)
    frames = frames_of(stored.files[0].path.read_bytes())
    refused = 0
    for _ in range(NONSENSE):
        spoilt = chance.randrange(len(frames))
        chain, content = Chain(), b""
        for index, frame in enumerate(frames):
            body, number, kind = bytearray(frame.content), frame.number, frame.kind
            if index == spoilt:
                match chance.randrange(4):
                    case 0 if body:
                        body[chance.randrange(len(body))] = chance.choice((0, 1, 0x7F, 0xFF))
                    case 1:
                        number = chance.choice((0, number + 8, number - 8, 1 << 63, (1 << 64) - 8)) % (
                            1 << 64
                        )
                    case 2:
                        del body[chance.randrange(len(body) + 1) :]
                    case _:
                        kind = chance.choice(list(Kind))
            content += chain.encode(kind, number, bytes(body))
        reach = read(stored, content, tmp_path)
        for step in sorted(reach.goals)[-1:]:
            try:
                lay_out(reach, step, fresh(reach, step))
            except (BadLog, replay.LogError):
                refused += 1
    assert refused > NONSENSE // 50, f"seed {SEED}"


def test_a_gap_ends_what_can_be_reached_from_before_it_and_not_from_behind(tmp_path: Path) -> None:
    run = tmp_path / "job" / "run"
    with Harness() as h:
        log = copier(h, run)
        h.new(1, [0.0, 0.0, 0.0, 0.0])
        step(h, 1)
        h.read(1)
        assert log.copy()
        before = h.log.commits()[-1]
        for number in range(2, 5):  # a lot of log, and nobody looks
            for _ in range(8):
                h.writer.append(FREE, 0, [0] * (1 << 16))
            step(h, number)
        h.read(1)
        h.log.floor_commit = h.log.commit_count
        h.read(1)
        h.wait(lambda: h.log.freed_segments > 0, "did not release a segment")
        behind = h.log.freed_segments * h.log.segment_bytes
        log.copy()
        step(h, 5)
        h.read(1)
        assert log.copy()
        assert log.told().gaps == 1
        log.close()
        newest = h.log.commits()[-1]
    assert [one.begin for one in logs_of(run)] == [0, behind]
    assert _read_rank(0, before, logs_of(run)).goals == {}
    start = replace_offset(before, behind)
    reach = _read_rank(0, start, logs_of(run))
    assert max(reach.goals) == newest.step == 5


def replace_offset(commit: replay.Commit, offset: int) -> replay.Commit:
    """As if it lay there."""
    return cast(replay.Commit, SimpleNamespace(log_offset=offset, step=commit.step))


def test_files_before_the_newest_set_are_dropped_and_no_others(tmp_path: Path) -> None:
    run = tmp_path / "job" / "run"
    with Harness() as h:
        log = copier(h, run)
        for begin in (0, 1000, 2000):
            log_path(run, 0, begin).write_bytes(b"")
        log_path(run, 1, 0).write_bytes(b"")
        log.drop(999)
        assert len(logs_of(run)) == 4
        log.drop(1000)
        assert [(one.rank, one.begin) for one in logs_of(run)] == [(0, 1000), (0, 2000), (1, 0)]
        log.drop(1 << 40)
        assert [(one.rank, one.begin) for one in logs_of(run)] == [(0, 2000), (1, 0)]


def test_a_copier_that_was_killed_is_followed_by_one_that_goes_on_where_all_was_durable(
    tmp_path: Path, fresh: Callable[[RankReach, int], replay.Log]
) -> None:
    run = tmp_path / "job" / "run"
    with Harness() as h:
        h.new(1, [0.0, 0.0, 0.0, 0.0])
        log = copier(h, run)
        for number in (1, 2):
            step(h, number)
            h.read(1)
            log.copy()
        log.close()
        with open(log_path(run, 0, 0), "r+b") as torn:  # it was in the middle of a frame
            torn.truncate(os.path.getsize(torn.name) - 5)
        step(h, 3)
        h.read(1)
        other = copier(h, run)
        assert other.copy()
        other.close()
        first, _, third = h.log.commits()
        whole = replay.copy_records(h.log, 0, third.log_offset)
    reach = _read_rank(0, first, logs_of(run))
    assert [one.begin for one in reach.files] == [first.log_offset] and reach.notes == []
    reach = _read_rank(0, replace_offset(first, 0), logs_of(run))
    assert [one.begin for one in reach.files] == [0, first.log_offset]
    assert sorted(reach.goals) == [1, 2, 3] and len(reach.notes) == 1
    _, records = laid(reach, 3, fresh(reach, 3))
    assert records == whole


def test_descriptions_come_back_whatever_changes_from_one_to_the_next() -> None:
    chance = random.Random(SEED)

    def value(depth: int) -> object:
        match chance.randrange(7 if depth else 5):
            case 0:
                return chance.choice([0, 1, True, False, None])
            case 1:
                return chance.choice([0.0, -0.0, 1e-300, 0.1])
            case 2 | 3:
                return chance.choice(["", "a", "ä\u2028"])
            case 4 | 5:
                return {str(key): value(depth - 1) for key in range(chance.randrange(4))} if depth else 7
            case _:
                return [value(depth - 1) for _ in range(chance.randrange(4))]

    for _ in range(300):
        there, back = Descriptions(), Descriptions()
        for _ in range(5):
            told = json.dumps({"told": value(4)})
            back.decode(there.encode(told.encode()))
            assert json.loads(back.last) == json.loads(told) and back.last.decode() == told, f"seed {SEED}"


@pytest.mark.parametrize(
    "content",
    [b"", b"x", zlib.compress(b"[]"), zlib.compress(b"{}"), zlib.compress(b'{"changes": [[[1], 2]]}')],
)
def test_a_description_that_makes_no_sense_is_refused(content: bytes) -> None:
    with pytest.raises(BadChanges):
        Descriptions().decode(content)


def test_a_commit_that_makes_no_sense_is_refused() -> None:
    for content in (b"", b"x" * 15, b"\xff" * 16, bytes(16)):
        with pytest.raises(BadLog, match=re.escape("a commit in it makes no sense")):
            read_commit(content)
