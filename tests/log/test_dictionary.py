"""The dictionary of templates: regions that are used again and again, and never while the log needs them."""

from __future__ import annotations

import itertools
import random
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from executor_harness import (
    ALLOCATE,
    FLOAT,
    HOST_TO_DEVICE,
    OPERATOR,
    PHASE,
    Harness,
    anonymous_bytes,
    double,
    vector,
)

from understudy.replay import Log, LogError, RemoteError, RetiredTemplate, create_log

DICTIONARY = 64 << 10
REGION = DICTIONARY // 16
TURN = 16
"""Regions of a dictionary; half of them may be named by new records."""
SECONDS = 30.0


def small(*, protect: bool = True, world: int = 2, snapshot_bytes: int = 0) -> Harness:
    """A rank with a dictionary of 16 pages."""
    return Harness(protect=protect, world=world, snapshot_bytes=snapshot_bytes, dictionary_bytes=DICTIONARY)


def adding(h: Harness, number: float) -> int:
    """A template of its own for each number: `target += source * number`."""
    return h.template("aten::add_.Tensor", [*vector(), *vector(), 17, double(number)])


def fill_regions(h: Harness, regions: int, first: int = 1 << 20) -> None:
    """Templates that no record names, until the dictionary has gone so far."""
    wanted = h.log.dictionary_tail + regions * REGION
    while h.log.dictionary_tail < wanted:
        first += 1
        adding(h, float(first))


def let_go(h: Harness) -> None:
    """As proxyd does once all ranks have got so far."""
    h.commit()
    h.writer.append(PHASE, 0, [])  # the commit takes effect
    h.run_all()
    h.log.floor_commit = h.log.commit_count


def await_snapshot(h: Harness, serial: int) -> None:
    h.wait(lambda: h.log.snapshot_begun == serial, "took no snapshot")


def memory_of(h: Harness) -> int:
    return 512 * (Path(h.directory) / "dictionary").stat().st_blocks


def rename_template(h: Harness, old: int, new: int) -> None:
    """The newest record that names `old` names `new` from here on, whatever the writer thinks of it."""
    segments = Path(h.directory) / "segments"
    at = segments.read_bytes().rindex(struct.pack("<Q", old))
    with segments.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack("<Q", new))


@pytest.mark.parametrize("protect", [True, False])
def test_calls_that_never_come_back_go_on_for_ever_within_the_dictionarys_size(protect: bool) -> None:
    with small(protect=protect) as h:
        h.new(1, [0.0] * 4)
        h.new(2, [1.0] * 4)
        total, most = 0.0, 0
        for step in range(1, 41):
            for number in range(100):
                factor = float(number % 7 + step / 64)
                h.writer.append(OPERATOR, adding(h, factor), [1, 2])
                total += factor
            let_go(h)
            most = max(most, memory_of(h))
        assert h.read(1) == (total,) * 4
        assert h.log.dictionary_begin > 4 * DICTIONARY
        assert h.log.dictionary_tail - h.log.dictionary_begin <= DICTIONARY
        assert most <= DICTIONARY
        assert h.log.degraded == 0


def test_a_new_record_cannot_name_a_template_that_is_to_go() -> None:
    with small() as h:
        h.new(1, [0.0] * 4)
        h.new(2, [1.0] * 4)
        h.executor.park()
        template = adding(h, 3.0)
        fill_regions(h, TURN // 2 - 1)
        h.writer.append(OPERATOR, template, [1, 2])
        fill_regions(h, 1)
        with pytest.raises(RetiredTemplate):
            h.writer.append(OPERATOR, template, [1, 2])
        assert [row["operator"] for row in h.log.dump() if row["kind"] == "operator"] == ["aten::add_.Tensor"]
        h.writer.append(OPERATOR, adding(h, 3.0), [1, 2])
        h.executor.resume()
        assert h.read(1) == (6.0,) * 4


def start_filling(h: Harness) -> tuple[threading.Thread, list[Exception]]:
    """A thread that needs one region more than there are; once it waits."""
    problems: list[Exception] = []

    def fill() -> None:
        try:
            fill_regions(h, TURN + 1)
        except (LogError, RemoteError) as problem:
            problems.append(problem)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    while not h.log.backpressure and thread.is_alive():
        thread.join(0.001)
    assert thread.is_alive(), problems
    return thread, problems


def test_a_worker_waits_while_the_log_still_needs_all_templates() -> None:
    with small() as h:
        h.new(1, [0.0] * 4)
        h.new(2, [1.0] * 4)
        h.writer.append(OPERATOR, adding(h, 3.0), [1, 2])
        h.executor.park()
        thread, problems = start_filling(h)
        assert (h.log.dictionary_begin, h.log.dictionary_tail) == (0, DICTIONARY)
        assert all(row.get("operator") != "?" for row in h.log.dump())
        h.writer.append(ALLOCATE, 3, [16])  # others go on meanwhile
        h.executor.resume()  # commits of its own, as the worker waits
        h.wait(lambda: h.log.commit_count > 0, "did not commit")
        h.log.floor_commit = h.log.commit_count
        thread.join(SECONDS)
        assert not thread.is_alive() and problems == []
        assert (h.log.backpressure, h.log.degraded) == (0, 0)
        assert h.log.dictionary_begin > 0
        assert h.read(1) == (3.0,) * 4


@pytest.mark.parametrize("world", [1, 2])
def test_a_worker_whose_peers_do_not_follow_does_not_wait_for_ever(
    world: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with small(world=world, protect=world > 1) as h:
        h.new(1, [0.0] * 4)
        h.new(2, [1.0] * 4)
        total = 0.0
        for number in range(1, 600):
            h.writer.append(OPERATOR, adding(h, float(number)), [1, 2])
            total += number
        assert h.read(1) == (total,) * 4
    assert capfd.readouterr().err.count("it is cut here") == (1 if world > 1 else 0)


def test_a_worker_that_waits_for_a_region_learns_that_its_session_is_lost() -> None:
    with small() as h:
        h.new(1, [0.0] * 4)
        h.executor.park()
        thread, problems = start_filling(h)
        h.log.lose("rank 0 cannot go on: the test says so")
        thread.join(SECONDS)
        assert [str(problem) for problem in problems] == ["rank 0 cannot go on: the test says so"]


@pytest.mark.parametrize("how", ["rewind", "restore", "snapshot"])
def test_older_commits_are_replayed_while_the_worker_is_regions_further(how: str) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with small(snapshot_bytes=16 << 20) as h:
        h.new(1, [0.0] * 4)
        h.new(2, [1.0] * 4)
        h.log.order_snapshot(1)
        total = 0.0

        def train(steps: int) -> None:
            nonlocal total
            for _ in range(steps):
                for _ in range(50):
                    factor = float(chance.randrange(1 << 10))
                    h.writer.append(OPERATOR, adding(h, factor), [1, 2])
                    total += factor
                h.commit()
            h.read(1)

        for serial in range(2, 32):  # turns of the dictionary
            train(2)
            let_go(h)
            await_snapshot(h, serial - 1)
            h.log.snapshot_floor = serial - 1
            h.log.order_snapshot(serial)
        before = h.log.commit_count
        train(4)  # six regions
        assert h.log.dictionary_begin > DICTIONARY
        expected = h.read(1)
        assert expected == (total,) * 4
        commit = chance.randrange(before, h.log.commit_count)
        h.executor.park()
        if how == "rewind":
            h.executor.rewind(commit)
        else:
            h.executor.detach()
            h.executor = h.new_executor()
            if how == "restore":
                h.executor.restore(commit)
            else:
                h.executor.restore_snapshot(h.log.snapshots()[-1].commit.number)
        h.executor.resume()
        assert h.read(1) == expected
        assert h.log.replies_different == 0


def test_threads_that_store_retired_templates_again_lose_no_call() -> None:
    """As the shape cache does: each thread keeps ids for as long as they are accepted."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    calls, threads, factors = 1500, 4, 60
    again = [0] * threads
    with small(protect=False, world=1) as h:
        h.new(100, [1.0] * 4)
        for n in range(threads):
            h.new(1 + n, [0.0] * 4)
        totals = [0.0] * threads

        def run(n: int) -> None:
            chance = random.Random(seed + n)
            known: dict[float, int] = {}
            for call in range(calls):
                factor = float(chance.randrange(factors) if chance.random() < 0.7 else 1000 * n + call)
                if factor not in known:
                    known[factor] = adding(h, factor)
                while True:
                    try:
                        h.writer.append(OPERATOR, known[factor], [1 + n, 100])
                        break
                    except RetiredTemplate:
                        again[n] += 1
                        known[factor] = adding(h, factor)
                totals[n] += factor
                if call % 50 == 0:
                    h.commit()

        workers = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert [h.read(1 + n) for n in range(threads)] == [(total,) * 4 for total in totals]
        assert h.log.dictionary_begin > 0 and sum(again) > 0
        assert h.log.dictionary_tail - h.log.dictionary_begin <= DICTIONARY


@pytest.mark.cpu_driver
def test_what_the_server_parsed_is_forgotten_with_its_template() -> None:
    """Every call has a layout of its own: a million bytes for a thousand calls if all were kept."""
    calls = 20_000
    with small(protect=False, world=1) as h:
        h.writer.append(ALLOCATE, 1, [4 * (5 * calls + 4)])

        def run(first: int) -> int:
            for n in range(first, first + calls):
                key = [*vector(4, offset=n), *vector(4, offset=n), 17, double(1.0)]
                h.writer.append(OPERATOR, h.template("aten::add_.Tensor", key), [1, 1])
                if n % 100 == 0:
                    h.commit()
            h.synchronize()
            return anonymous_bytes()

        marks = [run(n * calls) for n in range(5)]  # the heap may take more now and then
        assert min(after - before for before, after in itertools.pairwise(marks[1:])) < 6 << 20


HOSTILE: dict[str, Callable[[Harness, int, int], int]] = {
    "of the region before the oldest": lambda h, first, last: h.log.dictionary_begin - REGION,
    "that was good long ago": lambda h, first, last: first,
    "a turn of the dictionary ago": lambda h, first, last: last - DICTIONARY,
    "a turn of the dictionary ahead": lambda h, first, last: last + DICTIONARY,
    "that is not aligned": lambda h, first, last: last + 4,
    "right behind the last one": lambda h, first, last: h.log.dictionary_tail,
    "in what the last region has not filled": lambda h, first, last: h.log.dictionary_begin + REGION - 8,
    "that wraps around": lambda h, first, last: 2**64 - 8,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_an_id_outside_the_live_regions_ends_its_own_session(what: str) -> None:
    with small() as h, small() as bystander:
        for harness in (h, bystander):
            harness.new(1, [0.0] * 4)
            harness.new(2, [1.0] * 4)
        first = adding(h, 1.0)
        h.writer.append(OPERATOR, first, [1, 2])
        for _ in range(2):
            let_go(h)
            fill_regions(h, TURN // 2)
        let_go(h)
        fill_regions(h, 1)
        assert h.log.dictionary_begin > 2 * REGION
        last = adding(h, 2.0)
        h.writer.append(OPERATOR, last, [1, 2])
        assert h.read(1) == (3.0,) * 4
        h.executor.park()
        h.writer.append(OPERATOR, last, [1, 2])
        rename_template(h, last, HOSTILE[what](h, first, last))
        h.executor.resume()
        with pytest.raises(RemoteError, match="refused record"):
            h.synchronize()
        assert "?" in {row.get("operator") for row in h.log.dump()}
        assert bystander.read(1) == (0.0,) * 4


@pytest.mark.parametrize("begin", [8, REGION, 2**63, 2**64 - 8])
def test_a_worker_that_gives_up_templates_it_still_needs_ends_its_own_session(begin: int) -> None:
    with small() as h:
        h.new(1, [0.0] * 4)
        h.new(2, [1.0] * 4)
        template = adding(h, 1.0)
        h.writer.append(OPERATOR, template, [1, 2])
        h.synchronize()
        control = Path(h.directory) / "control"
        with control.open("r+b") as file:
            file.seek(192)  # dictionary_begin: WorkerPart's second cache line, behind what proxyd fixed
            assert file.read(8) == bytes(8)
            file.seek(192)
            file.write(struct.pack("<Q", begin))
        h.writer.append(OPERATOR, template, [1, 2])
        with pytest.raises(RemoteError, match="gone from the dictionary"):
            h.synchronize()


def test_a_template_larger_than_a_region_is_refused_where_it_is_made() -> None:
    with small() as h:
        h.new(1, [0.0] * 4)
        with pytest.raises(LogError, match="too large for the log"):
            h.template("aten::_foreach_zero_", [1 | FLOAT << 8] * (REGION // 8))
        h.writer.append(HOST_TO_DEVICE, 1, [0, 8, 0])
        h.synchronize()


@pytest.mark.parametrize("size", [0, DICTIONARY - 4096, DICTIONARY + 8])
def test_a_dictionary_that_cannot_be_divided_is_not_made(size: int, tmp_path: Path) -> None:
    with pytest.raises(LogError, match="multiple of"):
        create_log(str(tmp_path), dictionary_bytes=size)


@pytest.mark.parametrize("size", [0, 15, 16, 100, 2 * DICTIONARY, 2**64 - 128])
def test_a_control_page_with_an_impossible_dictionary_is_refused(size: int) -> None:
    with small() as h:
        control = Path(h.directory) / "control"
        with control.open("r+b") as file:
            file.seek(32)
            assert struct.unpack("<Q", file.read(8)) == (DICTIONARY,)
            file.seek(32)
            file.write(struct.pack("<Q", size))
        with pytest.raises(LogError, match="do not fit the files"):
            Log(h.directory)
