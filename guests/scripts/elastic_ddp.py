"""pytorch/examples ddp-tutorial-series multigpu_torchrun.py: DDP that goes on from `snapshot.pt` after torchrun restarts it.

A rank fails by itself in the second epoch of the first attempt, as the tutorial has the reader do.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SNAPSHOT = Path(sys.argv[1]) / "snapshot.pt"
rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(rank)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
torch.manual_seed(0)
data = TensorDataset(torch.rand(64, 20), torch.rand(64, 1))
model = torch.nn.Linear(20, 1).to(device)
first = 0
if SNAPSHOT.exists():
    snapshot = torch.load(SNAPSHOT, map_location=device)
    model.load_state_dict(snapshot["MODEL_STATE"])
    first = snapshot["EPOCHS_RUN"]
model = DDP(model, device_ids=[rank] if device.type == "cuda" else None)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = DataLoader(data, batch_size=8, pin_memory=True, shuffle=False, sampler=DistributedSampler(data))
for epoch in range(first, 4):
    loader.sampler.set_epoch(epoch)
    for source, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(source.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
    print("KEPT", rank, epoch, loss.item(), flush=True)
    if rank == 0:
        torch.save({"MODEL_STATE": model.module.state_dict(), "EPOCHS_RUN": epoch + 1}, SNAPSHOT)
    dist.barrier()
    if epoch == 1 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("this rank fails once, by itself")
dist.destroy_process_group()
