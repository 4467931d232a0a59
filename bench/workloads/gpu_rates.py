"""Rates of a GPU's copies and launches, and the time to a context, as one line of JSON."""

import json
import time

import torch

BYTES = 1 << 28
LAUNCHES = 20000
found: dict[str, float] = {}
begin = time.perf_counter()
torch.zeros(1, device="cuda")
torch.cuda.synchronize()
found["context_s"] = time.perf_counter() - begin
device, other = (torch.zeros(BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
pageable = torch.zeros(BYTES, dtype=torch.uint8)
pinned = torch.zeros(BYTES, dtype=torch.uint8).pin_memory()
copies = {
    "h2d pageable": (device, pageable), "h2d pinned": (device, pinned), "d2h pageable": (pageable, device),
    "d2h pinned": (pinned, device), "d2d": (device, other),
}  # fmt: skip
for name, (to, source) in copies.items():
    to.copy_(source)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(5):
        to.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    found[name + " GB/s"] = 5 * BYTES / (time.perf_counter() - begin) / 1e9
x = torch.zeros(1, device="cuda")
torch.cuda.synchronize()
begin = time.perf_counter()
for _ in range(LAUNCHES):
    x.add_(1)
torch.cuda.synchronize()
found["eager launches/s"] = LAUNCHES / (time.perf_counter() - begin)
print(json.dumps(found))
