"""A training loop of accelerate, as `accelerate launch` or torchrun start it; each rank writes its results.

An ordinary script: it knows of no proxy. `--device cpu` is what its reference run asks for.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from results import write

parser = argparse.ArgumentParser()
parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=6)
args = parser.parse_args()

accelerator = Accelerator(cpu=args.device == "cpu", gradient_accumulation_steps=2)
assert accelerator.device.type == args.device, accelerator.device
set_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
inputs = torch.randn(256, 16)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

losses = []
for batch, target in loader:
    with accelerator.accumulate(model):
        loss = (model(batch) - target).square().mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    losses += accelerator.gather(loss.detach().reshape(1)).unbind()
    if len(losses) == 2 * accelerator.num_processes * args.steps:
        break
write(args.out.with_name(f"{args.out.name}.{accelerator.process_index}"), losses, accelerator.unwrap_model(model))
accelerator.end_training()
print("rank", accelerator.process_index, "of", accelerator.num_processes, "trained on", accelerator.device, flush=True)
