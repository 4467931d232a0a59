"""Runs the scenarios of some groups; each rank writes what they computed to `--out`.rank."""

import argparse
import os
from pathlib import Path

import checkpoints  # noqa: F401 - registers its scenarios, as do the others
import collective_calls  # noqa: F401
import data_parallel  # noqa: F401
import sharded  # noqa: F401
import synchronised_batch_norm  # noqa: F401
import torch
import torch.distributed as dist
from scenario import GROUPS, Run

parser = argparse.ArgumentParser()
parser.add_argument("groups", help="separated by commas")
parser.add_argument("--device", default="cuda")
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--only", default="", help="scenarios, separated by commas")
args = parser.parse_args()

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
run = Run(args.device, rank, size, args.out.parent)
if args.device == "cuda":
    torch.cuda.set_device(run.device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=run.device)
else:
    dist.init_process_group("gloo")
for group in args.groups.split(","):
    for name, function in GROUPS[group].items():
        if not args.only or name in args.only.split(","):
            run.execute(name, function)
run.write(args.out.with_suffix(f".{rank}"))
dist.barrier()  # no rank leaves while another still talks to it
dist.destroy_process_group()
