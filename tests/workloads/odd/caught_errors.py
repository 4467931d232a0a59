"""Errors that PyTorch raises at the call and scripts catch, after the same call went well; no memory."""

import torch
import torch.distributed as dist
from odd_program import begin, device, say
from torch import linalg

begin()
weight = torch.nn.Parameter(torch.ones(4, 4, device=device))
optimizer = torch.optim.SGD([weight], lr=0.1)
good = torch.diag(torch.arange(1.0, 4.0)).to(device)
ALL_NAN, ALL_ZERO = good * float("nan"), good * 0
CALLS = {
    "eigh": (linalg.eigh, ALL_NAN),
    "eigvalsh": (linalg.eigvalsh, ALL_NAN),
    "svd": (linalg.svd, ALL_NAN),
    "svdvals": (linalg.svdvals, ALL_NAN),
    "pinv": (linalg.pinv, ALL_NAN),
    "matrix_rank": (linalg.matrix_rank, ALL_NAN),
    "eig": (linalg.eig, ALL_NAN),
    "cholesky": (linalg.cholesky, ALL_ZERO),
    "inv": (linalg.inv, ALL_ZERO),
    "solve": (lambda m: linalg.solve(m, good), ALL_ZERO),
    "histc": (torch.histc, ALL_NAN),
    "normal": (lambda m: torch.normal(m, m.abs()) * 0, None),
    "normal of a negative deviation": (lambda m: torch.normal(m, m.diagonal().sign().min() * m), -good),
}


def attempt(call: object, argument: torch.Tensor) -> str:
    try:
        call(argument)  # type: ignore[operator]
    except linalg.LinAlgError as error:
        return "LinAlgError " + str(error).split(".")[0]
    except RuntimeError as error:
        return type(error).__name__
    return "no error"


for step in range(1, 9):
    for name, (call, bad) in CALLS.items():
        say(step, name, attempt(call, good), attempt(call, good if bad is None else bad), attempt(call, good))
    try:
        torch.empty(1 << 46, device=device)
    except RuntimeError:
        say(step, "no memory")
    loss = (weight * step).square().sum()
    optimizer.zero_grad()
    loss.backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
    say(step, loss)
