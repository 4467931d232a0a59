"""char_gpt.py as it is trained without Understudy: it goes on from its last checkpoint after a restart.

torchrun --standalone --nproc-per-node 2 --max-restarts 3 bench/workloads/checkpointed_gpt.py --folder DIR
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "examples"))

from char_gpt import Batches, CharGPT, parameter_groups, read_text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints, and each rank's pid")
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    (args.folder / f"pid.{rank}").write_text(str(os.getpid()))
    dist.init_process_group("gloo")
    text = read_text(None)
    alphabet = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([alphabet[character] for character in text])
    torch.manual_seed(1)
    model = CharGPT(len(alphabet), 128, 4, 4, 128, 0.1)
    torch.manual_seed(2 + rank)
    trained = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parameter_groups(model, decay=0.1), lr=1e-3, betas=(0.9, 0.95))
    batches = Batches(tokens, 8, 128, 1000 + rank, torch.device("cpu"))
    file, begun = args.folder / "checkpoint", 0
    if file.exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begun = saved["step"]
    for step in range(begun + 1, args.steps + 1):
        inputs, targets = batches.next()
        loss = trained(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
            if step % args.every == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, new := file.with_suffix(".new"))
                new.rename(file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
