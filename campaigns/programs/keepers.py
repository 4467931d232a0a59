"""Who keeps the state of a training, in the words of each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from understudy.campaigns.programs.plan import Plan
from understudy.data import ResumableSampler, SampleLog, StatePack, blocking, overlapped

KEPT = 10_000
"""Checkpoints that stay: parameters are compared at each of them when the run is over."""
MINIMUM_STALL = 2.0


class Keeper:
    """Nobody keeps it; a fault begins anew."""

    def __init__(
        self, plan: Plan, parts: Mapping[str, Any], sampler: ResumableSampler, log: SampleLog
    ) -> None:
        self.plan, self.parts, self.sampler, self.log = plan, parts, sampler, log
        self.folder = Path(plan.store)

    def load(self) -> None:
        """Give back the newest state that is whole, if there is one. All ranks call it."""

    def behind(self, step: int) -> None:
        """`step` steps are complete with this one."""

    def close(self) -> None:
        """Behind the last step; all ranks call it."""

    def due(self, step: int) -> bool:
        return step % self.plan.checkpoint_every == 0


class Packed(Keeper):
    """`understudy.data.StatePack`."""

    def __init__(
        self, plan: Plan, parts: Mapping[str, Any], sampler: ResumableSampler, log: SampleLog
    ) -> None:
        super().__init__(plan, parts, sampler, log)
        overlaps = plan.keeps == "overlapped"
        strategy = overlapped(max_in_flight=plan.max_in_flight) if overlaps else blocking
        self._pack = StatePack(self.folder, strategy=strategy, keep=KEPT, sampler=sampler, **parts)

    def load(self) -> None:
        self._pack.load()

    def behind(self, step: int) -> None:
        if self.due(step):
            self.log.sync()
            self._pack.save(step)

    def close(self) -> None:
        self._pack.close()


class Jit(Keeper):
    """`understudy.jit`. The sampler may be a step ahead at a fault, so what counts is what jit counts."""

    def __init__(
        self, plan: Plan, parts: Mapping[str, Any], sampler: ResumableSampler, log: SampleLog
    ) -> None:
        super().__init__(plan, parts, sampler, log)
        from understudy import jit

        self._jit = jit
        jit.init(self._save, self.folder, job="campaign", minimum_stall=MINIMUM_STALL)

    def load(self) -> None:
        if (path := self._jit.get_checkpoint_path()) is not None:
            state = torch.load(path, weights_only=True)
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
            self._jit.restore_generators()
        done = self._jit.completed_steps()
        self.sampler.epoch, self.sampler.cursor_step = divmod(done, self.sampler.plan.steps)

    def behind(self, step: int) -> None:
        self._jit.boundary()

    def close(self) -> None:
        self._jit.close()

    def _save(self, path: Path) -> None:
        torch.save({name: part.state_dict() for name, part in self.parts.items()}, path)


class Distributed(Keeper):
    """PyTorch's own: torch.distributed.checkpoint.async_save, one at a time, over a group of its own."""

    def __init__(
        self, plan: Plan, parts: Mapping[str, Any], sampler: ResumableSampler, log: SampleLog
    ) -> None:
        super().__init__(plan, parts, sampler, log)
        self._group = dist.new_group(backend="gloo")
        self._saving: Future[Any] | None = None

    def load(self) -> None:
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.state_dict import set_state_dict

        found = sorted(path.parent for path in self.folder.glob("step-*/.metadata"))
        newest = [found[-1].name if found else ""]
        dist.broadcast_object_list(newest, group=self._group)  # a rank may see one that another does not yet
        if not newest[0]:
            return
        state = self._state()
        checkpoint.load(state, checkpoint_id=self.folder / newest[0], process_group=self._group)
        set_state_dict(
            self.parts["model"],
            self.parts["optimizer"],
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.parts["scheduler"].load_state_dict(state["scheduler"])
        self.sampler.load_state_dict(state["sampler"])
        torch.set_rng_state(state[self._generator()])

    def behind(self, step: int) -> None:
        from torch.distributed import checkpoint

        if self.due(step):
            self._wait()
            self.log.sync()
            saving: Any = checkpoint.async_save(
                self._state(), checkpoint_id=self.folder / f"step-{step:08d}", process_group=self._group
            )
            self._saving = saving

    def close(self) -> None:
        self._wait()

    def _wait(self) -> None:
        if self._saving is not None:
            self._saving.result()
            self._saving = None

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        # What it takes of an optimizer that has not stepped yet is there, too: a load fills what it finds.
        model, optimizer = get_state_dict(self.parts["model"], self.parts["optimizer"])
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        state["scheduler"] = self.parts["scheduler"].state_dict()
        state["sampler"] = self.sampler.state_dict()
        return state | {self._generator(): torch.get_rng_state()}

    def _generator(self) -> str:
        return f"generator of rank {dist.get_rank()}"


KEEPERS: Mapping[str, Callable[..., Keeper]] = {
    "none": Keeper,
    "blocking": Packed,
    "overlapped": Packed,
    "dcp-async": Distributed,
    "jit": Jit,
}
"""By the name that a plan has."""
