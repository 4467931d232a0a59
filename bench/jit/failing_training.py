"""A training of which ranks fail, for `make bench-jit`: torchrun starts it, and starts it again.

    torchrun --nproc-per-node 2 --max-restarts 4 failing_training.py jit FOLDER --faults kill:1:14,… …

PyTorch is imported in `main`: what that takes is one of the parts.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from fault_plan import Fault

from understudy.campaigns.results.stamps import Recorder


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("way", help="undisturbed, jit or periodic")
    parser.add_argument("folder", type=Path, help="for the ranks' files and their checkpoints")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--faults", default="", help="KIND:RANK:BEHIND, of one attempt each, with commas")
    parser.add_argument("--timeout", type=float, required=True, help="of collectives, in seconds")
    parser.add_argument("--minimum-stall", type=float, required=True, help="seconds; jit's")
    parser.add_argument("--tiny", action="store_true", help="a model whose figures mean nothing")
    return parser.parse_args()


def main() -> None:
    began = time.monotonic()
    args = parse_arguments()
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    recorder = Recorder(args.folder, rank, attempt)
    recorder.write("began", began, began)
    with recorder.part("imports"):
        import failing_ways
    faults = [Fault.of(text) for text in args.faults.split(",") if text]
    now = faults[attempt] if attempt < len(faults) and faults[attempt].rank == rank else None
    failing_ways.train(args, recorder, rank, now)
    sys.stdout.flush()
    os._exit(0)  # PyTorch 2.13 aborts now and then when an interpreter ends that has used Gloo


if __name__ == "__main__":
    main()
