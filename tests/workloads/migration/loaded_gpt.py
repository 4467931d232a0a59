"""char_gpt's model with dropout, fed by a DataLoader with two workers, as far as a file lets it go.

loaded_gpt.py STEPS LOSSES LIMIT
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, os.environ["EXAMPLES"])
from char_gpt import CharGPT, hexadecimal


class Text(Dataset):
    def __init__(self) -> None:
        self.data = torch.randint(0, 64, (4096,), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = index * 37 % 4000
        return self.data[first : first + 32], self.data[first + 1 : first + 33]


steps, losses, limit_file = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
ranks = int(os.environ.get("WORLD_SIZE", "1"))
rank = int(os.environ.get("RANK", "0"))
if ranks > 1:
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    dist.init_process_group("nccl")
torch.manual_seed(1 + rank)
model = CharGPT(64, 32, 2, 2, 32, 0.1).cuda()
if ranks > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
shuffled = torch.Generator().manual_seed(3 + rank)
loader = DataLoader(Text(), batch_size=4, num_workers=2, pin_memory=True, shuffle=True, generator=shuffled)
batches = iter(loader)
with open(f"{losses}.{rank}", "w", buffering=1) as written:
    for step in range(steps):
        while step >= int(limit_file.read_text()):
            time.sleep(0.01)
        inputs, targets = next(batches)
        optimizer.zero_grad()
        loss = model(inputs.cuda(non_blocking=True), targets.cuda())
        loss.backward()
        optimizer.step()
        written.write(hexadecimal(loss.item()) + "\n")
        print(f"rank {rank}: step {step}\n", end="", flush=True)  # in one piece: all ranks write
if ranks > 1:
    dist.destroy_process_group()
del batches  # its thread ends here, and not amid the end of the interpreter
print(f"rank {rank}: pid {os.getpid()} done\n", end="", file=sys.stderr, flush=True)
