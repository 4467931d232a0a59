"""What scripts ask of CUDA and NCCL by name: attention's kernels, and sums of what is multiplied first."""

import os
from itertools import product

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()

FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
torch.manual_seed(2)
q = torch.randn(2, 4, 6, 8, device="cuda")
for dropout, causal in product((0.0, 0.5), (False, True)):
    torch.manual_seed(3)
    expected = F.scaled_dot_product_attention(q, q, q, dropout_p=dropout, is_causal=causal)
    for kernel in FUSED:
        torch.manual_seed(3)
        with sdpa_kernel([kernel]):
            got = F.scaled_dot_product_attention(q, q, q, dropout_p=dropout, is_causal=causal)
        assert torch.equal(got, expected), (kernel, dropout, causal)

for factor in (0.5, torch.full((1,), 0.25, device="cuda")):
    by = float(factor)
    reduction = dist._make_nccl_premul_sum(factor)
    given = torch.arange(1.0, 5, device="cuda") + rank
    total = sum(torch.arange(1.0, 5) + r for r in range(world)) * by
    reduced = given.clone()
    dist.all_reduce(reduced, reduction)
    assert torch.equal(reduced.cpu(), total)
    part, kept = torch.empty(4 // world, device="cuda"), given.clone()
    dist.reduce_scatter_tensor(part, given, reduction)
    assert torch.equal(part.cpu(), total.chunk(world)[rank])
    dist.reduce_scatter(part, list(given.chunk(world)), reduction)
    assert torch.equal(part.cpu(), total.chunk(world)[rank])
    assert torch.equal(given, kept)
    dist.reduce(given, 1, reduction)
    assert torch.equal(given.cpu(), total if rank == 1 else kept.cpu())

model = fully_shard(torch.nn.Linear(4, 4, bias=False).cuda())
model.set_gradient_divide_factor(8.0)
x = torch.ones(1, 4, device="cuda") * (rank + 1)
model(x).sum().backward()
gradient = model.weight.grad.full_tensor()
assert torch.equal(gradient.cpu(), torch.full((4, 4), sum(range(1, world + 1)) / 8)), gradient
print("right", flush=True)
dist.destroy_process_group()
