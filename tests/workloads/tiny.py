"""A few steps of a tiny model; `--fail HOW` ends badly in the middle of a minibatch."""

import argparse
import os
import signal
import sys
import time

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--fail", default="")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--payload", type=int, default=0, help="floats sent to the device in each step")
args = parser.parse_args()
local_rank = int(os.environ.get("LOCAL_RANK", "0"))
torch.cuda.set_device(local_rank)
device = f"cuda:{local_rank}"
torch.manual_seed(0)
model = torch.nn.Linear(8, 4).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(args.steps):
    loss = model(torch.ones(2, 8, device=device)).square().mean()
    if args.payload:
        torch.full((args.payload,), float(step)).to(device)
    loss.backward()
    if step == 2:
        match args.fail:
            case "raise":
                raise ValueError("the script gives up")
            case "exit":
                sys.exit(7)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "index":
                table = torch.nn.Embedding(4, 2).to(device)
                table(torch.tensor([99], device=device))
            case "operator":
                torch.ops.aten._cslt_compress(torch.ones(4, 4, device=device))  # a CUDA-only operator
            case "hang":
                print("hanging\n", end="", flush=True)
                time.sleep(600)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1} {loss.item():.6f}\n", end="", flush=True)  # in one piece
print("done\n", end="")
