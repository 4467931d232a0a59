"""`proxyrun --samples`: what each batch and each minibatch had, as the script itself has seen it."""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from pathlib import Path
from typing import Any

import proxied
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as torch_dataloader
from typer.testing import CliRunner, Result

from understudy import replay
from understudy.proxy_client.samples import drawing
from understudy.proxy_client.samples.drawing import Loaders
from understudy.proxy_client.samples.recorder import Recorder
from understudy.recovery import recoveryctl
from understudy.recovery.samples.reading import read_run
from understudy.recovery.samples.run import RankRecord

pytestmark = pytest.mark.drawn(6)

SCRIPT = proxied.WORKLOADS / "recorded_samples.py"
RESUMED = proxied.WORKLOADS / "recorded_resumption.py"
KINDS = (
    "workers", "workers_out_of_order", "accumulated", "evaluated", "nested", "singly", "failing", "own_class",
    "unknown", "scaled_gradients",
)  # fmt: skip
MOST_SHARE = 0.4
"""Of PyTorch's own time for a batch of 64: 30 µs where that takes 75."""
OF_NOTHING = "2d06800538d394c2"
"""XXH3-64 of no bytes, as its specification has it."""


def check(*arguments: object) -> Result:
    return CliRunner().invoke(recoveryctl.app, ["samples", "check", *map(str, arguments)])


def recorded(folder: Path, name: str, command: list[str], *options: str, status: int = 0) -> Path:
    """A run with --samples; answers where they are."""
    samples = folder / name
    ended = proxied.run(command, folder=folder, options=("--samples", str(samples), *options))
    (folder / f"{name}.output").write_text(ended.output)
    assert (ended.status == 0) == (status == 0), ended.output
    return samples


def told_by_script(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def as_told(record: RankRecord) -> list[dict[str, Any]]:
    """What is on record, in the form in which the script has told it."""
    found: list[dict[str, Any]] = []
    for minibatch in record.minibatches():
        found += [{"ids": None if one.ids is None else list(one.ids)} for one in minibatch.batches]
        if minibatch.stepped:
            assert minibatch.content is not None
            found.append({"digest": minibatch.content.digest, "bytes": minibatch.content.bytes})
    return found


def test_what_is_on_record_is_what_the_script_was_handed_and_what_it_copied_whatever_its_loaders(
    tmp_path: Path,
) -> None:
    command = proxied.python(SCRIPT, str(tmp_path / "told"), ",".join(KINDS))
    samples = recorded(tmp_path, "samples", command)
    record = read_run(samples).last[0]
    told, found = told_by_script(tmp_path / "told"), as_told(record)
    assert len(found) == len(told) > 60
    for mine, script in zip(found, told, strict=True):
        if "ids" in script:
            assert mine == script
        elif script["payload"] is not None:
            payload = bytes.fromhex(script["payload"])
            assert mine == {"digest": f"{replay.digest(payload):016x}", "bytes": len(payload)}
    assert f"{replay.digest(b''):016x}" == OF_NOTHING
    # A step that GradScaler leaves out ends no minibatch: the next has the batches of both.
    last = [minibatch for minibatch in record.minibatches() if minibatch.stepped][-2:]
    assert [[list(batch.ids or ()) for batch in one.batches] for one in last] == [[[0, 1]], [[2, 3], [4, 5]]]
    assert record.ended
    output = (tmp_path / "samples.output").read_text()
    assert len(re.findall("known by their content alone", output)) == 2
    assert "Scaled iterates in a way of its own" in output and "an iterable one" in output
    checked = check(samples)
    assert checked.exit_code == 0 and "nothing wrong" in checked.output, checked.output


def test_a_run_with_faults_has_the_samples_and_contents_of_one_without(tmp_path: Path) -> None:
    command = proxied.python(SCRIPT, str(tmp_path / "told"), "workers,accumulated,own_class")
    whole = recorded(tmp_path, "whole", command)
    drills = (
        "kill-server rank=0 step=3 call=4",
        "kill-server rank=0 step=9 call=2",
        "sticky-error rank=0 step=14",
    )
    flags = [word for drill in drills for word in ("--drill", drill)]
    faulty = recorded(tmp_path, "faulty", command, *flags)
    lines = [path.joinpath("samples-rank00000.jsonl").read_text() for path in (whole, faulty)]
    assert lines[0] == lines[1]
    assert check(faulty, "--against", whole).exit_code == 0
    other = check(faulty, "--against", recorded(tmp_path, "other", [*command[:-1], "workers,own_class"]))
    assert other.exit_code == 1 and "minibatch" in other.output and "loader 1" in other.output, other.output


def test_batches_that_come_again_are_found_by_index_by_content_and_without_a_batch(tmp_path: Path) -> None:
    command = proxied.python(SCRIPT, str(tmp_path / "told"), "repeating")
    samples = recorded(tmp_path, "samples", command)
    checked = check(samples, "--json")
    assert checked.exit_code == 1
    offences = json.loads(checked.output)["offences"]
    assert [offence.partition(":")[2].strip() for offence in offences] == [
        "sample 2 was used in step 1 already.",
        "it copies what minibatch 7 of the same epoch did.",
        "it copies what minibatch 10 did once more, with no batch handed out in between.",
        "it copies what minibatch 12 did once more, with no batch handed out in between.",
    ]
    assert offences[0].startswith("rank 0, minibatch 3, loader 0, epoch 0, step 2:")
    assert check(samples, "--may-repeat").exit_code == 0


def test_a_job_that_was_killed_and_resumed_has_the_samples_and_contents_of_one_that_never_stopped(
    tmp_path: Path,
) -> None:
    def run(name: str, *more: str, status: int = 0) -> Path:
        command = proxied.ranks(
            2, RESUMED, "--folder", str(tmp_path / f"{name}.state"), "--steps", "14", *more
        )
        return recorded(tmp_path, name, command, status=status)

    whole = run("whole")
    resumed = run("resumed", "--leave", "8", status=1)
    assert check(resumed, "--against", whole).exit_code == 1  # steps are missing
    run("resumed")
    assert [path.name for path in sorted(resumed.glob("attempt*"))] == [
        "attempt-00001.json", "attempt-00002.json",
    ]  # fmt: skip
    checked = check(resumed, "--against", whole)
    assert checked.exit_code == 0, checked.output
    assert "2 attempts" in checked.output and "did not end in order" in checked.output


def test_nothing_is_written_where_nobody_asks_and_a_place_that_cannot_be_written_is_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    ended = proxied.run(
        proxied.python(SCRIPT), folder=tmp_path, options=("--samples", str(tmp_path / "file"))
    )
    assert ended.status == 2 and "nothing can be written there" in ended.output


def test_a_batch_of_64_costs_a_fraction_of_what_drawing_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the thread's own time, in turns: what else runs makes both slower."""
    base: Any = torch_dataloader._BaseDataLoaderIter
    methods = [(base, "_next_index"), (base, "_reset"), (base, "__next__"), (DataLoader, "__iter__")]
    for of, name in methods:
        monkeypatch.setattr(of, name, getattr(of, name))
    pytorchs = [getattr(*method) for method in methods]
    recorder = Recorder(str(tmp_path), 1)
    recorder.begin(0, 1)
    drawing.install(torch_dataloader, recorder, Loaders(recorder))
    ours = [getattr(*method) for method in methods]
    data = torch.arange(64 * 50)
    loader: Any = DataLoader(data, batch_size=64, shuffle=True, collate_fn=len)  # type: ignore[arg-type]

    def microseconds(functions: list[Any]) -> float:
        for (of, name), function in zip(methods, functions, strict=True):
            setattr(of, name, function)
        begun = time.thread_time()
        for _ in loader:
            pass
        return 1e6 / 50 * (time.thread_time() - begun)

    turns = [(microseconds(pytorchs), microseconds(ours)) for _ in range(40)]
    plain, watched = (statistics.median(turn) for turn in zip(*turns, strict=True))
    share = statistics.median(watched / plain - 1 for plain, watched in turns)
    print(f"{plain:.1f} and {watched:.1f} µs a batch; {share:.2f}")
    recorder.stop("the test has ended")
    assert len((tmp_path / "samples-rank00000.jsonl").read_text().splitlines()) == 2 + 40 * 50
    assert share <= MOST_SHARE
    assert os.listdir(tmp_path) == ["samples-rank00000.jsonl"]
