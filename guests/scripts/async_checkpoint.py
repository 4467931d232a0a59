"""PyTorch's recipe for asynchronous distributed checkpoints: FSDP2, activation checkpointing, `dcp.async_save`, and a resume."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

FOLDER = Path(sys.argv[1]) / "checkpoint"
rank = int(os.environ["LOCAL_RANK"])
cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(rank)
device = "cuda" if cuda else "cpu"
dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")


def build():
    torch.manual_seed(0)
    layers = [
        checkpoint_wrapper(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))) for _ in range(3)
    ]
    model = nn.Sequential(*layers).to(device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(10 * step + rank)
        loss = model(torch.randn(8, 32, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("KEPT", rank, step, loss.item(), flush=True)


model, optimizer = build()
train(model, optimizer, range(4))
weights, states = get_state_dict(model, optimizer)
saving = dcp.async_save({"model": weights, "optimizer": states}, checkpoint_id=str(FOLDER))
train(model, optimizer, range(4, 6))
saving.result()
model, optimizer = build()
weights, states = get_state_dict(model, optimizer)
stored = {"model": weights, "optimizer": states}
dcp.load(stored, checkpoint_id=str(FOLDER))
set_state_dict(model, optimizer, model_state_dict=stored["model"], optim_state_dict=stored["optimizer"])
train(model, optimizer, range(4, 8))
dist.destroy_process_group()
