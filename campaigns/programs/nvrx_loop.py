"""The loop under nvidia-resiliency-ext: loop.py's order of events, inside of what restarts it.

Annotations are evaluated here: its wrapper finds by them which argument wants what it knows.
"""

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from understudy.campaigns.programs.ending import finish
from understudy.campaigns.programs.loop import step
from understudy.campaigns.programs.own_faults import WHAT_CUDA_SAYS, OwnFaults
from understudy.campaigns.programs.plan import Plan
from understudy.campaigns.programs.trainings import make
from understudy.campaigns.results.stamps import Recorder
from understudy.data import ResumableSampler, SampleLog


class DeviceHealth(inprocess.health_check.CudaHealthCheck):  # type: ignore[misc]
    """Finds what its own check finds on a GPU with a pending assertion; a campaign's ranks have no GPU."""

    def __call__(self, state: Any) -> Any:
        if WHAT_CUDA_SAYS in str(state.fn_exception):
            raise RuntimeError(WHAT_CUDA_SAYS)
        return super().__call__(state)


class HostState(BasicTensorAwareStateDict):  # type: ignore[misc]
    """A state whose tensors are on the host: nvidia-resiliency-ext's own class refuses those."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state_dict = state
        self._is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """They are there, and stay as they are until the checkpoint is written."""

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """They are there."""


class Local:
    """Its local checkpoints: each rank's own, the newest one, renamed when it is whole, and never synced.

    They are written before the training goes on: its asynchronous ones synchronize with a GPU.
    """

    def __init__(self, plan: Plan, parts: dict[str, Any], call: inprocess.CallWrapper) -> None:
        self._plan, self._parts, self._call = plan, parts, call
        self._manager = LocalCheckpointManager(plan.store)

    def load(self) -> None:
        if self._manager.find_latest() < 0:
            return
        found, _ = self._manager.load()
        for name, part in self._parts.items():
            part.load_state_dict(found.state_dict[name])
        torch.set_rng_state(found.state_dict["generator"])

    def behind(self, step: int) -> None:
        if step % self._plan.checkpoint_every:
            return
        state = {name: part.state_dict() for name, part in self._parts.items()}
        state["generator"] = torch.get_rng_state()
        with self._call.atomic():
            self._manager.save(HostState(state), step, is_async=False)


def restartable(plan: Plan, rank: int, attempt: int) -> None:
    """All of it, as often as it takes inside of this process. `attempt`: of its first start here."""
    entered = time.monotonic()
    port = int(os.environ["MASTER_PORT"])  # the next ones are used as in nvidia-resiliency-ext's example
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], port + 1, int(os.environ["WORLD_SIZE"]), rank == 0, multi_tenant=True
    )
    client = RankMonitorClient()
    assign = inprocess.rank_assignment
    wrapper = inprocess.Wrapper(
        store_kwargs={"port": port + 2},
        health_check=DeviceHealth(),
        # All ranks or none: those that are left wait until the launcher has started all again.
        rank_assignment=inprocess.Compose(
            assign.ActiveWorldSizeDivisibleBy(int(os.environ["WORLD_SIZE"])), assign.ShiftRanks()
        ),
    )

    @wrapper  # type: ignore[untyped-decorator]
    def training(call: Optional[inprocess.CallWrapper] = None) -> None:  # noqa: UP045 - it knows no other
        assert call is not None  # the wrapper fills it in
        recorder = Recorder(Path(plan.folder), rank, attempt + call.iteration)
        if call.iteration:
            recorder.moment("began")
        else:
            recorder.write("joined", entered, time.monotonic())
        _train(plan, recorder, client, store, call)

    try:
        training()
    finally:
        if client.is_initialized:
            client.shutdown_workload_monitoring()


def _train(plan: Plan, recorder: Recorder, client: RankMonitorClient, store: Any, call: Any) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with recorder.part("group"):
        if client.is_initialized:
            client.shutdown_workload_monitoring()
        client.init_workload_monitoring()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(call.iteration), store),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=plan.collective_timeout),
        )
    with recorder.part("model"):
        made = make(plan, torch.device("cpu"))
        torch.manual_seed(1000 * plan.seed + rank)
        model = DistributedDataParallel(made.model)
        sampler = ResumableSampler(made.dataset, plan.global_batch, seed=plan.seed)
        loader = DataLoader(made.dataset, batch_sampler=sampler.batches)
        log = SampleLog(plan.folder, sampler, own_ids=False)
        parts = {
            "model": made.model,
            "optimizer": made.optimizer,
            "scheduler": made.scheduler,
            "sampler": sampler,
        }
    with recorder.part("loaded"):
        local = Local(plan, parts, call)
        local.load()
    faults = OwnFaults(plan, rank, recorder)
    for one in sampler.steps(loader, until=plan.steps):
        since = time.monotonic()
        done = one.global_step + 1
        bits = step(made, model, one, faults, log, torch.device("cpu"))
        client.send_heartbeat()
        recorder.write("step", since, time.monotonic(), done, bits)
        with recorder.part("kept"):
            local.behind(done)
    recorder.moment("trained")
    finish(plan, recorder, made.model, writes=rank == 0)
    dist.barrier()
    log.close()
    dist.destroy_process_group()
