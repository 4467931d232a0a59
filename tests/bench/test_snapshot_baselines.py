"""What `make bench-snapshots` compares: each way really saves a state, and the script runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import restore_measure
import torch
from paper_policies import CheckFreq, Gemini, Gpm, PcCheck, prepare, slot_bytes_for
from persist_ways import BLOCK, Distributed, TorchSave, Understudy, Way, create_store
from places import ROOT
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from training_state import State, bytes_of, description_of, empty_state, same, training_state

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.drawn(14)]
FIRST, SECOND, THIRD = (training_state(400_000, seed) for seed in range(3))


def store(folder: Path, **options: object) -> Way:
    create_store(folder / "store", FIRST, slots=2)
    return Understudy(folder / "store", **options)  # type: ignore[arg-type]


def area(folder: Path, slots: int) -> Path:
    prepare(folder / "area", BLOCK + slots * slot_bytes_for(FIRST))
    return folder / "area"


WAYS: dict[str, Callable[[Path], Way]] = {
    "understudy": store,
    "understudy, copied first": lambda folder: store(folder, copies=True),
    "understudy, mmap": lambda folder: store(folder, engine="mmap"),
    "torch.save": lambda folder: TorchSave(folder / "file"),
    "dcp.save": lambda folder: Distributed(folder / "dcp"),
    "dcp.async_save, thread": lambda folder: Distributed(folder / "dcp", AsyncCheckpointerType.THREAD),
    "CheckFreq": lambda folder: CheckFreq(folder / "file"),
    "GPM": lambda folder: Gpm(area(folder, 2), FIRST),
    "PCcheck": lambda folder: PcCheck(area(folder, 3), FIRST),
    "Gemini": lambda folder: Gemini(FIRST),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], Way]:
    return WAYS[request.param]


def test_the_last_state_saved_comes_back_bit_for_bit(way: Callable[[Path], Way], tmp_path: Path) -> None:
    with way(tmp_path) as opened:
        for state in (FIRST, SECOND, THIRD):
            opened.save(state).result()
            assert same(opened.load(), state)


def test_once_save_returns_the_state_may_change(way: Callable[[Path], Way], tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in FIRST.items()}
    with way(tmp_path) as opened:
        future = opened.save(state)
        for tensor in state.values():
            tensor.zero_()
        future.result()
        assert same(opened.load(), FIRST)


def test_pccheck_keeps_the_newest_of_those_under_way_at_a_time(tmp_path: Path) -> None:
    with PcCheck(area(tmp_path, 3), FIRST) as opened:
        for future in [opened.save(state) for state in (FIRST, SECOND, THIRD)]:
            future.result()
        assert same(opened.load(), THIRD)


@pytest.mark.parametrize("count", [16_000_000, 50_000_000])
def test_a_state_has_the_size_that_was_asked_for_and_differs_by_seed(count: int) -> None:
    state = training_state(count)
    assert abs(bytes_of(state) - count) < 0.02 * count
    assert same(state, training_state(count)) and not same(state, training_state(count, 1))


def test_states_that_differ_in_one_bit_are_not_the_same() -> None:
    other: State = empty_state(description_of(FIRST))
    for name, tensor in FIRST.items():
        other[name].copy_(tensor)
    assert same(FIRST, other)
    other["generator"][17] ^= 1
    assert not same(FIRST, other)


def test_what_was_read_is_in_the_page_cache_until_it_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(1 << 20))
    assert restore_measure.cached_pages(file) > 0
    if (
        subprocess.run(["stat", "-f", "-c", "%T", str(tmp_path)], capture_output=True, text=True).stdout
        == "tmpfs\n"
    ):
        pytest.skip("tmpfs is the page cache")
    restore_measure.drop_cached_pages(tmp_path)
    assert restore_measure.cached_pages(file) == 0


def test_the_script_measures_every_way_and_leaves_only_its_results(tmp_path: Path) -> None:
    build = ROOT / "build"  # on a disk, wherever the tests' own folder is
    build.mkdir(exist_ok=True)
    before = set(build.iterdir())
    script = ROOT / "bench" / "snapshots" / "persist_time.py"
    output = tmp_path / "results" / "out.json"
    done = subprocess.run(
        [sys.executable, str(script), "--quick", "--output", str(output)],
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(output.read_text())
    names = {row["way"] for row in results["saved"]}
    assert names >= {"raw loop", *WAYS} - {"Gemini"}, "a way is missing"
    assert all(row["durable_s"] >= row["blocked_s"] > 0 for row in results["saved"])
    assert {row["way"] for row in results["saved"] if not row["durable"]} == {"Gemini (memory of a peer)"}
    assert {row["aim"] for row in results["verdicts"]} == {0.8, 0.9, 1.5}
    kinds = sorted(path.name for path in output.parent.iterdir())
    assert kinds == ["out.json", "out_restored.png", "out_saved.png", "out_sensitivity.png"]
    assert set(build.iterdir()) == before


def test_tensors_of_every_shape_are_seen_as_their_bytes() -> None:
    state = {
        "scalar": torch.tensor(1.5),
        "matrix": torch.ones(2, 3),
        "bytes": torch.zeros(3, dtype=torch.uint8),
    }
    assert bytes_of(state) == 4 + 24 + 3
    assert same(state, {name: tensor.clone() for name, tensor in state.items()})
