"""The training with torchft: `python with_torchft.py PLAN.json`, one replica group, under torchrun.

As torchft's example has it (train_ddp.py): a `Manager` for each replica group, its DistributedDataParallel
and its Optimizer; a group that is started again heals from one that has gone on. A batch's place in the data
is that of the manager's step, so a step that did not commit has the same samples again.

What was used is recorded when the step has committed, and only by groups that took part in it: those that
heal have their batch dropped. A group that is killed between its last all-reduce and its record is told of
that step by the group that it heals from.
"""

import os
import struct
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from understudy.campaigns.programs.ending import FINAL, finish
from understudy.campaigns.programs.plan import Plan
from understudy.campaigns.programs.training import ATTEMPT
from understudy.campaigns.results.stamps import Recorder

GROUP, GROUPS = "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS"
"""torchft's examples name them so."""
DEAD_S = 5.0
"""Without a heartbeat: the lighthouse's default."""
BRIEF_S = 0.1
"""A wait that belongs to the step."""
QUORUM_S = 60.0
"""For a quorum: longer than it takes to start a group again."""


def main() -> None:
    began = time.monotonic()
    plan = Plan.read(Path(sys.argv[1]))
    group = int(os.environ[GROUP])
    attempt = int(os.environ.get(ATTEMPT, "0")) + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    recorder = Recorder(Path(plan.folder), group, attempt)
    recorder.write("began", began, began)
    if completed(plan):
        os._exit(0)
    with recorder.part("imports"):
        import torchft  # noqa: F401 - what this takes is a part of a restart

        from understudy.campaigns.programs import trainings  # noqa: F401
    train(plan, recorder, group)
    recorder.moment("done")
    sys.stdout.flush()
    os._exit(0)  # as in training.py


def train(plan: Plan, recorder: Recorder, group: int) -> None:
    """From the model to the last step."""
    import torch
    from torch import nn
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    from understudy.campaigns.programs.own_faults import OwnFaults
    from understudy.campaigns.programs.trainings import make

    groups = int(os.environ[GROUPS])
    # Before the model: others that wait for a quorum then know that this group is about to join.
    with recorder.part("group"):
        timeout = timedelta(seconds=plan.collective_timeout)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=timeout),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=least_groups(plan, groups),
            timeout=timeout,
            quorum_timeout=timedelta(seconds=QUORUM_S),
            replica_id=f"group-{group}",
            hostname="localhost",
            init_sync=False,  # all groups begin with the same parameters: they have the same seed
        )
    with recorder.part("model"):
        training = make(plan, torch.device("cpu"))
        torch.manual_seed(1000 * plan.seed + group)
        used = Used(plan, training.dataset, group, groups)
        parts = {
            "model": training.model,
            "optimizer": training.optimizer,
            "scheduler": training.scheduler,
            "used": used,
        }
        model = DistributedDataParallel(manager, training.model)
        optimizer = Optimizer(manager, training.optimizer)

    def state() -> dict[str, Any]:
        return {name: part.state_dict() for name, part in parts.items()}

    def load(found: dict[str, Any]) -> None:
        for name, part in parts.items():
            part.load_state_dict(found[name])

    manager.register_state_dict_fn("training", load, state)
    record_waits(manager, recorder)
    faults = OwnFaults(plan, group, recorder)
    begun = None
    while (step := manager.current_step()) < plan.steps:
        since = time.monotonic()
        optimizer.zero_grad()  # and the quorum begins
        if begun is None:  # a group that joins learns here which step it is
            with recorder.part("loaded"):
                manager.wait_quorum()
            begun = step = manager.current_step()
            if completed(plan):
                return
        for number in range(begun, step + 1):
            faults.begin(number + 1)
        begun = max(begun, step + 1)
        x, y, ids = used.batch(step)
        loss = training.loss(model, x, y)
        faults.midway(0.4)
        loss.backward()
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        faults.midway(1.0)
        optimizer.step()
        bits = struct.pack(">f", loss.item()).hex()
        done = manager.current_step()
        if done == step:
            recorder.write("uncommitted", since, time.monotonic(), done + 1, bits)
            continue
        training.scheduler.step()
        used.committed(done - 1, ids if manager.is_participating() else None, manager.num_participants())
        recorder.write("step", since, time.monotonic(), done, bits)
    recorder.moment("trained")
    finish(plan, recorder, training.model, writes=True)  # it may be the only one that gets here
    used.close()
    manager.shutdown(wait=False)


def record_waits(manager: Any, recorder: Recorder) -> None:
    """Stamp what steps wait for a quorum, wherever torchft does: for others to be dead, or to be there."""
    wait = manager.wait_quorum

    def recorded() -> None:
        since = time.monotonic()
        wait()
        if (now := time.monotonic()) - since > BRIEF_S:
            recorder.write("quorum", since, now)

    manager.wait_quorum = recorded


def completed(plan: Plan) -> bool:
    """Whether another group has: one that comes late would be alone, and begin anew."""
    return (Path(plan.folder) / FINAL).exists()


def least_groups(plan: Plan, groups: int) -> int:
    """One goes on alone, as in torchft's example; with `torchft-whole` it waits for the others."""
    return groups if plan.keeps == "torchft-whole" else 1


class Used:
    """Which samples a step has, and which have been used; the latter is part of the state that heals."""

    def __init__(self, plan: Plan, dataset: Any, group: int, groups: int) -> None:
        from torch.utils.data import DataLoader

        from understudy.data import ResumableSampler
        from understudy.data.sample_log import latest_attempt, log_name

        self._folder, self._own = Path(plan.folder), Path(plan.folder) / log_name(group)
        self._sampler = ResumableSampler(
            dataset, plan.global_batch, rank=group, world_size=groups, seed=plan.seed
        )
        self._loader = DataLoader(dataset, batch_sampler=self._sampler.batches)
        self._groups = groups
        self._attempt = latest_attempt(self._folder) + 1  # unless one is found that has begun before
        self._log: Any = None
        self._whole = -1
        self._next = -1
        self._batches: Any = None
        self._batch: Any = None

    def batch(self, step: int) -> Any:
        """That of a step, the same if it is asked for again."""
        if step != self._next - 1 or self._batch is None:
            place = divmod(step, self._sampler.plan.steps)
            if step != self._next or not place[1]:
                self._sampler.epoch, self._sampler.cursor_step = place
                self._batches = iter(self._loader)
            self._batch = next(self._batches)
            self._next = step + 1
        return self._batch

    def committed(self, step: int, ids: Any, participants: int) -> None:
        """`ids`: what this group had in it; None if it took no part."""
        if ids is not None:
            self._record(step, ids)
        if participants == self._groups:
            self._whole = step

    def state_dict(self) -> dict[str, int]:
        return {"attempt": self._attempt, "whole": self._whole}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._attempt, self._whole = state["attempt"], state["whole"]
        if self._whole >= 0 and self._last_recorded() < self._whole:
            place = divmod(self._whole, self._sampler.plan.steps)
            self._record(self._whole, self._sampler.indices(*place))

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _record(self, step: int, ids: Any) -> None:
        from understudy.data import SampleLog

        if self._log is None:
            self._log = SampleLog(self._folder, self._sampler, own_ids=False, attempt=self._attempt)
        self._log.record(*divmod(step, self._sampler.plan.steps), ids)

    def _last_recorded(self) -> int:
        """Step of the last record of this attempt in its own file."""
        from understudy.data.records import Beginning, parse

        last, attempt = -1, 0
        for line in self._own.read_bytes().splitlines() if self._own.exists() else ():
            try:
                found = parse(line)
            except ValueError:  # torn
                continue
            if isinstance(found, Beginning):
                attempt = found.attempt
            elif attempt == self._attempt:
                last = found.epoch * self._sampler.plan.steps + found.step
        return last


if __name__ == "__main__":
    main()
