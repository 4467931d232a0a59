"""Waits for events in front of work that takes seconds; the device may be anywhere in that work when the wait
is over."""

import sys

import torch

client = sys.modules["understudy.proxy_client._client"]


def behind() -> int:
    """Records that the device has not done."""
    counts = client.statistics()
    return int(counts["records"]) - int(counts["records_passed"])


def multiply(matrix: torch.Tensor, times: int) -> torch.Tensor:
    for _ in range(times):
        matrix = torch.tanh(matrix @ matrix)
    return matrix


torch.manual_seed(0)
torch.cuda.Event().synchronize()  # of nothing
small = torch.ones(4, device="cuda")
large = torch.randn(600, 600).cuda()
found = multiply(large, 1).add_(1).sum().item()  # later calls are not waited for
for turn in range(2):
    small.add_(1)
    event = torch.cuda.Event()
    event.record()
    large = multiply(large, 60)  # the event passes early in it
    event.synchronize()
    assert behind() > 5, (turn, behind())
    event.synchronize()  # it has passed
    end = torch.cuda.Event()
    end.record()
    end.synchronize()
    assert behind() == 0, (turn, behind())
sys.stdout.write(f"right {small.tolist()} {large.sum().item().hex()} {found}\n")
