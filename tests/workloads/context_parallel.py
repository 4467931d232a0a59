"""A sequence that is split between ranks: `context_parallel`, as PyTorch has it for attention on CUDA."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("sequence",))
torch.manual_seed(0)
query, key, value = (torch.randn(1, 2, 8, 8).cuda() for _ in range(3))
try:
    with context_parallel(mesh, buffers=[query, key, value], buffer_seq_dims=[2, 2, 2]):
        said = f"computed {F.scaled_dot_product_attention(query, key, value, is_causal=True).shape}"
except NotImplementedError as refusal:
    said = f"refused: {refusal}"
alone = tuple(F.scaled_dot_product_attention(query, key, value).shape)
print(f"{said}\nalone {alone}\n", end="", flush=True)  # in one piece
dist.destroy_process_group()
