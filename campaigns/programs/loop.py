"""The loop: one order of events in each step (paper 002 §4.6), whoever keeps the state."""

from __future__ import annotations

import hashlib
import os
import struct
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from understudy.campaigns.programs.keepers import KEEPERS
from understudy.campaigns.programs.own_faults import OwnFaults
from understudy.campaigns.programs.plan import Plan
from understudy.campaigns.programs.trainings import make
from understudy.campaigns.results.stamps import Recorder
from understudy.data import ResumableSampler, SampleLog

FINAL = "final.pt"
"""Parameters of rank 0 at the end."""


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
        faults.begin(done)
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
        bits = struct.pack(">f", loss.item()).hex()
        recorder.write("step", since, time.monotonic(), done, bits)
        with recorder.part("kept"):
            keeper.behind(done)
    recorder.moment("trained")
    keeper.close()
    _finish(plan, recorder, training.model, rank)
    dist.barrier(device_ids=[local_rank] if on_gpu else None)  # none leaves while another talks to it
    log.close()
    dist.destroy_process_group()


def _finish(plan: Plan, recorder: Recorder, model: nn.Module, rank: int) -> None:
    """What it has come to: a digest of each rank's parameters, and those of rank 0 themselves."""
    parameters = {name: one.detach().cpu() for name, one in model.named_parameters()}
    digest = hashlib.sha256()
    for name, one in parameters.items():
        digest.update(name.encode() + one.numpy().tobytes())
    recorder.moment("parameters", plan.steps, digest.hexdigest())
    if rank == 0:
        torch.save(parameters, Path(plan.folder) / FINAL)
