"""`make bench-overheads`: what it makes of blocks and rounds, what the page says of it, and that it runs."""

from __future__ import annotations

import contextlib
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import overheads_cost
import overheads_page
import periodic_training
import pytest
import torch
from adam_gpt import Trainee
from baseline_training import Taker, state_of
from overheads_results import (
    CHECKFREQ,
    DISK,
    MEMORY,
    PERIODIC,
    Jit,
    Model,
    Ours,
    Results,
    Stall,
    daily_percent,
    hours_between,
    minibatches_of,
    optimal_percent,
    stalls_of,
)
from training_state import same

from understudy.campaigns.report.statistics import NO_DIFFERENCE
from understudy.recovery.costs.given import paper
from understudy.recovery.costs.models.formulas import periodic_waste

MACHINE = {"date": "2026-01-01T00:00:00+00:00", "commit": "abc1234", "cpu": "a processor", "cores": 2,
           "load_before": 0.1, "load_after": 0.2, "torch": "2", "python": "3"}  # fmt: skip
OVERLAPS = {name: way.overlaps for name, way in periodic_training.WAYS.items()}
MODEL = Model(
    name="adam_gpt",
    parameters=9_625_088,
    state_bytes=115_000_000,
    minibatch=[0.2, 0.21, 0.22],
    stalls={
        DISK: [Stall(3.0, 0.0), Stall(3.8, 0.0), Stall(5.0, 0.0)],
        MEMORY: [Stall(3.8, 0.0)] * 3,
        CHECKFREQ: [Stall(0.1, 0.9), Stall(0.1, -0.2), Stall(0.1, 0.4)],
    },
    jit=Jit(0.3, [0.99, 1.01, 1.002, 0.999], 0.0001),
    ours=Ours([0.2, 0.2, 0.2], [0.21, 0.212, 0.209], [0.22, 0.225, 0.22], [10.0, 10.0, 20.0]),
)
RESULTS = Results(MACHINE, "make bench-overheads", 1, 600.0, [MODEL])


# ------------------------------------------------------------------ the paper's definition
@pytest.mark.parametrize("name", paper.PC_MEM)
def test_the_papers_seconds_give_the_papers_percentages(name: str) -> None:
    work = paper.BY_NAME[name]
    assert abs(optimal_percent(work.checkpoint, work.gpus) - paper.PC_MEM[name]) < 0.001
    daily = daily_percent(work.checkpoint)
    unit = 10.0 ** -len(f"{paper.PC_DAILY[name]:f}".rstrip("0").partition(".")[2])
    assert 0 <= daily - paper.PC_DAILY[name] < unit  # cut, not rounded
    assert 1 <= hours_between(work.checkpoint, work.gpus) <= 3  # as §6.3 says


def test_the_share_is_what_equation_1_counts_for_checkpoints_at_the_optimum() -> None:
    o, N = 3.8, 4.0
    c = 1 / (3600 * hours_between(o, N))
    without = periodic_waste(c, N, paper.FAILURE_RATE, 0.0, 0.0)
    share = periodic_waste(c, N, paper.FAILURE_RATE, o, 0.0) - without
    assert optimal_percent(o, N) == pytest.approx(100 * share, rel=1e-9)
    assert optimal_percent(0.0, N) == 0.0
    assert optimal_percent(o, 4 * N) == pytest.approx(2 * optimal_percent(o, N), rel=1e-12)


def test_each_column_of_the_papers_table_has_each_model() -> None:
    assert all(set(column) == set(paper.PC_MEM) <= set(paper.BY_NAME) for column in overheads_page.PAPERS)
    assert all(paper.CHECKFREQ[name] < paper.PC_MEM[name] <= paper.PC_DISK[name] for name in paper.PC_MEM)


# ------------------------------------------------------------------ what follows from blocks
def blocks(*rows: tuple[str | None, list[float], float]) -> list[dict[str, Any]]:
    return [{"way": way, "steps": steps, "held": held} for way, steps, held in rows]


ROUND = blocks(
    (None, [0.1, 0.1], 0.0), (CHECKFREQ, [0.2, 0.2, 0.1], 0.05), (None, [0.2, 0.2], 0.0),
    (DISK, [0.5, 0.5], 0.4), (None, [0.1, 0.3], 0.0), (MEMORY, [0.1, 0.1], 0.3), (None, [0.2, 0.2], 0.0),
)  # fmt: skip


def test_a_stall_is_what_was_held_and_of_ways_that_overlap_how_much_slower_steps_were() -> None:
    found = stalls_of([ROUND, ROUND], OVERLAPS)
    assert found[DISK] == [Stall(0.4, 0.0)] * 2 and found[MEMORY] == [Stall(0.3, 0.0)] * 2
    for stall in found[CHECKFREQ]:
        assert stall.held == 0.05 and stall.whole == pytest.approx(0.05 + 0.5 - 3 * 0.15)
    assert minibatches_of([ROUND]) == [0.2]


@pytest.mark.parametrize("wrong", [ROUND[1:], ROUND[:4], [*ROUND[:3], *ROUND[1:3], *ROUND[5:]], []])
def test_blocks_that_are_no_round_are_refused(wrong: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="each way once"):
        stalls_of([wrong], OVERLAPS)


def test_noise_makes_no_checkpoint_cheaper_than_what_it_was_seen_to_hold() -> None:
    assert MODEL.least_checkpoint(CHECKFREQ) == pytest.approx(0.5)
    noisy = replace(MODEL, stalls={**MODEL.stalls, CHECKFREQ: [Stall(0.1, -0.3)] * 3})
    assert noisy.checkpoint(CHECKFREQ).median < 0 and noisy.least_checkpoint(CHECKFREQ) == 0.1
    faster = replace(MODEL, ours=replace(MODEL.ours, persisted=[0.2, 0.2, 0.2]))
    assert faster.snapshot == 0.0


def test_a_snapshot_costs_what_its_steps_took_longer_for_each_that_became_durable() -> None:
    assert MODEL.ours.snapshots == pytest.approx([0.1, 0.13, 0.22])
    assert MODEL.ours.percents == pytest.approx([5.0, 6.0, 4.5])


# ------------------------------------------------------------------ the page
def cells(page: str, begin: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith(f"| {begin}")]


def test_the_page_has_the_papers_rows_as_printed_and_ours_by_its_definition() -> None:
    page = overheads_page.section(RESULTS)
    (gpt,) = cells(page, "*paper: GPT2-S*")
    assert gpt[1:] == ["4", "every 2.5 h (PC_mem)", "0.042", "0.042", "0.024", "0.004", "0.0024", "–", "–"]
    _, two, many = cells(page, "GPT, AdamW")
    assert (two[1], many[1]) == ("2", "1,024")
    assert two[4] == f"{optimal_percent(3.8, 2):.4f}" and many[5] == f"{optimal_percent(0.5, 1024):.4f}"
    assert two[6] == f"{daily_percent(3.8):.5f}"
    assert NO_DIFFERENCE in two[7] and two[8].startswith("+5.17 (") and NO_DIFFERENCE not in two[9]
    assert "another machine, other models" in page and "abc1234" in page


def test_what_rounds_do_not_show_is_said_so() -> None:
    noise = replace(MODEL.ours, proxied=[0.2, 0.21, 0.19], persisted=[0.21, 0.2, 0.2])
    page = overheads_page.section(replace(RESULTS, models=[replace(MODEL, ours=noise)]))
    _, two, _ = cells(page, "GPT, AdamW")
    assert two[8].startswith(NO_DIFFERENCE) and two[9].startswith(f"{NO_DIFFERENCE} (at most 0.00")
    one = Ours([0.2], [0.21], [0.22], [10.0])
    page = overheads_page.section(replace(RESULTS, models=[replace(MODEL, ours=one)]))
    assert cells(page, "GPT, AdamW")[1][9] == "once: no interval"


def test_without_results_the_page_says_in_a_sentence_that_nothing_was_measured(tmp_path: Path) -> None:
    page = overheads_page.measured_part(tmp_path / "overheads.json")
    assert page == f"\n## {overheads_page.TITLE}\n\n{overheads_page.NOT_MEASURED}\n"
    RESULTS.write(tmp_path / "overheads.json")
    assert Results.read(tmp_path / "overheads.json") == RESULTS
    assert overheads_page.measured_part(tmp_path / "overheads.json") == overheads_page.section(RESULTS)


# ------------------------------------------------------------------ that it runs
@pytest.mark.parametrize("name", PERIODIC)
def test_a_block_ends_when_all_of_its_checkpoint_is_written(name: str, tmp_path: Path) -> None:
    trainee = Trainee(torch.device("cpu"), tiny=True)
    trainee.gradients()
    trainee.update()
    state = state_of(trainee)
    expected = {key: tensor.clone() for key, tensor in state.items()}
    folders = tmp_path / "disk", tmp_path / "memory"
    for folder in folders:
        folder.mkdir()
    way = periodic_training.WAYS[name]
    with (
        way.opened(*folders) as opened,
        contextlib.closing(Taker(opened, way.overlaps)) as taker,
    ):
        found = periodic_training.block(name, taker, trainee, state, 2)
        assert not taker.busy and len(found.steps) >= 2 and found.held > 0
        assert same(opened.load(), expected) and not same(state, expected)
        place = folders[name == MEMORY]
        assert [path for path in place.rglob("*") if path.is_file()]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_bench_measures_every_way_and_leaves_nothing(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    before = set(Path("/dev/shm").glob("understudy-bench-*"))
    with tempfile.TemporaryDirectory() as disk:  # where paths are short enough for sockets
        arguments = ["--quick", "--directory", disk, "--output", str(output)]
        assert overheads_cost.main(arguments) == 0
        assert not list(Path(disk).iterdir())
    found = Results.read(output)
    (model,) = found.models
    assert set(model.stalls) == set(PERIODIC) and all(len(one) == 2 for one in model.stalls.values())
    assert model.jit.own > 0 and len(model.jit.ratios) == 2 and len(model.ours.native) == 1
    assert json.loads(output.read_text())["machine"].keys() >= {"commit", "cpu", "load_before", "load_after"}
    assert set(Path("/dev/shm").glob("understudy-bench-*")) <= before
