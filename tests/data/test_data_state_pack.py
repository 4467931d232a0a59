"""Checkpoints of the whole state: what is in them, what is refused, what fails (paper 002 §4.3-4.6)."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_training import STRATEGIES, Training, lines, saved

from understudy.data import CheckpointError, ResumableSampler, StatePack, blocking, overlapped
from understudy.data.checkpoint_files import Place, is_finished, places, pointed_at
from understudy.data.writing import Writer


@STRATEGIES
def test_a_run_that_goes_on_from_a_checkpoint_has_the_bits_of_one_that_never_stopped(
    folder: Path, strategy: Any, seed: int
) -> None:
    random.seed(seed)
    np.random.seed(seed)
    first = Training(seed)
    with first.pack(folder / "run", strategy=strategy) as pack:
        for _ in range(4):
            first.step()
        pack.save(4)
        expected = [first.step() for _ in range(8)]

    random.seed(1)
    np.random.seed(1)
    second = Training(1)
    with second.pack(folder / "run") as pack:
        start = pack.load()
    found = [second.step() for _ in range(8)]

    assert start is not None
    assert (start.step, start.world_size, start.generators) == (4, 1, True)
    assert start.folder == folder / "run" / "000001-step-4"
    assert found == expected
    assert str(second.sampler.state_dict()) == str(first.sampler.state_dict())


@STRATEGIES
def test_files_are_for_their_owner_alone_and_load_without_executing_pickles(
    folder: Path, strategy: Any
) -> None:
    saved(folder / "run", strategy=strategy)

    files = [path for path in (folder / "run").rglob("*") if path.is_file()]

    assert {path.name for path in files} == {
        "latest.json", "checkpoints-rank00000.jsonl", "rank-00000.pt", "rank-00000.json",
    }  # fmt: skip
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    payload = torch.load(folder / "run" / "000003-step-3" / "rank-00000.pt", weights_only=True)
    assert payload["parts"].keys() == vars(Training()).keys()


@STRATEGIES
def test_the_newest_ones_are_kept_and_the_pointer_names_the_last(folder: Path, strategy: Any) -> None:
    saved(folder, steps=5, keep=2, strategy=strategy)

    assert places(folder) == [Place(5, 5), Place(4, 4)]
    assert pointed_at(folder) == Place(5, 5)


def test_a_run_taken_back_to_an_earlier_step_goes_on_with_its_own_checkpoints(folder: Path) -> None:
    saved(folder, steps=5)
    with Training().pack(folder) as pack:
        pack.save(2)
    with Training().pack(folder) as pack:
        start = pack.load()

    assert start is not None
    assert (start.step, start.folder.name) == (2, "000006-step-2")


def test_of_a_directory_without_checkpoints_nothing_is_loaded(folder: Path) -> None:
    with Training().pack(folder / "absent") as pack:
        assert pack.load() is None


@STRATEGIES
def test_a_line_for_each_checkpoint_says_where_its_seconds_went(folder: Path, strategy: Any) -> None:
    saved(folder, strategy=strategy)

    found = lines(folder)

    assert [(line["sequence"], line["step"], line["strategy"]) for line in found] == [
        (number, number, strategy.name) for number in (1, 2, 3)
    ]
    for line in found:
        assert (
            line["bytes"]
            == (folder / f"{line['sequence']:06d}-step-{line['step']}/rank-00000.pt").stat().st_size
        )
        parts = ["snapshot", "enqueue", "backpressure"] + ["write", "commit"] * (strategy is blocking)
        assert all(line[part] >= 0 for part in ("snapshot", "write", "commit", "enqueue", "backpressure"))
        assert sum(line[part] for part in parts) <= line["stall"] + 1e-5
    assert all(line["write"] > 0 and line["commit"] > 0 for line in found)


# --- refusals ---


class Holder:
    """Has a state of whatever it is given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@STRATEGIES
def test_a_state_that_could_not_be_read_back_is_refused_when_it_is_saved(folder: Path, strategy: Any) -> None:
    pack = StatePack(folder, held=Holder({"path": Path("x")}), strategy=strategy)

    with pytest.raises(CheckpointError, match=r"holds objects of .*Path.*let state_dict\(\) return tensors"):
        pack.save(1)
        pack.close()

    assert not any(is_finished(folder, place) for place in places(folder))
    assert not (folder / "latest.json").exists()
    assert StatePack(folder, held=Holder(None)).load() is None


def test_states_of_numpy_scalars_and_shared_tensors_come_back_as_what_they_are(folder: Path) -> None:
    shared = torch.arange(3.0)
    state = {
        "scalar": np.float64(0.1),
        "pair": [shared, (shared, None)],
        "set": {1, 2},
        "flag": np.bool_(True),
    }
    with StatePack(folder, held=Holder(state), strategy=overlapped()) as pack:
        pack.save(1)
        shared += 1  # the copy is not changed by what comes behind
    found = Holder(None)
    with StatePack(folder, held=found) as pack:
        pack.load()

    assert found.state["scalar"] == 0.1
    assert type(found.state["scalar"]) is float
    assert found.state["flag"] is True
    assert found.state["set"] == {1, 2}
    first, (second, _) = found.state["pair"]
    assert first.tolist() == [0.0, 1.0, 2.0]
    assert first.data_ptr() == second.data_ptr()


def test_names_that_differ_from_those_of_the_checkpoint_are_refused_before_anything_changes(
    folder: Path,
) -> None:
    saved(folder)
    fresh = Training(5)
    before = str(fresh.model.state_dict())

    for parts, sentence in (
        ({**vars(fresh), "more": torch.Generator()}, "lacks more, unlike this StatePack"),
        ({"model": fresh.model, "sampler": fresh.sampler}, "holds generator, optimizer, scaler, scheduler"),
    ):
        with pytest.raises(ValueError, match=sentence):
            StatePack(folder, **parts).load()

    assert str(fresh.model.state_dict()) == before


def test_a_sampler_of_another_data_set_refuses_before_the_model_has_changed(folder: Path) -> None:
    saved(folder)
    fresh = Training(5)
    fresh.sampler = ResumableSampler(41, 4, rank=0, world_size=1)
    before = str(fresh.model.state_dict())

    with pytest.raises(ValueError, match="data set of 40 samples, and this sampler has 41"):
        fresh.pack(folder).load()

    assert str(fresh.model.state_dict()) == before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"model": 3}, "model is a int, which has no state_dict"),
        ({}, "A StatePack of nothing"),
        ({"model": torch.Generator(), "keep": 0}, "keep is 0; at least 1"),
        ({"model": torch.Generator(), "keep": "x"}, "keep is 'x'; it must be a whole number"),
        ({"model": torch.Generator(), "strategy": "fast"}, "The strategy is 'fast'"),
    ],
)
def test_packs_that_make_no_sense_are_refused(folder: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        StatePack(folder, **options)
    with pytest.raises(ValueError, match="max_in_flight is 0"):
        overlapped(0)


def test_steps_that_are_none_and_packs_that_are_closed_are_refused(folder: Path) -> None:
    pack = Training().pack(folder)
    with pytest.raises(CheckpointError, match=r"checkpoint at the steps \[-1\]"):
        pack.save(-1)
    with pytest.raises(ValueError, match=r"step is 0.5; it must be a whole number"):
        pack.save(0.5)  # type: ignore[arg-type]
    pack.close()
    with pytest.raises(CheckpointError, match="closed"):
        pack.save(1)


# --- writing that fails ---


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """No file may become longer: a write fails as on a full disk, in the middle of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@STRATEGIES
def test_a_write_that_fails_leaves_the_checkpoint_before_it_and_is_told(folder: Path, strategy: Any) -> None:
    training = saved(folder)
    pack = training.pack(folder, strategy=strategy)

    with small_files(2000), pytest.raises(CheckpointError, match=r"rank-00000.pt could not be written"):
        pack.save(4)
        pack.close()

    assert not list(folder.rglob("*.new"))
    with Training().pack(folder) as reader:
        start = reader.load()
    assert start is not None
    assert start.step == 3
    with training.pack(folder) as again:
        again.save(4)
    assert pointed_at(folder) == Place(5, 4)
    assert not (folder / "000004-step-4").exists(), "what was begun and never finished is cleared away"


def test_an_error_of_the_writer_is_raised_by_the_next_call_and_the_one_after_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    pack = training.pack(folder, strategy=overlapped())
    next_one = threading.Event()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        pack.save(1)
        assert pack._writer is not None
        pack._writer.enqueue(next_one.set)  # which is carried out when the checkpoint has failed
        assert next_one.wait(60)

    with pytest.raises(CheckpointError, match=r"was being written is lost.*No space left on device"):
        pack.save(2)
    pack.save(3)
    pack.close()
    assert pointed_at(folder) == Place(2, 3)


def test_with_as_many_in_flight_as_are_allowed_the_next_one_waits_for_room() -> None:
    writer = Writer(2)
    gates = [threading.Event() for _ in range(3)]
    order: list[int] = []

    def work(number: int) -> Callable[[], None]:
        def wait() -> None:
            assert gates[number].wait(60)
            order.append(number)

        return wait

    for number in range(2):
        writer.enqueue(work(number))
    waiting = threading.Thread(target=lambda: writer.enqueue(work(2)))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive(), "there is no room"
    gates[0].set()
    waiting.join(60)
    assert not waiting.is_alive()
    assert order == [0]
    gates[1].set()
    gates[2].set()
    writer.close()
    assert order == [0, 1, 2]


def test_what_was_handed_over_is_written_before_the_interpreter_ends_and_a_fork_waits_for_nothing(
    folder: Path,
) -> None:
    script = folder / "script.py"
    script.write_text(
        "import os, sys\n"
        "import torch\n"
        "from understudy.data import StatePack, overlapped\n"
        "pack = StatePack(sys.argv[1], generator=torch.Generator(), strategy=overlapped())\n"
        "for step in range(3): pack.save(step)\n"
        "if os.fork() == 0: sys.exit(0)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 0\n"
    )
    subprocess.run([sys.executable, str(script), str(folder / "run")], check=True, timeout=120)

    assert pointed_at(folder / "run") == Place(3, 2)


CALLS = 10
"""Of os.fsync and os.rename in a checkpoint: a folder is made, and three files take three each."""


@STRATEGIES
def test_a_run_killed_at_any_call_of_its_third_checkpoint_has_the_second_or_the_third(
    folder: Path, strategy: Any
) -> None:
    found = []
    for call in range(CALLS):
        run = folder / str(call)
        pid = os.fork()
        if pid == 0:
            _save_and_be_killed(run, strategy, call)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        fresh = Training(9)
        with fresh.pack(run) as pack:
            start = pack.load()
        assert start is not None
        assert fresh.sampler.cursor_step == start.step
        found.append(start.step)

    assert found == [2] * 9 + [3], "the pointer's rename is the last but one, and decides"


def _save_and_be_killed(run: Path, strategy: Any, before: int) -> None:
    """In a fork, which is killed as it begins the call of this number."""
    training = saved(run, steps=2)
    training.step()
    pack = training.pack(run, strategy=strategy)
    left = [before]

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return call(*arguments)

        return counted

    os.fsync, os.rename = counting(os.fsync), counting(os.rename)
    pack.save(3)
    pack.close()
    os._exit(0)
