"""FSDP2 as its documentation begins: a model of the meta device, initialised in shards on the device."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank = dist.get_rank()
mesh = init_device_mesh("cuda", (dist.get_world_size(),))
torch.manual_seed(11)
with torch.device("meta"):
    model = torch.nn.Sequential(
        *(
            torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(2)
        )
    )
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
model.to_empty(device="cuda")
for parameter in model.parameters():
    assert isinstance(parameter, DTensor)
    torch.nn.init.normal_(parameter, std=0.1)
whole = [parameter.full_tensor() for parameter in model.parameters()]
assert all(t.numel() - torch.unique(t).numel() < 8 for t in whole), "shards repeat each other"
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for step in range(8):
    torch.manual_seed(100 + step)
    x = torch.randn(4, 6, 16, device="cuda")
    loss = model(x).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"{rank} {step} {loss.item().hex()}\n", end="", flush=True)
for name, parameter in model.named_parameters():
    print(f"{rank} {name} {torch.hash_tensor(parameter.to_local().cpu()).item()}\n", end="", flush=True)
dist.destroy_process_group()
