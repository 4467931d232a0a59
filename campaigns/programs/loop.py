"""The loop: one order of events in each step (paper 002 §4.6), whoever keeps the state."""

from __future__ import annotations

import os
import struct
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from understudy.campaigns.programs.ending import finish
from understudy.campaigns.programs.keepers import KEEPERS
from understudy.campaigns.programs.own_faults import OwnFaults
from understudy.campaigns.programs.plan import Plan
from understudy.campaigns.programs.trainings import Training, make
from understudy.campaigns.results.stamps import Recorder
from understudy.data import ResumableSampler, SampleLog
from understudy.data.sampler import Step


def train(plan: Plan, recorder: Recorder, rank: int, attempt: int) -> None:
    """From the process group on; the sampler's steps are the run's."""
    on_gpu = plan.device == "cuda"
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=plan.collective_timeout)
    with recorder.part("group"):
        # Under the proxy a collective may wait for a recovery: its time-out is the script's default.
        dist.init_process_group("nccl") if on_gpu else dist.init_process_group("gloo", timeout=timeout)
    with recorder.part("model"):
        training = make(plan, device)
        torch.manual_seed(1000 * plan.seed + rank)  # from here on, dropout differs between ranks
        model = DistributedDataParallel(training.model, device_ids=[local_rank] if on_gpu else None)
        sampler = ResumableSampler(training.dataset, plan.global_batch, seed=plan.seed)
        loader = DataLoader(training.dataset, batch_sampler=sampler.batches, pin_memory=on_gpu)
        log = SampleLog(plan.folder, sampler, own_ids=False, attempt=attempt + 1)
        parts = {
            "model": training.model,
            "optimizer": training.optimizer,
            "scheduler": training.scheduler,
        }
    with recorder.part("chosen"):
        keeper = KEEPERS[plan.keeps](plan, parts, sampler, log)
    with recorder.part("loaded"):
        keeper.load()
    faults = OwnFaults(plan, rank, recorder)
    for one in sampler.steps(loader, until=plan.steps):
        since = time.monotonic()
        done = one.global_step + 1
        bits = step(training, model, one, faults, log, device)
        recorder.write("step", since, time.monotonic(), done, bits)
        with recorder.part("kept"):
            keeper.behind(done)
    recorder.moment("trained")
    keeper.close()
    finish(plan, recorder, training.model, writes=rank == 0)
    dist.barrier(device_ids=[local_rank] if on_gpu else None)  # none leaves while another talks to it
    log.close()
    dist.destroy_process_group()


def step(
    training: Training,
    model: nn.Module,
    one: Step[Any],
    faults: OwnFaults,
    log: SampleLog,
    device: torch.device,
) -> str:
    """One step of a loop over a ResumableSampler, with its faults; the bits of its loss."""
    faults.begin(one.global_step + 1)
    x, y, ids = one.batch
    # Here, and not at the step's end: what any rank completes, all ranks have written down.
    log.record(one.epoch, one.step, ids)
    loss = training.loss(model, x.to(device, non_blocking=True), y.to(device, non_blocking=True))
    faults.midway(0.4)
    training.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    faults.midway(1.0)
    training.optimizer.step()
    training.scheduler.step()
    return struct.pack(">f", loss.item()).hex()
