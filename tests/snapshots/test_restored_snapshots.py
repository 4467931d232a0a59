"""A stored snapshot is put back into a log exactly as it was, or not at all."""

from __future__ import annotations

import random
import struct
import tempfile
from pathlib import Path

import pytest
from executor_harness import ALLOCATE, FREE, OPERATOR, SEED, Harness, double, vector
from test_snapshots import LIMIT, order, send, taken

from understudy import replay
from understudy.recovery.snapshots import Store
from understudy.recovery.snapshots.restore.checking import problems_of
from understudy.recovery.snapshots.restore.reading import Damaged, SetReader, StoreError
from understudy.recovery.snapshots.restore.restoring import find, restore
from understudy.recovery.snapshots.stores.catalogue import read_run
from understudy.recovery.snapshots.stores.layout import store_path
from understudy.recovery.snapshots.stores.parts import split
from understudy.recovery.snapshots.writing.mapped import MappedAreas
from understudy.recovery.snapshots.writing.writer import holdings, read_source

SERIAL = 3
HUGE_PAGE = 2 << 20
WORD = struct.calcsize("<Q")
ROW_LOG_OFFSET, ROW_COMMUNICATORS = WORD, 7 * WORD + 4


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "job" / "run"


def persist(h: Harness, run: Path, world: int = 1) -> None:
    """The snapshot of one rank, `world` times: replicas share the writing."""
    run.mkdir(parents=True)
    sources = [read_source(rank, Path(h.directory), SERIAL, MappedAreas()) for rank in range(world)]
    parts = split({source.rank: holdings(source.contents) for source in sources})
    for source in sources:
        extents = source.to_write(parts[source.rank])
        path = store_path(run, source.rank, 0)
        Store.create(path, slots=2, slot_bytes=extents.needed_slot_bytes())
        with Store.open(path) as store:
            store.persist(
                job="job", rank=source.rank, world=world, step=1, serial=SERIAL, extents=extents, timeout_s=1
            )


def snapshot(h: Harness) -> int:
    """Of two large buffers and two small ones, an empty one and a generator; answers its commit."""
    for handle, length in ((1, 1 << 18), (2, 1 << 18), (3, 2), (4, 6)):
        h.writer.append(ALLOCATE, handle, [4 * length])
        send(h, handle, length, handle)
    h.writer.append(ALLOCATE, 5, [0])
    h.writer.append(SEED, 0, [1234])
    uniform = h.template("aten::uniform_", [*vector(6), 7, 7, 11])
    h.writer.append(OPERATOR, uniform, [4, double(0.0), double(1.0), 0])
    order(h, SERIAL)
    h.commit()
    h.writer.append(OPERATOR, uniform, [4, double(0.0), double(1.0), 0])
    h.synchronize()
    return taken(h, SERIAL).commit.number


def damaged(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def stored_tables(run: Path) -> tuple[bytes, bytes]:
    with SetReader(find(run, SERIAL)) as reader:
        return reader.part(0).tables()


def test_a_restored_snapshot_is_what_it_was_and_the_replay_gives_the_same_values(run: Path) -> None:
    with Harness(snapshot_bytes=LIMIT) as h:
        commit = snapshot(h)
        drawn = h.read(4, 6)
        persist(h, run)
        send(h, 1, 1 << 18, 9)
        h.add(1, 2, 1 << 18)
        end = h.read(1)
        h.executor.park()
        state = {handle: h.executor.buffer_bytes(handle) for handle in range(1, 6)}
        with open(f"{h.directory}/snapshot", "r+b") as area:
            area.write(bytes(8 << 20))
        assert restore(find(run, SERIAL), {0: Path(h.directory)}) == sum(state.values())
        assert [one.serial for one in h.log.snapshots()] == [SERIAL]
        other = h.new_executor()
        other.restore_snapshot(commit)
        assert {handle: other.buffer_bytes(handle) for handle in state} == state
        assert other.read_state(2, 0, 1 << 20) == struct.pack("<f", 2) * (1 << 18)
        h.executor = other
        other.resume()
        assert (h.read(4, 6), h.read(1)) == (drawn, end)
        assert h.log.replies_compared and not h.log.replies_different


def test_what_replicas_share_the_writing_of_is_joined_in_the_logs_of_both(run: Path) -> None:
    with Harness(snapshot_bytes=LIMIT) as h, Harness(snapshot_bytes=LIMIT) as twin:
        for rank in (h, twin):
            snapshot(rank)
            rank.executor.park()
        persist(h, run, world=2)
        with SetReader(find(run, SERIAL)) as reader:
            assert {reader.place(0, handle).rank for handle in (1, 2)} == {0, 1}
        restore(find(run, SERIAL), {0: Path(h.directory), 1: Path(twin.directory)})
        for rank in (h, twin):
            other = rank.new_executor()
            other.restore_snapshot(1)
            for handle in (1, 2):
                assert other.read_state(handle, 0, 1 << 20) == struct.pack("<f", handle) * (1 << 18)
            rank.executor = other


def test_sets_of_a_server_that_makes_and_frees_buffers_are_stored_and_come_back(run: Path, seed: int) -> None:
    chance = random.Random(seed)
    run.mkdir(parents=True)
    path, areas = store_path(run, 0, 0), MappedAreas()
    Store.create(path, slots=3, slot_bytes=32 << 20)
    values: dict[int, tuple[int, float]] = {}
    with Harness(snapshot_bytes=LIMIT) as h:
        for serial in range(1, 6):
            for handle in chance.sample(sorted(values), len(values) // 2):
                h.writer.free_later(handle)
                h.writer.append(FREE, 0, [])
                del values[handle]
            for handle in range(10 * serial, 10 * serial + 4):
                length = 2 * chance.choice([1, 8, 3000, 40_000, 100_000])
                values[handle] = length, float(handle)
                h.writer.append(ALLOCATE, handle, [4 * length])
                send(h, handle, length, handle)
            order(h, serial)
            h.log.snapshot_floor = serial - 1
            h.commit()
            h.synchronize()
            commit = taken(h, serial).commit.number
            source = read_source(0, Path(h.directory), serial, areas)
            extents = source.to_write(split({0: holdings(source.contents)})[0])
            with Store.open(path) as store:
                store.persist(
                    job="job", rank=0, world=1, step=1, serial=serial, extents=extents, timeout_s=1,
                    confirm=lambda: source.log.snapshot_holds(serial),  # noqa: B023 - it is asked now
                )  # fmt: skip
                store.release_before(serial)
        h.executor.park()
        with open(f"{h.directory}/snapshot", "r+b") as area:
            area.write(bytes(32 << 20))
        restore(find(run, 5), {0: Path(h.directory)})
        other = h.new_executor()
        other.restore_snapshot(commit)
        for handle, (length, value) in values.items():
            assert other.read_state(handle, 0, 4 * length) == struct.pack("<f", value) * length
        h.executor = other


def test_area_of_a_snapshot_is_in_huge_pages_where_the_kernel_gives_them(run: Path, tmp_path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(HUGE_PAGE)
        if replay.MappedArea(file.name, writable=True).back() == 0:
            pytest.skip("this kernel has no huge pages for shared memory, or none that is free")
    with Harness(snapshot_bytes=LIMIT) as h:
        snapshot(h)
        assert h.log.snapshot_huge_bytes == HUGE_PAGE
        persist(h, run)
        h.executor.park()
        restore(find(run, SERIAL), {0: Path(h.directory)})
        assert h.log.snapshot_huge_bytes == HUGE_PAGE


def test_a_digest_that_a_server_hands_over_wrongly_keeps_a_set_from_being_restored(run: Path) -> None:
    with Harness(snapshot_bytes=LIMIT) as h:
        snapshot(h)
        contents = replay.Log(h.directory).snapshot_contents(SERIAL)
        offset = next(offset for handle, _, _, offset in contents.buffers if handle == 2)
        with open(f"{h.directory}/snapshot", "r+b") as area:
            area.seek(offset + 1000)
            area.write(b"\x55")
        persist(h, run)
        h.executor.park()
        (told,) = problems_of(find(run, SERIAL))
        assert "contents of rank 0 are damaged (1): not what they were when their digests were taken" in told
        with pytest.raises(
            StoreError, match=r"extent \d+ \(kind 1, id 2\) is not what it was when its digest"
        ):
            restore(find(run, SERIAL), {0: Path(h.directory)})
        assert h.log.snapshots() == []


def test_a_damaged_or_incomplete_set_is_refused_with_a_sentence(run: Path) -> None:
    with Harness(snapshot_bytes=LIMIT) as h:
        snapshot(h)
        persist(h, run, world=2)
        h.executor.park()
        logs = {0: Path(h.directory)}
        with pytest.raises(Damaged, match="no complete snapshot 4"):
            find(run, 4)
        path = store_path(run, 1, 0)
        whole = path.read_bytes()
        with Store.open(path, writable=False) as store:
            at = {(kind, number): 8192 + 4096 + offset for kind, number, _, offset in store.layout(1)}
        (buffer,) = [number for kind, number in at if kind == 1 and number in (1, 2)]
        for content, sentence, left in (
            (damaged(whole, at[3, 1] + 20), r"extent \d+ \(kind 3, id 1\) is not", [SERIAL]),  # read first
            (damaged(whole, at[1, buffer] + 20), rf"extent \d+ \(kind 1, id {buffer}\) is not what", []),
        ):
            path.write_bytes(content)
            with pytest.raises(StoreError, match=sentence):
                restore(find(run, SERIAL), logs)
            assert [one.serial for one in h.log.snapshots()] == left
        path.unlink()
        with pytest.raises(Damaged, match="no complete snapshot 3"):
            find(run, SERIAL)


def test_a_set_that_names_other_bytes_than_the_manifest_has_is_not_published(run: Path) -> None:
    """As a store might that is whole, and wrong."""
    with Harness(snapshot_bytes=LIMIT) as h:
        snapshot(h)
        persist(h, run)
        h.executor.park()
        (stored,) = read_run(run).sets
        with SetReader(stored) as reader:
            contents = h.log.begin_restore(*reader.part(0).tables())
            with open(f"{h.directory}/snapshot", "r+b") as area:
                for handle, _, _, offset in contents.buffers:
                    area.seek(offset)
                    area.write(reader.part(0).read(reader.place(0, {1: 2, 2: 1}.get(handle, handle))))
        with pytest.raises(replay.LogError, match=r"buffer [12] is not what it was at the commit"):
            h.log.finish_restore(SERIAL, contents)
        assert h.log.snapshots() == []


def test_tables_of_a_stored_snapshot_that_make_no_sense_are_refused(run: Path, seed: int) -> None:
    chance = random.Random(seed)
    with Harness(snapshot_bytes=LIMIT) as h:
        snapshot(h)
        persist(h, run)
        h.executor.park()
        row, manifest = stored_tables(run)
        for bad_row, bad_manifest in (
            (row[:-1], manifest), (row + b"\0", manifest), (b"", manifest), (row, b""), (row, manifest[:-8]),
            (row, manifest + bytes(8)), (bytes(WORD) + row[WORD:], manifest),
            (patched(row, ROW_LOG_OFFSET, 1 << 60), manifest),
            (patched(row, ROW_COMMUNICATORS, 1 << 20, "<I"), manifest),
            *((row, flipped(manifest, chance.randrange(8 * len(manifest)))) for _ in range(2000)),
        ):  # fmt: skip
            with pytest.raises(replay.LogError):
                h.log.begin_restore(bad_row, bad_manifest)
        assert [one.serial for one in h.log.snapshots()] == [SERIAL], "what is refused takes nothing away"


def test_a_stored_snapshot_that_the_log_does_not_reach_or_that_has_no_room_is_refused(run: Path) -> None:
    with Harness(snapshot_bytes=LIMIT) as h, Harness(snapshot_bytes=1 << 20) as small:
        snapshot(h)
        persist(h, run)
        for value in range(12):
            send(h, 1, 1 << 18, value)
            h.commit()
            h.synchronize()
            h.log.floor_commit = h.log.commit_count
        h.log.snapshot_floor = SERIAL + 1
        h.commit()
        send(h, 1, 1 << 18, 0)
        h.synchronize()
        h.executor.park()
        row, manifest = stored_tables(run)
        with pytest.raises(replay.LogError, match="the log does not reach back to commit 1"):
            h.log.begin_restore(row, manifest)
        with pytest.raises(replay.LogError, match=r"larger than the snapshot area \(see --snapshot-limit\)"):
            small.log.begin_restore(patched(row, ROW_LOG_OFFSET, 0), manifest)


def patched(content: bytes, at: int, value: int, form: str = "<Q") -> bytes:
    changed = bytearray(content)
    struct.pack_into(form, changed, at, value)
    return bytes(changed)


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
