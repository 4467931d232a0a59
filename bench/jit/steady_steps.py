"""Steps of two ranks with and without `jit` in turns, in one process each, for `make bench-jit`.

    torchrun --nproc-per-node 2 steady_steps.py FOLDER --rounds 10 --seconds 60 --model mlp:150 --model gpt:12

A round of a model has five blocks of so many steps: without, with, with `jit`'s own time, with, without.
`jit.init` and `jit.close` lie between blocks; the first steps of a block, which see the model for the first
time, do not count. Rank 0 writes FOLDER/steady.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from steady_models import MODELS, Trained
from steady_plan import PATTERN, UNCOUNTED

from understudy import jit
from understudy.jit.boundaries import Boundary

HOOKS = ("_before_optimizer", "_behind_optimizer", "_first_forward", "_behind_outermost", "_backward_begins")
"""What PyTorch calls in a step, beside `jit.boundary`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument(
        "--seconds", type=float, required=True, help="of a model: no round begins behind that"
    )
    parser.add_argument("--model", action="append", required=True, metavar="NAME:STEPS")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    results = []
    for text in args.model:
        name, steps = text.split(":")
        torch.manual_seed(1)
        trained = MODELS[name]()
        for _ in range(2 * UNCOUNTED):
            trained.step()
        blocks: list[dict[str, Any]] = []
        end = time.monotonic() + args.seconds
        for number in range(args.rounds):
            if number and _all_say(time.monotonic() > end):
                break
            for kind in PATTERN:
                folder = args.folder / f"{name}-{len(blocks)}"
                blocks.append(_block(kind, trained, int(steps), folder))
        count = sum(one.numel() for one in trained.model.parameters())
        results.append({"model": name, "parameters": count, "blocks": blocks})
        del trained
        gc.collect()
    if dist.get_rank() == 0:
        (args.folder / "steady.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as in failing_training.py


def _all_say(over: bool) -> bool:
    """What rank 0 says."""
    said = torch.tensor(int(over))
    dist.broadcast(said, src=0)
    return bool(said)


def _block(kind: str, trained: Trained, steps: int, folder: Path) -> dict[str, Any]:
    """Seconds of each step; if `timed`, of `jit.boundary` and of hooks in each; of `jit`'s threads."""
    spent = {"boundary": 0.0, "hooks": 0.0}
    with _timed(spent) if kind == "timed" else _untouched():
        before = _threads()
        if kind != "without":
            jit.init(lambda path: torch.save(trained.model.state_dict(), path), folder, job="bench")
        dist.barrier()
        for _ in range(UNCOUNTED):
            _step(trained, kind, spent)
        new = {thread: _processor_seconds(thread) for thread in _threads() - before}
        begun = time.perf_counter()
        made = [_step(trained, kind, spent) for _ in range(steps)]
        whole = time.perf_counter() - begun
        threads = sum(_processor_seconds(thread) - at for thread, at in new.items())
        jit.close()
    dist.barrier()
    return {
        "kind": kind,
        "threads": threads,
        "whole": whole,
        **{key: [one[key] for one in made] for key in made[0]},
    }


def _step(trained: Trained, kind: str, spent: dict[str, float]) -> dict[str, float]:
    """Seconds: all, `jit.boundary` included; and, if `timed`, `jit`'s own."""
    spent.update(boundary=0.0, hooks=0.0)
    begin = time.perf_counter()
    trained.step()
    if kind == "with":
        jit.boundary()
    elif kind == "timed":
        since = time.perf_counter()
        jit.boundary()
        spent["boundary"] = time.perf_counter() - since
    return {"seconds": time.perf_counter() - begin, **spent}


@contextmanager
def _untouched() -> Iterator[None]:
    yield


@contextmanager
def _timed(spent: dict[str, float]) -> Iterator[None]:
    """Add up the seconds of all hooks."""
    originals = {name: getattr(Boundary, name) for name in HOOKS}
    for name, original in originals.items():
        setattr(Boundary, name, _counting(original, spent))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Boundary, name, original)


def _counting(original: Any, spent: dict[str, float]) -> Any:
    def called(*arguments: Any) -> Any:
        begin = time.perf_counter()
        try:
            return original(*arguments)
        finally:
            spent["hooks"] += time.perf_counter() - begin

    return called


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def _processor_seconds(thread: str) -> float:
    """That a thread has had so far (Linux: nanoseconds, first number)."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9


if __name__ == "__main__":
    main()
