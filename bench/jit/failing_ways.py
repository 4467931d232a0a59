"""The training itself: the character-level GPT of the examples on two ranks, and who keeps its state.

undisturbed  nobody
jit          `understudy.jit`: the ranks that are left, when one fails
periodic     `understudy.data.StatePack`, blocking, every ten steps; without `jit`
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from fault_plan import EVERY, Fault
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from understudy.campaigns.results.stamps import Recorder

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from char_gpt import Batches, CharGPT, hexadecimal, parameter_groups, read_text

from understudy import jit
from understudy.data import StatePack

TEXT, BATCH, BLOCK = 100_000, 8, 64
SHAPE = {"layers": 4, "heads": 4, "width": 128}
TINY = {"layers": 1, "heads": 2, "width": 16}
SEED = 1


class Way(Protocol):
    """Who keeps the state. `load` answers how many steps it has in it."""

    def choose(self) -> None: ...
    def load(self) -> int: ...
    def boundary(self) -> None: ...
    def checkpoint(self, step: int) -> None: ...
    def close(self) -> None: ...


class Undisturbed:
    """Nobody does."""

    def choose(self) -> None:
        pass

    def load(self) -> int:
        return 0

    def boundary(self) -> None:
        pass

    def checkpoint(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class Jit(Undisturbed):
    """As in examples/jit_checkpoint.py."""

    def __init__(self, folder: Path, parts: dict[str, Any], minimum_stall: float) -> None:
        self._folder, self._parts, self._minimum_stall = folder, parts, minimum_stall
        self._path: Path | None = None

    def choose(self) -> None:
        jit.init(self._save, self._folder, job="bench", minimum_stall=self._minimum_stall)
        self._path = jit.get_checkpoint_path()

    def load(self) -> int:
        if self._path is not None:
            state = torch.load(self._path, weights_only=True)
            for name, part in self._parts.items():
                part.load_state_dict(state[name])
            jit.restore_generators()
        return jit.completed_steps()

    def boundary(self) -> None:
        jit.boundary()

    def close(self) -> None:
        jit.close()

    def _save(self, path: Path) -> None:
        torch.save({name: part.state_dict() for name, part in self._parts.items()}, path)


class Periodic(Undisturbed):
    """Choosing and loading are one call here."""

    def __init__(self, folder: Path, parts: dict[str, Any], recorder: Recorder) -> None:
        self._recorder = recorder
        self._pack = StatePack(folder, **parts)

    def load(self) -> int:
        restored = self._pack.load()
        return restored.step if restored is not None else 0

    def checkpoint(self, step: int) -> None:
        if step % EVERY == 0:
            with self._recorder.part("checkpoint"):
                self._pack.save(step)

    def close(self) -> None:
        self._pack.close()


def way_of(args: argparse.Namespace, parts: dict[str, Any], recorder: Recorder) -> Way:
    """Raises KeyError for one that is not known."""
    folder = args.folder / "checkpoints"
    ways: dict[str, Callable[[], Way]] = {
        "undisturbed": Undisturbed,
        "jit": lambda: Jit(folder, parts, args.minimum_stall),
        "periodic": lambda: Periodic(folder, parts, recorder),
    }
    return ways[args.way]()


def train(args: argparse.Namespace, recorder: Recorder, rank: int, fault: Fault | None) -> None:
    """From the start of the process group on. `fault`: of this rank in this attempt."""
    with recorder.part("group"):
        dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    with recorder.part("model"):
        text = read_text(None, TEXT)
        alphabet = {character: i for i, character in enumerate(sorted(set(text)))}
        tokens = torch.tensor([alphabet[character] for character in text])
        torch.manual_seed(SEED)
        shape = TINY if args.tiny else SHAPE
        model = CharGPT(len(alphabet), BLOCK, dropout=0.1, **shape)
        torch.manual_seed(SEED + 1 + rank)  # from here on, dropout differs between ranks
        train_model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(parameter_groups(model, decay=0.1), lr=1e-3, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    way = way_of(args, {"model": model, "optimizer": optimizer, "scheduler": scheduler}, recorder)
    with recorder.part("chosen"):
        way.choose()
    _notice(recorder)
    with recorder.part("loaded"):
        first = way.load()
        size = 2 if args.tiny else BATCH
        batches = Batches(tokens, size, BLOCK, 1000 * SEED + rank, torch.device("cpu"), skip=first)
    for step in range(first, args.steps):
        since = time.monotonic()
        inputs, targets = batches.next()
        loss = train_model(inputs, targets)
        if fault is not None and fault.behind == step:
            _fail(fault, recorder)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        bits = hexadecimal(loss.item())
        way.boundary()
        recorder.write("step", since, time.monotonic(), step + 1, bits)
        way.checkpoint(step + 1)
    dist.barrier()  # no rank leaves while another still talks to it
    way.close()
    dist.destroy_process_group()


def _fail(fault: Fault, recorder: Recorder) -> None:
    if fault.kind == "stop":
        print(f"fault: process {os.getpid()} stops", file=sys.stderr, flush=True)
    recorder.moment("fault", fault.behind, fault.kind)
    os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


def _notice(recorder: Recorder) -> None:
    """Write down when an exception ends the script, in front of whoever handles that."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        recorder.moment("noticed", note=kind.__name__)
        previous(kind, error, trace)

    sys.excepthook = hook
