"""How fast a state comes back from the disk, beside a raw loop, torch.load and dcp.load."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from paper_policies import prepare
from persist_measure import OURS, RAW, RAW_PAGES, Effort, Rounds, Row, Turn, new_folder, row_of
from persist_ways import BLOCK, Distributed, Raw, TorchSave, Understudy, create_store
from snapshot_area import SnapshotArea
from training_state import State, bytes_of, description_of, empty_state, same, training_state


def restore_times(effort: Effort, folder: Path, tell: Callable[[str], object]) -> list[Row]:
    """Rows of reading everything back; raises ValueError if it is not what was saved."""
    rows = []
    rounds = Rounds(effort.rounds, effort.limit_s, tell)
    for megabytes in effort.megabytes:
        state = training_state(megabytes * 1_000_000)
        into = empty_state(description_of(state))
        with new_folder(folder) as here, ExitStack() as stack:
            file = stack.enter_context(TorchSave(here / "file"))
            distributed = stack.enter_context(Distributed(here / "distributed"))
            create_store(here / "store", state, slots=2)
            ours = stack.enter_context(Understudy(here / "store"))
            for way in (file, distributed, ours):
                way.save(state).result()
            prepare(here / "area", bytes_of(state) + BLOCK)
            actions: dict[str, Callable[[], object]] = {
                RAW: partial(raw_read, Raw(here / "area", bytes_of(state))),
                RAW_PAGES: partial(raw_read, Raw(here / "area", bytes_of(state), huge_pages=False)),
                OURS: partial(ours.fill_area, SnapshotArea(into)),
                f"{OURS}, into tensors": partial(ours.fill, into),
                f"{OURS}, checked only": ours.check,
                "torch.load": file.load,
                "dcp.load": partial(distributed.fill, into),
            }
            if megabytes == min(effort.megabytes):  # takes seconds even there
                actions[f"{OURS}, a call per tensor"] = partial(ours.fill_one_by_one, into)
            cold_actions = {name: partial(cold, here, action) for name, action in actions.items()}
            found = rounds.run(f"{megabytes} MB back", cold_actions)
            check_content(ours, into, state)
        rows += [row_of(name, bytes_of(state), turns) for name, turns in found.items()]
    return rows


def check_content(way: Understudy, into: State, state: State) -> None:
    for tensor in into.values():
        tensor.zero_()
    way.fill(into)
    if not same(into, state):
        raise ValueError("what came back is not what was saved")


def raw_read(raw: Raw) -> float:
    """The loop's own seconds."""
    raw.load()
    return raw.seconds


def cold(folder: Path, action: Callable[[], object]) -> Turn:
    """Reads what is not in the page cache; an action may answer with its own time."""
    drop_cached_pages(folder)
    begin, processor = time.perf_counter(), time.process_time()
    own = action()
    seconds = own if isinstance(own, float) else time.perf_counter() - begin
    return Turn(seconds, seconds, time.process_time() - processor)


def drop_cached_pages(folder: Path) -> None:
    """No page of the folder's files stays in the page cache; raises RuntimeError where it cannot be done."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        with open(path, "rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if not any(cached_pages(path) for path in files):
        return
    try:  # the whole machine's; only root may
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError as problem:
        raise RuntimeError(
            "the page cache still holds what is to be read, and only root may drop it"
        ) from problem


def cached_pages(path: Path) -> int:
    if path.stat().st_size == 0:
        return 0
    with open(path, "r+b") as file, closing(mmap.mmap(file.fileno(), 0)) as mapped:
        found = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        anchor = ctypes.c_char.from_buffer(mapped)
        status = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(len(mapped)), found
        )
        del anchor  # or the mapping cannot be closed
    if status != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in bytes(found))
