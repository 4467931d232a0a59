"""How long until a state is durable: turns of all ways, in rounds of random order, as rows for the JSON."""

from __future__ import annotations

import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paper_policies import CheckFreq, Gemini, Gpm, PcCheck, prepare, slot_bytes_for
from persist_ways import (
    BLOCK,
    Distributed,
    Raw,
    RawCommitted,
    TorchSave,
    Understudy,
    Way,
    create_store,
    engines_there,
    sync_directory,
)
from snapshot_area import SnapshotArea
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from training_state import State, bytes_of, same, training_state

Row = dict[str, Any]
RAW, RAW_COMMITTED = "raw loop", "raw loop, two blocks more"
RAW_PAGES = "raw loop, ordinary pages"
OURS, OURS_COPY = "understudy", "understudy, copied first"
LEAST_ROUNDS = 3
SLOTS = 3  # as by default (--persist-slots): with two, the superblock needs a sync of its own each time
AREA_SLOTS = 3  # of the file that GPM, PCcheck (N = 2) and the raw loop write in turns


@dataclass(frozen=True)
class Effort:
    """What to measure, and how often."""

    megabytes: Sequence[int]
    rounds: int
    sweep_megabytes: int
    sweep_rounds: int
    limit_s: float
    """After it, no more than LEAST_ROUNDS of the same turns."""
    chunks_mib: Sequence[int] = (1, 4, 16)
    threads: Sequence[int] = (1, 2, 4)
    at_a_time: Sequence[int] = (1, 2, 3)


@dataclass(frozen=True)
class Turn:
    blocked_s: float
    """Until the state may change again."""
    durable_s: float
    processor_s: float
    """Of this process, all threads."""


def timed_save(way: Way, state: State) -> Turn:
    begin, processor = time.perf_counter(), time.process_time()
    future = way.save(state)
    blocked = time.perf_counter() - begin
    future.result()
    durable, processor = time.perf_counter() - begin, time.process_time() - processor
    if isinstance(way, Raw):
        blocked = durable = way.seconds
    return Turn(blocked, durable, processor)


@dataclass(frozen=True)
class Rounds:
    """Takes turns."""

    number: int
    limit_s: float
    tell: Callable[[str], object]

    def run(self, label: str, actions: Mapping[str, Callable[[], Turn]]) -> dict[str, list[Turn]]:
        turns: dict[str, list[Turn]] = {name: [] for name in actions}
        end = time.monotonic() + self.limit_s
        for number in range(self.number):
            if number >= LEAST_ROUNDS and time.monotonic() > end:
                break
            for name in random.sample(list(actions), len(actions)):  # no one always after the same other
                self.tell(f"{label}: {name}, round {number + 1}")
                turns[name].append(actions[name]())
        return turns


def row_of(name: str, count: int, turns: Sequence[Turn], **more: Any) -> Row:
    median = statistics.median(turn.durable_s for turn in turns)
    return {
        "way": name, "bytes": count, **more, "durable_s": median, "gb_per_s": count / median / 1e9,
        "blocked_s": statistics.median(turn.blocked_s for turn in turns),
        "processor_s": statistics.median(turn.processor_s for turn in turns),
        "turns": [asdict(turn) for turn in turns],
    }  # fmt: skip


def ratio(rows: Sequence[Row], above: str, below: str, count: int) -> float:
    """Median of the rounds' ratios of times."""
    turns = [
        next(r["turns"] for r in rows if r["way"] == way and r["bytes"] == count) for way in (above, below)
    ]
    return statistics.median(a["durable_s"] / b["durable_s"] for a, b in zip(*turns, strict=True))


# ---------------------------------------------------------------- how long until it is durable
def ways_of(folder: Path, state: State, closing_later: ExitStack) -> dict[str, Way]:
    """All that is compared, open, on files whose blocks have all been written once."""
    create_store(folder / "store", state, SLOTS)
    prepare(folder / "area", BLOCK + AREA_SLOTS * slot_bytes_for(state))
    distributed = {
        "dcp.save": None,
        "dcp.async_save, thread": AsyncCheckpointerType.THREAD,
        "dcp.async_save, process": AsyncCheckpointerType.PROCESS,
    }
    ways: dict[str, Way] = {
        RAW: Raw(folder / "area", bytes_of(state)),
        RAW_PAGES: Raw(folder / "area", bytes_of(state), huge_pages=False),
        RAW_COMMITTED: RawCommitted(folder / "area", bytes_of(state)),
        "torch.save": TorchSave(folder / "torch.save"),
        **{name: Distributed(folder / name, by) for name, by in distributed.items()},
        "CheckFreq": CheckFreq(folder / "checkfreq"),
        "GPM": Gpm(folder / "area", state),
        "Gemini (memory of a peer)": Gemini(state),
        "PCcheck": PcCheck(folder / "area", state),
    }
    for way in ways.values():
        closing_later.enter_context(way)
    return ways


def persist_times(effort: Effort, folder: Path, tell: Callable[[str], object]) -> tuple[list[Row], list[Row]]:
    """Rows of saving, and of the memory and storage that the largest takes."""
    rows: list[Row] = []
    footprints: list[Row] = []
    rounds = Rounds(effort.rounds, effort.limit_s, tell)
    for megabytes in effort.megabytes:
        state = training_state(megabytes * 1_000_000)
        with new_folder(folder) as here, ExitStack() as stack:
            ways = ways_of(here, state, stack)
            if megabytes == min(effort.megabytes):
                for name, way in ways.items():
                    check_content(name, way, state)
            rows += saves_of(ways, here, state, rounds)
            if megabytes == max(effort.megabytes):
                footprints = footprint_rows(ways, here / "store", state)
    return rows, footprints


def check_content(name: str, way: Way, state: State) -> None:
    """What is measured is something that one can go on from."""
    if not isinstance(way, Raw):
        way.save(state).result()
        if not same(way.load(), state):
            raise ValueError(f"{name} does not give back what was saved")
        way.clean()


def saves_of(ways: Mapping[str, Way], folder: Path, state: State, rounds: Rounds) -> list[Row]:
    count = bytes_of(state)
    label = f"{count / 1e6:.0f} MB"
    actions = {name: saving(way, state, folder) for name, way in ways.items()}
    replace(rounds, number=1).run(f"{label}, first saves", actions)
    store = folder / "store"
    area = SnapshotArea(state)
    actions[OURS] = with_store(store, state, area=area)
    actions[OURS_COPY] = with_store(store, state, area=area, copies=True)
    for engine in engines_there(store)[0]:
        actions[f"{OURS}, {engine}"] = with_store(store, state, area=area, engine=engine)
    return [
        row_of(name, count, turns, durable=name not in ways or ways[name].durable)
        for name, turns in rounds.run(label, actions).items()
    ]


def saving(way: Way, state: State, folder: Path) -> Callable[[], Turn]:
    def turn() -> Turn:
        try:
            return timed_save(way, state)
        finally:
            way.clean()  # or all of them together would need too much room
            sync_directory(folder)  # what that costs is not the next one's

    return turn


def with_store(path: Path, state: State, **options: Any) -> Callable[[], Turn]:
    """One store for all engines: it is opened for each turn, and its memory is touched before."""

    def turn() -> Turn:
        with Understudy(path, **options) as way:
            way.save(state).result()
            way.settle()
            return timed_save(way, state)

    return turn


def footprint_rows(ways: Mapping[str, Way], store: Path, state: State) -> list[Row]:
    paper = {
        "CheckFreq": ("m", "2 m"),
        "GPM": ("0", "2 m"),
        "Gemini (memory of a peer)": ("m", "0"),
        "PCcheck": ("m to 2 m", "(N + 1) m"),
    }
    rows = []
    with Understudy(store) as ours:
        for name, way in {**ways, OURS: ours, OURS_COPY: ours}.items():
            if isinstance(way, Raw):
                continue
            ours.copies = name == OURS_COPY
            known = way.dram(state)
            rows.append(
                {
                    "way": name, "state": bytes_of(state), "storage": way.storage(state),
                    "dram": peak_of(way, state) if known is None else known,
                    "measured": known is None, "paper": paper.get(name),
                }
            )  # fmt: skip
    return rows


def peak_of(way: Way, state: State) -> int:
    """Bytes by which this process and its children grow at most during one save, on top of one before."""
    way.save(state).result()
    processes = ["self", *Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    before = sum(_memory(process, "VmRSS") for process in processes)
    for process in processes:
        Path(f"/proc/{process}/clear_refs").write_text("5")  # the high-water mark begins anew
    way.save(state).result()
    grown = sum(_memory(process, "VmHWM") for process in processes) - before
    way.clean()
    return max(0, grown)


def _memory(process: str, what: str) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(what))


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    inner = folder / "one"
    inner.mkdir()
    try:
        yield inner
    finally:
        shutil.rmtree(inner)
        sync_directory(folder)
