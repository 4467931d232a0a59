"""PyTorch's databases of operators and modules in minibatches of a hundred samples, for `--validate-every 1`.

`validated_operators.py EVERY`: one sample in EVERY of each entry. Each minibatch is repeated, as validations
are ordered some minibatches ahead; a rank alone is not validated.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]  # the databases know cuda:0 alone

import torch
import torch.distributed as dist
from bytes_of_operators import backward, modules, operators

SAMPLES, TIMES = 100, 6


def run(call: Callable[[], Any], seed: int) -> Any:
    """What it gave, which is to be alive at the end of the backward pass."""
    torch.manual_seed(seed)
    try:
        result = call()
        backward(result)
    except Exception as error:  # some refuse their arguments, which is not the question here
        if "[device call" in str(error):  # of an earlier call: nothing would run any more
            raise
        return None
    return result


warnings.simplefilter("ignore")
dist.init_process_group("nccl")
weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.1)
every, minibatches, samples, computed = int(sys.argv[1]), 0, 0, 0
remaining = itertools.chain(operators(every, "cuda:0"), modules(every, "cuda:0"))
while minibatch := list(itertools.islice(remaining, SAMPLES)):
    for _ in range(TIMES):
        kept = [run(call, seed) for seed, call in enumerate(minibatch)]
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        computed += sum(result is not None for result in kept)
        samples += len(kept)
        del kept
    minibatches += 1
print(
    f"rank {dist.get_rank()} minibatches {minibatches}, {computed} of {samples} samples\n", end="", flush=True
)
