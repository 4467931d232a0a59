"""torch.distributed.checkpoint: state of several ranks saved and loaded, at once or in the background."""

import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from scenario import Run, scenario
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

STEPS = 3


def _folder(run: Run) -> Path:
    """A new directory, the same on each rank."""
    box = [tempfile.mkdtemp(dir=run.folder) if run.rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return Path(str(box[0]))


def _sharded(run: Run) -> tuple[nn.Module, AdamW]:
    model = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 8)).to(run.device)
    fully_shard(model[0])
    fully_shard(model)
    return model, AdamW(model.parameters(), lr=0.01)


def _tensor_parallel(run: Run) -> tuple[nn.Module, AdamW]:
    model = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 8)).to(run.device)
    mesh = init_device_mesh(run.device.type, (run.size,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, AdamW(model.parameters(), lr=0.01)


def _replicated(run: Run) -> tuple[nn.Module, AdamW]:
    model = DistributedDataParallel(run.network(16, 24, 8), **run.ddp)
    return model, AdamW(model.parameters(), lr=0.01)


def _state(model: nn.Module, optimizer: AdamW) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def _resume(run: Run, folder: Path, model: nn.Module, optimizer: AdamW) -> None:
    """What was saved, read into a new model, and trained on with."""
    run.mark("loading")
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    run.train(model, optimizer, [run.common_numbers(4, 16) for _ in range(STEPS)])
    for parameter in model.parameters():
        run.keep(parameter.to_local() if isinstance(parameter, DTensor) else parameter)


def _save_and_resume(run: Run, make: Any) -> None:
    model, optimizer = make(run)
    run.train(model, optimizer, [run.common_numbers(4, 16) for _ in range(STEPS)])
    folder = _folder(run)
    run.mark("saving")
    dcp.save(_state(model, optimizer), checkpoint_id=folder)
    _resume(run, folder, *make(run))


@scenario("checkpoints")
def saved_from_fully_sharded_state(run: Run) -> None:
    _save_and_resume(run, _sharded)


@scenario("checkpoints")
def saved_from_tensor_parallel_state(run: Run) -> None:
    _save_and_resume(run, _tensor_parallel)


@scenario("checkpoints")
def saved_from_replicated_state(run: Run) -> None:
    _save_and_resume(run, _replicated)


@scenario("checkpoints")
def saved_as_one_whole_state(run: Run) -> None:
    model, optimizer = _sharded(run)
    run.train(model, optimizer, run.batches(STEPS, 4, 16))
    run.mark("saving")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole, _ = get_state_dict(model, optimizer, options=options)
    run.mark("end")
    run.keep(*whole.values())


def _saved_while_training(run: Run, **options: Any) -> None:
    model, optimizer = _sharded(run)
    run.train(model, optimizer, [run.common_numbers(4, 16) for _ in range(STEPS)])
    folder = _folder(run)
    # Its thread talks to the other ranks while training does: through a group of its own.
    group = dist.new_group(backend="gloo")
    run.mark("saving")
    saving = dcp.async_save(
        _state(model, optimizer), checkpoint_id=folder, process_group=group, **options
    )  # fmt: skip
    if hasattr(saving, "staging_completion"):
        saving.staging_completion.result()
    # The parameters change while they are being written; what was there at the call counts.
    run.train(model, optimizer, [run.common_numbers(4, 16) for _ in range(STEPS)])
    response = saving.result() if hasattr(saving, "result") else saving.upload_completion.result()
    assert response is not None
    dist.barrier()
    _resume(run, folder, *_sharded(run))


@scenario("checkpoints")
def saved_in_the_background(run: Run) -> None:
    _saved_while_training(run)


@scenario("checkpoints")
def saved_in_the_background_through_pinned_memory(run: Run) -> None:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    pinned = run.device.type == "cuda"
    options = StagingOptions(
        use_pinned_memory=pinned,
        use_shared_memory=pinned,
        use_async_staging=pinned,
        use_non_blocking_copy=pinned,
    )
    _saved_while_training(run, async_stager=DefaultStager(options))
