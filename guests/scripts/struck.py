"""Ranks that fail at chosen places: STRIKES=RANK:BATCH:PLACE[:raise],… has one for each attempt of torchrun, in order.

BATCH counts this attempt's forward passes in training from 1; PLACE is forward, backward, updated (behind the
optimizer's step), or evaluation (behind so many).  The rank (*: each) kills itself, or raises.  Scripts for
`understudy.jit` call `struck(model)`, and print through `tell` and `finish`, so that two runs can be compared.
EPOCHS=1 makes them shorter.
"""

import hashlib
import os
import signal
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

RANK = int(os.environ.get("RANK", "0"))
EPOCHS = int(os.environ.get("EPOCHS", "2"))
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def struck(model: torch.nn.Module) -> None:
    """From here on, this attempt's strike may fall. `model` is the one that is wrapped for several ranks."""
    strikes = [one for one in os.environ.get("STRIKES", "").split(",") if one]
    if len(strikes) <= ATTEMPT:
        return
    rank, batch, place, *action = strikes[ATTEMPT].split(":")
    if rank not in ("*", str(RANK)):
        return
    passes = 0

    def reach(here: str) -> None:
        if (passes, here) == (int(batch), place):
            sys.stderr.write(f"struck: rank {RANK} in its {place} pass {passes}\n")  # in one piece
            sys.stderr.flush()
            if action:
                raise RuntimeError("chosen by STRIKES")
            os.kill(os.getpid(), signal.SIGKILL)

    def forward(module: torch.nn.Module, *_: object) -> None:
        nonlocal passes
        if module.training:
            passes += 1
        reach("forward" if module.training else "evaluation")

    model.register_forward_pre_hook(forward)
    first = next(one for one in model.parameters() if one.requires_grad)
    first.register_hook(lambda _: reach("backward"))
    register_optimizer_step_post_hook(lambda *_: reach("updated"))


def tell(step: int, loss: float) -> None:
    """A loss, with all its bits."""
    if RANK == 0:
        print(f"step {step} loss {float(loss).hex()}\n", end="", flush=True)


def finish(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What the training led to.  PyTorch 2.13 aborts now and then when an interpreter ends that has used Gloo."""
    digest = hashlib.sha256()
    for _, tensor in sorted(model.state_dict().items()):
        digest.update(_bits(tensor))
    for _, state in sorted(optimizer.state_dict()["state"].items()):
        for _, value in sorted(state.items()):
            digest.update(_bits(value) if torch.is_tensor(value) else repr(value).encode())
    print(f"rank {RANK} ends with {digest.hexdigest()}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
