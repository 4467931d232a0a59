"""What the time to persist depends on: chunks, threads, and how many are under way."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from paper_policies import prepare
from persist_measure import (
    OURS,
    RAW,
    SLOTS,
    Effort,
    Rounds,
    Row,
    Turn,
    new_folder,
    row_of,
    saving,
    with_store,
)
from persist_ways import BLOCK, MIB, Raw, Understudy, create_store
from snapshot_area import SnapshotArea
from training_state import bytes_of, training_state


def sensitivity(effort: Effort, folder: Path, tell: Callable[[str], object]) -> list[Row]:
    """Chunks and threads, beside a raw loop with the same ones (Figures 13 and 14)."""
    state = training_state(effort.sweep_megabytes * 1_000_000)
    area, count = SnapshotArea(state), bytes_of(state)
    rounds = Rounds(effort.sweep_rounds, effort.limit_s, tell)
    rows = []
    with new_folder(folder) as here:
        prepare(here / "area", count + BLOCK)
        for chunk in effort.chunks_mib:
            store = here / f"store-{chunk}"
            create_store(store, state, SLOTS, chunk=chunk * MIB)
            actions: dict[str, Callable[[], Turn]] = {}
            for threads in effort.threads:
                raw = Raw(here / "area", count, chunk * MIB, threads)
                actions[f"{RAW} {threads}"] = saving(raw, state, here)
                actions[f"{OURS} {threads}"] = with_store(store, state, area=area, threads=threads)
            for name, turns in rounds.run(f"chunks of {chunk} MiB", actions).items():
                way, number = name.rsplit(" ", 1)
                rows.append(row_of(way, count, turns, chunk_mib=chunk, threads=int(number)))
            store.unlink()
    return rows


def several_at_a_time(effort: Effort, folder: Path, tell: Callable[[str], object]) -> list[Row]:
    """N snapshots at once from N threads, beside a raw loop over as many bytes (Figure 12)."""
    state = training_state(effort.sweep_megabytes * 1_000_000)
    area = SnapshotArea(state)
    count, most = bytes_of(state), max(effort.at_a_time)
    rounds = Rounds(effort.sweep_rounds, effort.limit_s, tell)
    with new_folder(folder) as here:
        create_store(here / "store", state, slots=most + 1)
        prepare(here / "area", most * count + BLOCK)
        with Understudy(here / "store") as ours, ThreadPoolExecutor(most) as pool:
            for _ in range(most + 1):  # each slot once
                ours.persist(area)
            ours.release()
            actions: dict[str, Callable[[], Turn]] = {}
            for number in effort.at_a_time:
                actions[f"{OURS} {number}"] = partial(together, ours, area, pool, number)
                actions[f"{RAW} {number}"] = saving(Raw(here / "area", number * count), state, here)
            found = rounds.run("several at a time", actions)
    rows = []
    for name, turns in found.items():
        way, number_of = name.rsplit(" ", 1)
        rows.append(row_of(way, int(number_of) * count, turns, at_a_time=int(number_of)))
    return rows


def together(way: Understudy, area: SnapshotArea, pool: ThreadPoolExecutor, number: int) -> Turn:
    begin, processor = time.perf_counter(), time.process_time()
    for future in [pool.submit(way.persist, area) for _ in range(number)]:
        future.result()
    seconds, processor = time.perf_counter() - begin, time.process_time() - processor
    way.release()
    return Turn(seconds, seconds, processor)
